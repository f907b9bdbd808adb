"""The conditions and the end of requests that begin without a task."""

from dataclasses import dataclass, field

import pytest

from gateway.dataplane import BegunRequest, DataPlane
from gateway.errors import Code, InferenceError
from gateway.messages import InferResponse
from gateway.stream import ResponseStream
from gateway.tensor import text_tensor
from gateway.threads import LARGE_BYTES
from tests.builders import LoadedModels

OUTPUT = text_tensor("text_output", ["a"])
BROKEN = InferenceError(Code.UNAVAILABLE, "no such token")


@dataclass(slots=True)
class Begun(BegunRequest[str]):
    """Its answers are texts."""

    sent: list[str] = field(default_factory=list)

    def encode(self, response: InferResponse) -> str:
        return str(response.outputs[0].elements()[0], "ascii")

    def failed(self, error: Exception) -> str:
        return str(error) if isinstance(error, InferenceError) else type(error).__name__

    def send(self, answer: str) -> None:
        assert self.stream.cancelled
        self.sent.append(answer)


@pytest.fixture
def begun() -> Begun:
    found = Begun(ResponseStream())
    found.stream.listen(found.look)
    return found


def test_small_requests_begin_without_a_task() -> None:
    dataplane = DataPlane(LoadedModels())  # type: ignore[arg-type]
    assert dataplane.begins_without_task(LARGE_BYTES)
    assert not dataplane.begins_without_task(LARGE_BYTES + 1)


def test_the_response_is_sent_in_the_call_that_puts_it(begun: Begun) -> None:
    assert begun.sent == []
    begun.stream.put(InferResponse(outputs=(OUTPUT,), final=True))
    assert begun.sent == ["a"]


def test_a_response_that_is_there_is_sent_at_once() -> None:
    begun = Begun(ResponseStream())
    begun.stream.put(InferResponse(outputs=(OUTPUT,), final=True))
    begun.stream.listen(begun.look)
    assert begun.sent == ["a"]


def test_the_final_flag_may_follow(begun: Begun) -> None:
    begun.stream.put(InferResponse(outputs=(OUTPUT,)))
    assert begun.sent == []
    begun.stream.put(InferResponse(final=True))
    assert begun.sent == ["a"]


def test_an_error_is_sent(begun: Begun) -> None:
    begun.stream.fail(BROKEN)
    assert begun.sent == [BROKEN.message]


def test_the_end_without_a_response_is_an_error(begun: Begun) -> None:
    begun.stream.end()
    assert begun.sent == ["expected a single response, got 0"]


def test_a_cancellation_is_an_error_once(begun: Begun) -> None:
    cancelled: list[str] = []
    begun.stream.on_cancel(lambda: cancelled.append("cancelled"))
    begun.stream.cancel()
    begun.stream.cancel()
    begun.stream.put(InferResponse(outputs=(OUTPUT,), final=True))
    assert (begun.sent, cancelled) == (["Request was cancelled"], ["cancelled"])


def test_a_response_that_cannot_be_encoded_fails(begun: Begun) -> None:
    begun.stream.put(InferResponse())
    begun.stream.end()
    assert begun.sent == ["IndexError"]
