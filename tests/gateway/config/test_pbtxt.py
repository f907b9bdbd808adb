"""Texts, messages, JSON and dataclasses of one configuration agree."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.config import (
    AllVersions,
    HistogramOptions,
    InstanceGroup,
    InstanceKind,
    MetricControl,
    MetricIdentifier,
    ModelConfig,
    ModelInput,
    ModelMetrics,
    RateLimiter,
    Resource,
    TensorReshape,
    VersionPolicy,
    WarmupInput,
    pbtxt,
)
from gateway.config.data_type import DataType
from gateway.config.scheduling import QueuePolicy, TimeoutAction
from gateway.errors import Code, InferenceError
from gateway.models.normalisation import normalise
from gateway.protos import model_config_pb2

DATA = Path(__file__).parent / "data"
RECORDED = sorted(path.stem for path in DATA.glob("*.pbtxt"))
"""Configurations, and the answers of Triton 2.51 for their models."""

ABSENT = object()
DIFFERENCES: dict[str, list[tuple[tuple[str | int, ...], Any]]] = {
    # Triton turns int64 into numbers along the paths it knows; deeper ones stay strings.
    "sequence": [(("sequence_batching", "state", 0, "initial_state", 0, "dims"), [1])],
    "versions": [(("optimization", "cuda", "graph_spec", 0, "input", "IN", "dim"), [2, 3])],
    "ensemble": [
        # The field is newer than 2.51.
        (("ensemble_scheduling", "max_inflight_requests"), 0),
        # Taken over from a member when an ensemble is loaded; the file does not say it.
        (("model_transaction_policy",), ABSENT),
    ],
}
"""The places where our answer is another one than Triton's, by the path into the JSON."""


def config_text(name: str) -> str:
    return (DATA / f"{name}.pbtxt").read_text()


def recorded(name: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads((DATA / f"{name}.json").read_text())
    for (*above, last), value in DIFFERENCES.get(name, []):
        owner: Any = answer
        for step in above:
            owner = owner[step]
        if value is ABSENT:
            del owner[last]
        else:
            assert owner.get(last) != value, "no longer a difference"
            owner[last] = value
    return answer


def normalised(name: str) -> ModelConfig:
    files = frozenset() if name == "ensemble" else frozenset({"model.py"})
    return normalise(pbtxt.parse(config_text(name), f"{name}.pbtxt"), name, files)


def orders(members: Any) -> Iterator[list[str]]:
    """The names of the members, in order, of every message in three levels of a JSON form."""
    yield list(members)
    for key, value in members.items():
        if key in {"parameters", "metric_tags", "cc_model_filenames", "state"}:
            continue  # Maps have no order; Triton puts members of a oneof last in `state`.
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, dict):
                yield list(each)


def test_configurations_recorded_from_triton_are_there() -> None:
    assert RECORDED


@pytest.mark.parametrize("name", RECORDED)
def test_the_json_form_of_a_normalised_config_is_tritons(name: str) -> None:
    assert pbtxt.to_json(normalised(name)) == recorded(name)


@pytest.mark.parametrize("name", [each for each in RECORDED if each != "ensemble"])
def test_the_members_of_the_json_form_have_tritons_order(name: str) -> None:
    assert list(orders(pbtxt.to_json(normalised(name)))) == list(orders(recorded(name)))


@pytest.mark.parametrize("name", RECORDED)
def test_a_config_survives_message_and_text(name: str) -> None:
    config = normalised(name)
    assert pbtxt.from_message(pbtxt.to_message(config)) == config
    assert pbtxt.parse(pbtxt.to_text(config), name) == config


def test_an_empty_text_is_a_config_with_every_default() -> None:
    assert pbtxt.parse("", "m/config.pbtxt") == ModelConfig()
    assert pbtxt.to_message(ModelConfig()) == model_config_pb2.ModelConfig()


def fill(message: Any) -> Any:
    """Give every field of a message a value; of a oneof the last member."""
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            key = 7 if field.message_type.fields_by_name["key"].cpp_type != 9 else "key"
            if field.message_type.fields_by_name["value"].message_type is not None:
                fill(value[key])
            else:
                value[key] = "value"
        elif field.message_type is not None:
            fill(value.add() if field.is_repeated else value)
            if not field.is_repeated:
                value.SetInParent()
        elif field.is_repeated:
            value.extend([example(field), example(field)])
        else:
            setattr(message, field.name, example(field))
    return message


def example(field: Any) -> Any:
    if field.enum_type is not None:
        return field.enum_type.values[-1].number
    if field.cpp_type == field.CPPTYPE_BOOL:
        return True
    if field.cpp_type == field.CPPTYPE_STRING:
        return f"{field.name} é"
    return 0.25 if field.cpp_type in (field.CPPTYPE_FLOAT, field.CPPTYPE_DOUBLE) else field.number


