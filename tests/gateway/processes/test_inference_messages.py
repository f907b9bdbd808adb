"""Requests, responses and errors between processes are read as they were written."""

import math
from typing import Any

import numpy as np
import pytest

from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest, InferResponse, Phases, Usage
from gateway.openai_contract import OpenAiRefusal
from gateway.policy.caller import Caller, tenant_of
from gateway.processes.inference_messages import (
    read_error,
    read_request,
    read_response,
    write_error,
    write_request,
    write_response,
)
from gateway.tensor import Datatype, Tensor, array_tensor, text_tensor

VALUES = [
    True,
    False,
    0,
    -(1 << 63),
    (1 << 64) - 1,
    0.5,
    math.inf,
    "",
    "é\0",
    [1, ["a"]],
    {"a": {}},
]


@pytest.mark.parametrize("value", [*VALUES, None])
def test_parameters_of_a_request(value: Any) -> None:
    found = read_request(write_request(InferRequest(model="m", parameters={"p": value})))
    assert found.parameters == {"p": value}
    assert type(found.parameters["p"]) is type(value)


def test_a_number_that_is_none() -> None:
    found = read_request(write_request(InferRequest(model="m", parameters={"p": math.nan})))
    assert math.isnan(found.parameters["p"])


@pytest.mark.parametrize("value", [1 << 64, object()])
def test_a_parameter_that_cannot_be_written_is_refused(value: Any) -> None:
    with pytest.raises(InferenceError, match="'m': the parameters of the request") as caught:
        write_request(InferRequest(model="m", parameters={"p": value}))
    assert caught.value.code is Code.INVALID_ARG


TENSORS = [
    text_tensor("text", ["", "é", "x" * 70_000]),
    Tensor("wire", Datatype.BYTES, (1,), b"\2\0\0\0hi"),
    Tensor("none", Datatype.BYTES, (0,), ()),
    array_tensor("stream", Datatype.BOOL, np.array([True])),
    array_tensor("numbers", Datatype.FP32, np.arange(6, dtype=np.float32).reshape(2, 3)),
    Tensor("half", Datatype.BF16, (2,), bytearray(b"\0\1\2\3")),
    array_tensor("scalar", Datatype.INT64, np.array(5)),
]


@pytest.mark.parametrize("tensor", TENSORS, ids=lambda tensor: tensor.name)
def test_tensors_of_requests_and_responses(tensor: Tensor) -> None:
    asked = read_request(write_request(InferRequest(model="m", inputs=(tensor,))))
    answered = read_response(write_response(InferResponse(outputs=(tensor,))))
    for (found,) in (asked.inputs, answered.outputs):
        assert (found.name, found.datatype, found.shape) == (
            tensor.name,
            tensor.datatype,
            tensor.shape,
        )
        assert bytes(found.raw()) == bytes(tensor.raw())
        assert isinstance(found.datatype, Datatype)
        assert isinstance(found.data, tuple) == isinstance(tensor.data, tuple)


def test_the_model_its_version_and_the_id_are_sent() -> None:
    asked = InferRequest(model="m", version="2", id="seven")
    assert read_request(write_request(asked)) == asked


@pytest.mark.parametrize(
    "response",
    [
        InferResponse(),
        InferResponse(final=True),
        InferResponse(usage=Usage(prompt_tokens=3, completion_tokens=1, finish_reason="stop")),
        InferResponse(parameters={"event": "done", "n": 1, "x": 0.5, "b": False}, final=True),
    ],
)
def test_a_response(response: InferResponse) -> None:
    assert read_response(write_response(response)) == response


def test_phases_are_not_told() -> None:
    assert read_response(write_response(InferResponse(phases=Phases(infer_ns=1)))).phases is None


@pytest.mark.parametrize("code", Code)
def test_an_error(code: Code) -> None:
    found = read_error(write_error(InferenceError(code, "naïve")))
    assert (type(found), found.code, found.message) == (InferenceError, code, "naïve")


def test_a_refusal_in_openais_form() -> None:
    sent = OpenAiRefusal(Code.NOT_FOUND, "none", status=404, body=b'{"error": 1}')
    found = read_error(write_error(sent))
    assert isinstance(found, OpenAiRefusal)
    assert (found.code, found.message, found.status, found.body) == (
        Code.NOT_FOUND,
        "none",
        404,
        b'{"error": 1}',
    )


@pytest.mark.parametrize("caller", [None, Caller(tenant="a", key_id="k")])
def test_the_tenant_of_a_request_is_that_of_its_caller(caller: Caller | None) -> None:
    found = read_request(write_request(InferRequest(model="llama", caller=caller)))
    assert tenant_of(found.caller) == tenant_of(caller)
    assert (found.caller is None) is (caller is None)
