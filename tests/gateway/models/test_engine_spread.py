"""The GPUs of an engine, from `model.json`, and the places of a replica with them."""

import json
from pathlib import Path

import pytest

from gateway.config import ModelConfig
from gateway.config.pbtxt import parse
from gateway.errors import InferenceError
from gateway.models.engine_spread import engine_spread
from gateway.models.replicas import EngineSpread, ReplicaRules
from gateway.models.repository import ModelRepository
from tests.builders import add_model

RAY = {"distributed_executor_backend": "ray"}
FOUR = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
BUNDLE = {"GPU": 1.0, "CPU": 1.0}


def config_of(text: str = 'backend: "vllm"', resources: object = None) -> ModelConfig:
    if resources is not None:
        value = json.dumps(resources)
        text += f"\nparameters {{ key: 'replica_resources' value {{ string_value: '{value}' }} }}"
    return parse(f"name: 'm'\n{text}", "m/config.pbtxt")


def spread_of(folder: Path, config: ModelConfig, *files: object) -> EngineSpread:
    """The spread of a model with a `model.json` in each version; a text is written as it is."""
    versions = [str(number) for number, _ in enumerate(files, 1)]
    model = add_model(folder, "m", "", versions)
    for version, content in zip(versions, files, strict=True):
        if content is not None:
            text = content if isinstance(content, str) else json.dumps(content)
            (model / version / "model.json").write_text(text)
    return engine_spread(config, ModelRepository([folder]).find("m"))


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (None, EngineSpread()),
        ({}, EngineSpread()),
        (FOUR, EngineSpread(4)),
        (FOUR | {"data_parallel_size": 3}, EngineSpread(12)),
        (FOUR | RAY | {"prefill_context_parallel_size": 2}, EngineSpread(8, by_ray=True)),
        (RAY | {"tensor_parallel_size": "two"}, EngineSpread(1, by_ray=True)),
    ],
    ids=["no-file", "no-sizes", "one-node", "engines", "ray", "wrong-size"],
)
def test_an_engine_of_vllm_has_as_many_gpus_as_its_file_says(
    tmp_path: Path, content: object, found: EngineSpread
) -> None:
    assert spread_of(tmp_path, config_of(), content) == found


def test_other_backends_read_no_file_of_vllm(tmp_path: Path) -> None:
    assert spread_of(tmp_path, config_of('backend: "python"'), FOUR | RAY) == EngineSpread()


def test_the_engines_of_several_versions_have_gpus_of_their_own(tmp_path: Path) -> None:
    every = config_of('backend: "vllm" version_policy { all { } }')
    assert spread_of(tmp_path / "some", every, FOUR, {}, FOUR) == EngineSpread(9)
    assert spread_of(tmp_path / "none", every, {}, {}) == EngineSpread()


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        (["{"], "its 1/model.json is not valid JSON"),
        (["[]"], "its 1/model.json must be a JSON object"),
        (
            [RAY | {"data_parallel_size": 2}],
            "its 1/model.json has 'data_parallel_size' 2, expected 1 with "
            "'distributed_executor_backend' 'ray', because a replica has one engine",
        ),
        (
            [RAY, RAY],
            "its policy picks 2 versions, expected one, because its model.json has "
            "'distributed_executor_backend' 'ray': a replica has the GPUs of one engine",
        ),
    ],
    ids=["no-json", "no-object", "two-engines", "two-versions"],
)
def test_a_file_that_cannot_be_used_is_refused(
    tmp_path: Path, files: list[object], reason: str
) -> None:
    config = config_of('backend: "vllm" version_policy { all { } }')
    with pytest.raises(InferenceError) as caught:
        spread_of(tmp_path, config, *files)
    assert caught.value.message.startswith(f"model 'm': {reason}")


def test_the_ray_workers_of_an_engine_have_a_bundle_each_and_the_replica_nothing() -> None:
    rules = ReplicaRules.read(config_of(), EngineSpread(4, by_ray=True))
    assert (rules.resources, list(rules.bundles)) == ({}, [BUNDLE] * 4)
    assert rules.places == "4 x (1 GPU, 1 CPU)"
    own = config_of(resources=[{"GPU": 1, "CPU": 8}, {"GPU": 1}])
    rules = ReplicaRules.read(own, EngineSpread(2, by_ray=True))
    assert (rules.resources, list(rules.bundles)) == ({}, [{"GPU": 1, "CPU": 8}, {"GPU": 1}])
    assert rules.places == "1 x (1 GPU, 8 CPU), 1 x (1 GPU)"


def test_an_engine_on_one_node_has_its_gpus_there() -> None:
    rules = ReplicaRules.read(config_of(), EngineSpread(4))
    assert (rules.resources, rules.bundles) == ({"CPU": 1, "GPU": 4}, ())


@pytest.mark.parametrize(
    ("resources", "spread", "expected"),
    [
        (
            {"GPU": 4},
            EngineSpread(4, by_ray=True),
            "a list of 4 bundles with one GPU each, for the Ray workers of its model.json",
        ),
        (
            [BUNDLE] * 3,
            EngineSpread(4, by_ray=True),
            "a list of 4 bundles with one GPU each, for the Ray workers of its model.json",
        ),
        (
            [BUNDLE] * 4,
            EngineSpread(4),
            'the resources of one node: bundles are for a model.json with "distributed_executor_'
            'backend": "ray"',
        ),
    ],
    ids=["one-node", "too-few", "without-ray"],
)
def test_resources_that_do_not_fit_the_engine_are_refused(
    resources: object, spread: EngineSpread, expected: str
) -> None:
    config = config_of(resources=resources)
    with pytest.raises(InferenceError) as caught:
        ReplicaRules.read(config, spread)
    given = f"parameter 'replica_resources' is '{json.dumps(resources)}'"
    assert caught.value.message == f"model 'm': {given}, expected {expected}"
    # The config alone does not say what the engine has.
    assert ReplicaRules.read(config).most == 1
