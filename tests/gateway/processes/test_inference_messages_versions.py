"""Requests, responses and errors are understood by the release before and the one after."""

from typing import Any

import msgspec
import pytest

from gateway.errors import AnsweredError, Code, InferenceError, RefusedError, died
from gateway.messages import (
    Deadline,
    InferRequest,
    InferResponse,
    Phases,
    RequestedOutput,
    RoutedPrompt,
    SequenceTag,
    Usage,
)
from gateway.openai_contract import OpenAiRefusal
from gateway.policy.caller import Caller
from gateway.processes.error_messages import read_error, write_error
from gateway.processes.inference_messages import (
    read_request,
    read_response,
    write_request,
    write_response,
)
from gateway.processes.request_terms import TraceParent
from gateway.tensor import Datatype, Tensor, text_tensor


class Array(msgspec.Struct, array_like=True):
    """A struct of the first release with this encoding; it never changes."""


class FirstTensor(Array):
    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    data: bytes | tuple[bytes, ...]


class FirstRequest(Array):
    model: str
    version: str
    id: str
    inputs: tuple[FirstTensor, ...]
    parameters: dict[str, Any]
    tenant: str


class FirstResponse(Array):
    final: bool
    outputs: tuple[FirstTensor, ...]
    parameters: dict[str, bool | int | float | str] | None
    usage: tuple[int, int, str] | None


class FirstError(Array):
    code: Code
    message: str
    status: int = 0
    body: bytes = b""


TEXT = text_tensor("text", ["a", "b"])
NUMBERS = Tensor("numbers", Datatype.INT16, (1, 2), b"\1\0\2\0")
TENSORS = (TEXT, NUMBERS)
FIRST_TENSORS = (
    FirstTensor("text", Datatype.BYTES, (2,), (b"a", b"b")),
    FirstTensor("numbers", Datatype.INT16, (1, 2), b"\1\0\2\0"),
)
USAGE = Usage(prompt_tokens=3, completion_tokens=1, finish_reason="stop")


def test_the_first_release_reads_the_newest_request() -> None:
    asked = InferRequest(
        model="m",
        version="2",
        id="seven",
        inputs=TENSORS,
        outputs=(RequestedOutput("a", 3),),
        parameters={"p": [1]},
        sequence=SequenceTag(5, True, True, "t"),
        priority=1,
        timeout_us=2,
        trace=TraceParent("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
        caller=Caller(tenant="t"),
        prompt=RoutedPrompt(512, (b"12345678",)),
        deadline=Deadline(1, 2, 3, 4, 5, 6, asked=True),
    )
    found = msgspec.msgpack.decode(write_request(asked), type=FirstRequest)
    assert found == FirstRequest("m", "2", "seven", FIRST_TENSORS, {"p": [1]}, "t")


def test_the_newest_release_reads_the_first_request() -> None:
    sent = FirstRequest("m", "2", "seven", FIRST_TENSORS, {"p": [1]}, "t")
    found = read_request(msgspec.msgpack.encode(sent))
    assert found == InferRequest(
        model="m", version="2", id="seven", inputs=TENSORS, parameters={"p": [1]}
    )
    assert found.caller == Caller(tenant="t")
    assert found.trace is None
    assert found.prompt is None
    assert found.deadline is None


def test_the_first_release_reads_the_newest_response() -> None:
    answer = InferResponse(
        outputs=TENSORS, parameters={"p": 1}, final=True, usage=USAGE, phases=Phases(1, 2, 3)
    )
    found = msgspec.msgpack.decode(write_response(answer), type=FirstResponse)
    assert found == FirstResponse(True, FIRST_TENSORS, {"p": 1}, (3, 1, "stop"))


def test_the_newest_release_reads_the_first_response() -> None:
    sent = FirstResponse(True, FIRST_TENSORS, {"p": 1}, (3, 1, "stop"))
    found = read_response(msgspec.msgpack.encode(sent))
    assert found.usage is not None
    assert found.usage.cached_tokens is None
    assert found == InferResponse(outputs=TENSORS, parameters={"p": 1}, final=True, usage=USAGE)


ERRORS = [
    (AnsweredError(Code.INTERNAL, "no"), FirstError(Code.INTERNAL, "no")),
    (RefusedError(Code.UNAVAILABLE, "no"), FirstError(Code.UNAVAILABLE, "no")),
    (died("no", 3), FirstError(Code.UNAVAILABLE, "no")),
    (
        OpenAiRefusal(Code.NOT_FOUND, "no", status=404, body=b"{}"),
        FirstError(Code.NOT_FOUND, "no", 404, b"{}"),
    ),
]


@pytest.mark.parametrize(("error", "first"), ERRORS)
def test_the_first_release_reads_the_newest_error(error: InferenceError, first: FirstError) -> None:
    assert msgspec.msgpack.decode(write_error(error), type=FirstError) == first


@pytest.mark.parametrize(("error", "first"), ERRORS)
def test_the_newest_release_reads_the_first_error(error: InferenceError, first: FirstError) -> None:
    found = read_error(msgspec.msgpack.encode(first))
    assert (found.code, found.message) == (error.code, error.message)
    assert isinstance(found, OpenAiRefusal) is isinstance(error, OpenAiRefusal)


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (write_request(InferRequest(model="m", inputs=TENSORS)), read_request),
        (write_response(InferResponse(outputs=TENSORS)), read_response),
        (write_error(InferenceError(Code.INTERNAL, "no")), read_error),
    ],
)
def test_fields_of_a_later_release_are_ignored(written: bytes, read: Any) -> None:
    later = [*msgspec.msgpack.decode(written), "new", {"more": [1]}]
    found, same = read(msgspec.msgpack.encode(later)), read(written)
    assert found == same or vars(found) == vars(same)