@pytest.mark.parametrize("choice", ["dynamic_batching", "sequence_batching", "ensemble_scheduling"])
def test_every_field_of_a_message_is_in_its_config(choice: str) -> None:
    message = fill(model_config_pb2.ModelConfig())
    chosen = fill(getattr(model_config_pb2.ModelConfig(), choice))
    getattr(message, choice).CopyFrom(chosen)
    assert message.WhichOneof("scheduling_choice") == choice
    assert pbtxt.to_message(pbtxt.from_message(message)) == message


def test_a_message_that_is_present_but_empty_stays_present() -> None:
    config = pbtxt.parse(
        'version_policy { all { } } input { name: "x" reshape { } }', "m/config.pbtxt"
    )
    assert config.version_policy == VersionPolicy(all=AllVersions())
    assert config.input[0].reshape == TensorReshape()
    assert pbtxt.from_message(pbtxt.to_message(config)) == config
    assert pbtxt.to_json(config)["version_policy"] == {"all": {}}


def test_parameters_are_strings_in_the_config_only() -> None:
    config = pbtxt.parse('parameters { key: "k" value { string_value: "v" } }', "m/config.pbtxt")
    assert config.parameters == {"k": "v"}
    assert pbtxt.to_message(config).parameters["k"].string_value == "v"
    assert pbtxt.to_json(config)["parameters"] == {"k": {"string_value": "v"}}


def test_keys_of_the_json_form_are_strings_and_large_integers_are_numbers() -> None:
    config = pbtxt.parse(
        "dynamic_batching { priority_queue_policy { key: 2 value { timeout_action: DELAY "
        "default_timeout_microseconds: 18446744073709551615 } } }",
        "m/config.pbtxt",
    )
    assert config.dynamic_batching is not None
    assert config.dynamic_batching.priority_queue_policy == {
        2: QueuePolicy(timeout_action=TimeoutAction.DELAY, default_timeout_microseconds=2**64 - 1)
    }
    policies = pbtxt.to_json(config)["dynamic_batching"]["priority_queue_policy"]
    assert policies["2"]["default_timeout_microseconds"] == 2**64 - 1


def test_a_member_of_a_oneof_is_none_until_it_is_given() -> None:
    warmup = 'model_warmup { inputs { key: "x" value { zero_data: false } } }'
    config = pbtxt.parse(warmup, "m/config.pbtxt")
    assert config.model_warmup[0].inputs == {"x": WarmupInput(zero_data=False)}
    assert pbtxt.to_json(config)["model_warmup"][0]["inputs"]["x"] == {
        "data_type": "TYPE_INVALID",
        "dims": [],
        "zero_data": False,
    }


def test_a_field_whose_name_python_reserves_keeps_its_name_outside() -> None:
    config = ModelConfig(
        instance_group=(
            InstanceGroup(
                kind=InstanceKind.KIND_CPU,
                rate_limiter=RateLimiter(resources=(Resource(name="r", global_=True),)),
            ),
        )
    )
    [group] = pbtxt.to_json(config)["instance_group"]
    assert group["rate_limiter"]["resources"] == [{"name": "r", "global": True, "count": 0}]
    assert "global: true" in pbtxt.to_text(config)


def test_single_precision_numbers_read_as_in_the_file() -> None:
    text = "sequence_batching { direct { minimum_slot_utilization: 0.7 } }"
    direct = pbtxt.to_json(pbtxt.parse(text, "m/config.pbtxt"))["sequence_batching"]["direct"]
    assert direct["minimum_slot_utilization"] == 0.7


def test_numbers_that_json_does_not_have_are_strings() -> None:
    histogram = MetricControl(
        metric_identifier=MetricIdentifier(family="f"),
        histogram_options=HistogramOptions(buckets=(0.5, float("inf"), -float("inf"))),
    )
    config = ModelConfig(model_metrics=ModelMetrics(metric_control=(histogram,)))
    [control] = pbtxt.to_json(config)["model_metrics"]["metric_control"]
    assert control["histogram_options"] == {"buckets": [0.5, "Infinity", "-Infinity"]}


