"""The parameters of a model's replicas."""

import json

import pytest

from gateway.config.pbtxt import parse
from gateway.errors import InferenceError
from gateway.models.replicas import READERS, ReplicaRules

COUNT = "a number from 1 to 9999, or a range such as 0..8"
LABELS = 'JSON with labels of Ray such as {"ray.io/accelerator-type": "H100"}'
AMOUNTS = (
    'JSON with amounts above 0 such as {"GPU": 1, "CPU": 4}, whole GPUs above 1, or a list of such '
    "bundles with one GPU each"
)


def rules(text: str = "", **parameters: str) -> ReplicaRules:
    for key, value in parameters.items():
        text += f"parameters {{ key: '{key}' value {{ string_value: '{value}' }} }}\n"
    return ReplicaRules.read(parse(f"name: 'm'\n{text}", "m/config.pbtxt"))


def test_a_model_has_one_replica_with_a_cpu() -> None:
    assert rules() == ReplicaRules(least=1, most=1, resources={"CPU": 1})


@pytest.mark.parametrize(
    ("value", "found"), [("2", (2, 2)), ("1..8", (1, 8)), ("3..3", (3, 3)), ("0..4", (0, 4))]
)
def test_replicas_are_a_number_or_a_range(value: str, found: tuple[int, int]) -> None:
    read = rules(replicas=value)
    assert (read.least, read.most) == found


@pytest.mark.parametrize(
    ("groups", "gpus"),
    [
        ("instance_group { kind: KIND_CPU }", None),
        ("instance_group { kind: KIND_GPU }", 1),
        ("instance_group { kind: KIND_GPU gpus: [0, 1] } instance_group { kind: KIND_GPU }", 2),
    ],
)
def test_a_model_on_gpus_needs_those_of_its_instances(groups: str, gpus: float | None) -> None:
    assert rules(groups).resources.get("GPU") == gpus


def test_resources_labels_and_times_are_read() -> None:
    assert rules(
        replica_resources='{"GPU": 0.5, "stub": 1}',
        replica_labels='{"zone": "a"}',
        scale_target_wait_ms="250",
        scale_up_secs="2",
        scale_down_secs="60",
        scale_to_zero_secs="30",
        cold_start_limit_secs="40",
        start_limit_secs="7200",
    ) == ReplicaRules(
        resources={"GPU": 0.5, "stub": 1},
        labels={"zone": "a"},
        target_wait_secs=0.25,
        up_secs=2,
        down_secs=60,
        to_zero_secs=30,
        cold_start_secs=40,
        start_secs=7200,
    )


@pytest.mark.parametrize(
    "labels",
    [
        {"ray.io/accelerator-type": "H100", "zone": ""},
        {"a": "!b", "c_d": "in(x, y)", "e.f": "!in(x,y-z)"},
        {"a" * 63: "x" * 63},
    ],
    ids=["prefix", "operators", "longest"],
)
def test_labels_are_selectors_of_ray(labels: dict[str, str]) -> None:
    assert rules(replica_labels=json.dumps(labels)).labels == labels


WRONG = [
    *[("replicas", value, COUNT) for value in ("", "0", "0..0", "8..1", "1..", "-1", "x", "1.5")],
    *[
        ("replica_resources", value, AMOUNTS)
        for value in (
            *("{}", "1", '{"GPU": 1.5}', '{"CPU": 0}', '{"CPU": "1"}', '{"": 1}', "{"),
            *("[]", "[1]", "[{}]", '[{"GPU": 2}]', '[{"GPU": 1}, {"CPU": 1}]', '[{"GPU": 0.5}]'),
        )
    ],
    *[
        ("replica_labels", value, LABELS)
        for value in (
            *('{"a": 1}', '{"a": "H100 SXM"}', '{"a": "-x"}', '{"a": "in(x"}', '{"a": "!!x"}'),
            *('{"": "x"}', '{"a b": "x"}', '{"a/": "x"}', '{"-a/b": "x"}', '{"a/b/c": "x"}'),
            *(f'{{"{"a" * 64}": "x"}}', f'{{"a": "{"x" * 64}"}}'),
        )
    ],
    ("scale_target_wait_ms", "0", "a whole number from 1 to 86400000"),
    ("scale_up_secs", "1.5", "a whole number from 1 to 86400"),
    ("scale_down_secs", "86401", "a whole number from 1 to 86400"),
    ("scale_to_zero_secs", "0", "a whole number from 1 to 86400"),
    ("cold_start_limit_secs", "-1", "a whole number from 1 to 86400"),
    ("start_limit_secs", "0", "a whole number from 1 to 86400"),
]


@pytest.mark.parametrize(("key", "value", "expected"), WRONG)
def test_a_wrong_value_is_refused(key: str, value: str, expected: str) -> None:
    with pytest.raises(InferenceError) as caught:
        rules(**{key: value})
    text = f"model 'm': parameter '{key}' is '{value}', expected {expected}"
    assert caught.value.message == text


def test_every_parameter_is_refused_with_a_wrong_value() -> None:
    assert {key for key, _, _ in WRONG} == READERS.keys()
