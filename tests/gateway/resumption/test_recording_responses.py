"""The request parameter `resumable`, and the size and ownership of kept responses."""

from typing import Any

import pytest

from gateway.errors import Code, InferenceError
from gateway.messages import InferResponse
from gateway.resumption.recording import kept_bytes, owned, without_resumable
from gateway.stream import INTERRUPTED
from gateway.tensor import Datatype, Tensor
from tests.builders import text_request, text_response


def test_a_request_without_the_parameter_is_unchanged() -> None:
    request = text_request(parameters={"temperature": 0})
    assert without_resumable(request) == (request, False)
    assert without_resumable(request)[0] is request


@pytest.mark.parametrize("wish", [True, False])
def test_the_model_does_not_get_the_parameter(wish: bool) -> None:
    asked = text_request(parameters={"temperature": 0, "resumable": wish})
    assert without_resumable(asked) == (text_request(parameters={"temperature": 0}), wish)


@pytest.mark.parametrize("wish", ["true", 1, 0.0, None, []])
def test_a_parameter_that_is_no_boolean_is_refused(wish: Any) -> None:
    with pytest.raises(
        InferenceError, match=r"parameter 'resumable' is .* expected true"
    ) as caught:
        without_resumable(text_request(parameters={"resumable": wish}))
    assert caught.value.code is Code.INVALID_ARG


def binary(data: bytes | memoryview) -> InferResponse:
    return InferResponse(outputs=(Tensor("x", Datatype.UINT8, (len(data),), data),))


def test_a_larger_response_takes_more() -> None:
    assert kept_bytes(text_response("x" * 1000)) - kept_bytes(text_response("")) == 1000
    assert kept_bytes(binary(b"x" * 1000)) - kept_bytes(binary(b"")) == 1000


def test_outputs_and_parameters_count() -> None:
    empty = kept_bytes(InferResponse())
    assert empty > 0
    assert kept_bytes(InferResponse(parameters={"a": "x" * 500})) > empty + 500
    assert kept_bytes(binary(b"")) > empty


def test_a_view_becomes_memory_of_its_own() -> None:
    memory = bytearray(b"abcdef")
    kept = owned(binary(memoryview(memory)[1:3]))
    memory[:] = b"......"
    assert kept.outputs[0].data == b"bc"


def test_a_response_that_owns_its_memory_is_not_copied() -> None:
    for response in (text_response("x"), binary(b"x"), INTERRUPTED):
        assert owned(response) is response
