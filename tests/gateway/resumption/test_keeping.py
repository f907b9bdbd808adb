"""What is kept of a response has memory of its own, and its size is known."""

from gateway.messages import InferResponse
from gateway.resumption.keeping import kept_bytes, owned
from gateway.stream import INTERRUPTED
from gateway.tensor import Datatype, Tensor
from tests.builders import text_response


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


def test_what_owns_its_memory_is_kept_as_it_is() -> None:
    for response in (text_response("x"), binary(b"x"), INTERRUPTED):
        assert owned(response) is response
