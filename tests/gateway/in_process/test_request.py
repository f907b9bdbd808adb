"""The keywords of a call become a request."""

from typing import Any

import numpy as np
import pytest

from gateway.config import ModelInput
from gateway.config.data_type import DataType
from gateway.errors import Code, InferenceError
from gateway.in_process.request import draft
from gateway.messages import RequestedOutput, SequenceTag
from tests.builders import TEXT


def test_every_field_of_a_call_arrives() -> None:
    fields: Any = {
        "inputs": {"text_input": ["a"]},
        "outputs": ["text_output"],
        "parameters": {"max_tokens": 3, "flag": True, "t": 0.5, "s": "x"},
        "request_id": "7",
        "correlation_id": 42,
        "sequence_start": True,
        "sequence_end": True,
        "priority": 2,
        "timeout": 1000,
    }
    request = draft("text", "3", fields).complete(TEXT)
    assert (request.model, request.version, request.id) == ("text", "3", "7")
    assert request.inputs[0].elements() == (b"a",)
    assert request.outputs == (RequestedOutput("text_output"),)
    assert request.parameters == {"max_tokens": 3, "flag": True, "t": 0.5, "s": "x"}
    assert request.sequence == SequenceTag(42, start=True, end=True)
    assert (request.priority, request.timeout_us) == (2, 1000)
    assert request.received_ns > 0


def test_a_call_that_says_nothing_asks_for_the_defaults() -> None:
    request = draft("text", "", {}).complete(TEXT)
    assert (request.inputs, request.outputs, request.parameters) == ((), (), {})
    assert (request.sequence, request.priority, request.timeout_us) == (None, 0, 0)


def test_a_list_and_an_array_may_stand_side_by_side() -> None:
    number = ModelInput(name="n", data_type=DataType.TYPE_INT32, dims=(1,))
    config = TEXT.__class__(name="m", input=(*TEXT.input, number))
    inputs = {"n": [5], "text_input": np.array(["a"])}
    request = draft("m", "", {"inputs": inputs}).complete(config)
    found = {tensor.name: tensor.array().tolist() for tensor in request.inputs}
    assert found == {"n": [5], "text_input": [b"a"]}


def test_models_that_sample_take_any_json_as_parameters() -> None:
    sampling = ModelInput(name="sampling_parameters", data_type=DataType.TYPE_STRING, dims=(1,))
    config = TEXT.__class__(name="m", input=(sampling,))
    asked = draft("m", "", {"parameters": {"stop": ["a"]}})
    assert asked.complete(config).parameters == {"stop": ["a"]}
    with pytest.raises(InferenceError, match="parameter 'stop' is list, expected str, int"):
        asked.complete(TEXT)


@pytest.mark.parametrize(
    ("fields", "code", "text"),
    [
        ({"input": {}}, Code.INVALID_ARG, "a request has no 'input', expected one of inputs,"),
        ({"inputs": [1]}, Code.INVALID_ARG, "inputs is list, expected a mapping"),
        ({"parameters": {"triton_x": 1}}, Code.INVALID_ARG, "reserved for Triton usage"),
        ({"correlation_id": -1}, Code.INVALID_ARG, "correlation_id is -1"),
        ({"correlation_id": 1.5}, Code.INVALID_ARG, "correlation_id is 1.5"),
        ({"correlation_id": "x" * 129}, Code.UNSUPPORTED, "longer than 128 characters"),
        ({"correlation_id": 2**64}, Code.INVALID_ARG, "correlation_id is 18446744073709551616"),
        (
            {"correlation_id": 1, "sequence_start": "yes"},
            Code.INVALID_ARG,
            "sequence_start is 'yes', expected a bool",
        ),
        ({"inputs": {1: ["a"]}}, Code.INVALID_ARG, "the name of an input is 1, expected a str"),
        ({"outputs": "y"}, Code.INVALID_ARG, "outputs is 'y', expected a sequence of names"),
        ({"outputs": None}, Code.INVALID_ARG, "outputs is None, expected a sequence of names"),
        ({"outputs": [1]}, Code.INVALID_ARG, "the name of an output is 1, expected a str"),
        ({"request_id": 5}, Code.INVALID_ARG, "request_id is 5, expected a str"),
        ({"parameters": {1: 2}}, Code.INVALID_ARG, "the name of a parameter is 1, expected a str"),
        ({"parameters": [1]}, Code.INVALID_ARG, "parameters is list, expected a mapping"),
        ({"priority": 2**64}, Code.INVALID_ARG, "expected a whole number from 0 to 2^64 - 1"),
        ({"priority": -1}, Code.INVALID_ARG, "priority is -1"),
        ({"timeout": 0.5}, Code.INVALID_ARG, "timeout is 0.5"),
    ],
)
def test_a_call_that_can_be_of_no_model_is_refused(fields: Any, code: Code, text: str) -> None:
    with pytest.raises(InferenceError) as caught:
        draft("text", "", fields)
    assert caught.value.code is code
    assert text in caught.value.message


def test_the_longest_correlation_id_is_taken() -> None:
    request = draft("text", "", {"correlation_id": "x" * 128}).request
    assert request.sequence == SequenceTag("x" * 128)
