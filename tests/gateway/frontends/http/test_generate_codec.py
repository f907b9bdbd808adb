"""The generate extension: JSON to tensors and back (protocol, Generate)."""

from typing import Any

import pytest

from gateway.config import ModelConfig, ModelInput
from gateway.config.data_type import DataType
from gateway.errors import Code
from gateway.frontends.http.generate_codec import MOST_DEPTH
from tests.builders import TEXT
from tests.gateway.frontends.http.generate_requests import LLM, decode, refusal

# The body.


# Members (protocol 10.1).


def test_members_are_inputs_by_name_and_parameters_otherwise() -> None:
    request = decode(
        TEXT, text_input="hi", id="r1", temperature=0.5, top_k=3, greedy=True, stop="x"
    )
    assert request.model == "text"
    assert request.id == "r1"
    assert [(each.name, each.shape, each.elements()) for each in request.inputs] == [
        ("text_input", (1,), (b"hi",))
    ]
    assert request.parameters == {
        "id": "r1",
        "temperature": 0.5,
        "top_k": 3,
        "greedy": True,
        "stop": "x",
    }


@pytest.mark.parametrize(
    "key",
    ["priority", "timeout", "sequence_id", "binary_data_output", "triton_x", "stream", "headers"],
)
def test_no_key_means_scheduling(key: str) -> None:
    request = decode(TEXT, text_input="hi", **{key: 1})
    assert request.parameters == {key: 1}
    assert (request.priority, request.timeout_us, request.sequence) == (0, 0, None)


def test_the_members_of_parameters_count_as_if_they_stood_outside() -> None:
    request = decode(TEXT, parameters={"text_input": "hi", "top_k": 3})
    assert [each.elements() for each in request.inputs] == [(b"hi",)]
    assert request.parameters == {"top_k": 3}


def test_a_request_without_an_id_has_none() -> None:
    assert decode(TEXT, text_input="hi").id == ""


@pytest.mark.parametrize("value", [5, None, ["r1"], {"a": 1}, True])
def test_an_id_is_a_string(value: object) -> None:
    assert refusal(TEXT, text_input="hi", id=value) == (
        Code.INTERNAL,
        "Unable to parse 'id': attempt to access JSON non-string as string",
    )


def test_an_input_may_be_called_id() -> None:
    tensor = ModelInput(name="id", data_type=DataType.TYPE_INT32, dims=(2,))
    request = decode(ModelConfig(name="m", input=(tensor,)), id=[1, 2])
    assert [each.array().tolist() for each in request.inputs] == [[1, 2]]
    assert (request.id, request.parameters) == ("", {})


@pytest.mark.parametrize("value", [None, [1], {"a": 1}])
def test_a_parameter_is_a_string_a_number_or_a_boolean(value: object) -> None:
    assert refusal(TEXT, text_input="hi", stop=value) == (
        Code.INVALID_ARG,
        "parameter 'stop' has invalid type. It should be either 'int', 'bool', or 'string'.",
    )


def test_the_parameters_of_an_llm_may_be_any_json() -> None:
    request = decode(LLM, text_input="hi", stop=["a", "b"], logit_bias={"5": -1}, seed=None)
    assert request.parameters == {"stop": ["a", "b"], "logit_bias": {"5": -1}, "seed": None}


def test_a_parameter_of_an_llm_has_a_greatest_depth() -> None:
    value: Any = "a"
    for _ in range(MOST_DEPTH // 2):
        value = {"a": [value, 1]}
    assert decode(LLM, text_input="hi", schema=value).parameters == {"schema": value}
    assert refusal(LLM, text_input="hi", schema=[value]) == (
        Code.INVALID_ARG,
        "parameter 'schema' is nested too deeply, expected at most 200 levels",
    )


@pytest.mark.parametrize("value", [None, 1, "x", ["a"]])
def test_parameters_must_be_an_object(value: object) -> None:
    assert refusal(TEXT, text_input="hi", parameters=value) == (
        Code.INTERNAL,
        "Expected JSON object for keyword: 'parameters': attempt to access JSON non-object as "
        "object",
    )


def test_an_error_inside_parameters_says_where_it_is() -> None:
    assert refusal(TEXT, text_input="hi", parameters={"stop": None}) == (
        Code.INVALID_ARG,
        "Converting keyword: 'parameters': parameter 'stop' has invalid type. It should be either "
        "'int', 'bool', or 'string'.",
    )


def test_parameters_do_not_nest() -> None:
    code, text = refusal(TEXT, text_input="hi", parameters={"parameters": {"top_k": 1}})
    assert code is Code.INVALID_ARG
    assert text.startswith("Converting keyword: 'parameters': parameter 'parameters' has invalid")


def test_an_input_cannot_be_called_parameters() -> None:
    tensor = ModelInput(name="parameters", data_type=DataType.TYPE_INT32, dims=(1,))
    assert refusal(ModelConfig(name="m", input=(tensor,)), parameters={"a": 1}) == (
        Code.INVALID_ARG,
        "Keyword 'parameters' for nested schema also given as input tensor name",
    )


@pytest.mark.parametrize(
    ("members", "prefix"),
    [
        (
            {"text_input": "a", "parameters": {"text_input": "b"}, "id": "r1"},
            "Converting keyword: 'parameters': ",
        ),
        ({"parameters": {"text_input": "b"}, "text_input": "a", "id": "r1"}, ""),
    ],
    ids=["second inside", "second outside"],
)
def test_an_input_is_given_once(members: dict[str, Any], prefix: str) -> None:
    assert refusal(TEXT, **members) == (
        Code.INVALID_ARG,
        f"{prefix}[request id: r1] input 'text_input' already exists in request",
    )