def test_what_a_text_may_look_like() -> None:
    text = """
        max_batch_size: 0x8  # comments, and other brackets, quotes and separators
        input < name: 'a\\tb' "c"; data_type: TYPE_INT32, dims: 1 dims: -1 optional: True >
    """
    assert pbtxt.parse(text, "m/config.pbtxt") == ModelConfig(
        max_batch_size=8,
        input=(
            ModelInput(name="a\tbc", data_type=DataType.TYPE_INT32, dims=(1, -1), optional=True),
        ),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "\nmax_batchsize: 3",
            "line 2, column 1: found unknown field 'max_batchsize', expected a field of "
            "ModelConfig, such as 'max_batch_size'",
        ),
        (
            "optimization { cuda { xyz: 1 } }",
            "line 1, column 23: found unknown field 'xyz', expected a field of "
            "ModelOptimizationPolicy.Cuda",
        ),
        (
            "input { format: FORMAT_X }",
            "line 1, column 17: found FORMAT_X, expected one of FORMAT_NONE, FORMAT_NHWC, "
            "FORMAT_NCHW",
        ),
        (
            "version_policy { latest { } all { } }",
            "line 1, column 29: found all, expected at most one of 'all' and 'latest'",
        ),
        ('name: "a"\n name: "b"', "line 2, column 8: found \"b\", expected 'name' only once"),
        ('max_batch_size: "1"', 'line 1, column 17: found "1", expected an integer'),
        (
            "max_batch_size: 2147483648",
            "line 1, column 17: found 2147483648, expected an integer in the range of the field",
        ),
        ("name: 3", "line 1, column 7: found 3, expected a string in quotes"),
        (
            'name: "a',
            'line 1, column 7: found "a, expected a closing quote on the same line',
        ),
        ("}", "line 1, column 1: found }, expected the name of a field"),
        ('max_batch_size "1"', 'line 1, column 16: found "1", expected ":"'),
        ("name", 'line 1, column 5: found the end of the line, expected ":"'),
        (
            'name: "caf\udce9"',
            "line 1, column 7: found '\"caf\\udce9\"', expected text in UTF-8",
        ),
        (
            'name: "a"\ninput { data_type: 99999999999 }',
            "line 2, column 20: found 99999999999, expected a value's name",
        ),
        (
            "input { data_type: \udcff }",
            "line 1, column 20: found '\\udcff', expected a value's name",
        ),
    ],
)
def test_a_mistake_has_position_finding_and_expectation(text: str, message: str) -> None:
    with pytest.raises(InferenceError) as caught:
        pbtxt.parse(text, "m/config.pbtxt")
    assert caught.value.message == f"m/config.pbtxt, {message}"
    assert caught.value.code is Code.INVALID_ARG


def test_bytes_that_are_not_utf_8_are_allowed_in_comments() -> None:
    assert pbtxt.parse("# caf\udce9\nmax_batch_size: 1", "m") == ModelConfig(max_batch_size=1)


def test_a_number_that_names_no_value_of_an_enum_is_a_mistake() -> None:
    with pytest.raises(InferenceError) as caught:
        pbtxt.parse("instance_group { kind: 9 }", "m/config.pbtxt")
    assert caught.value.message == (
        "m/config.pbtxt: found kind 9, expected one of KIND_AUTO, KIND_GPU, KIND_CPU, KIND_MODEL"
    )


def test_a_text_without_mistake_has_none() -> None:
    assert pbtxt.find_mistake(config_text("batching")) is None
    mistake = pbtxt.find_mistake("\nxyz: 1")
    assert mistake is not None
    assert (mistake.line, mistake.column, mistake.unknown_field) == (2, 1, "xyz")


# The JSON of a load request.


def test_json_is_read_as_the_text_would_be() -> None:
    config = pbtxt.parse_json(
        """{
          "backend": "x", "maxBatchSize": 3,
          "input": [{"name": "I", "data_type": "type_fp32", "dims": ["1", -1]}],
          "instance_group": [{"kind": "Kind_Cpu", "count": 2}],
          "dynamic_batching": {"priority_queue_policy": {"1": {"timeout_action": "delay"}}},
          "parameters": {"type_fp32": {"string_value": "as it is"}}
        }"""
    )
    text = """
      backend: "x" max_batch_size: 3
      input { name: "I" data_type: TYPE_FP32 dims: [1, -1] }
      instance_group { kind: KIND_CPU count: 2 }
      dynamic_batching { priority_queue_policy { key: 1 value { timeout_action: DELAY } } }
      parameters { key: "type_fp32" value { string_value: "as it is" } }
    """
    assert config == pbtxt.parse(text, "m/config.pbtxt")


def test_the_json_form_of_a_config_can_be_parsed() -> None:
    config = pbtxt.parse('backend: "x" input { name: "I" data_type: TYPE_STRING dims: 1 }', "m")
    assert pbtxt.parse_json(json.dumps(pbtxt.to_json(config))) == config


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "1", "null", "[" * 100_000, '{"a":' * 100_000),
        *('{"nope": 1}', '{"max_batch_size": "x"}', '{"max_batch_size": 99999999999}'),
        *('{"input": 5}', '{"input": [5]}', '{"input": [{"data_type": "TYPE_X"}]}'),
        '{"input": [{"data_type": "\\ud800"}]}',
        '{"dynamic_batching": {}, "sequence_batching": {}}',
    ],
)
def test_json_that_is_no_config_is_refused(text: str) -> None:
    with pytest.raises(InferenceError, match="Invalid config override: ") as caught:
        pbtxt.parse_json(text)
    assert caught.value.code is Code.INVALID_ARG
    assert len(caught.value.message) < 500
