"""Requests that begin without a task: their conditions, and the end of each."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from gateway.messages import InferResponse
from gateway.observability.tracer import Tracer
from gateway.stream import ResponseStream
from gateway.threads import LARGE_BYTES

T = TypeVar("T")


def begins_without_task(size_bytes: int, tracer: Tracer) -> bool:
    """Whether a request that has arrived as a whole may begin without a task.

    A large one is decoded in a thread, and a traced one ends when its response is sent.
    """
    return size_bytes <= LARGE_BYTES and not tracer.on


@dataclass(slots=True)
class BegunRequest(ABC, Generic[T]):
    """A request that was begun without a task, with the `stream` of its only response.

    The call that puts the response into the stream, or ends the stream, encodes and sends it.
    `cancel` the stream when the client disconnects.
    """

    stream: ResponseStream
    _responses: list[InferResponse] = field(default_factory=list, init=False)

    @abstractmethod
    def encode(self, response: InferResponse) -> T:
        """The answer of a response; any exception is passed to `failed`."""

    @abstractmethod
    def failed(self, error: Exception) -> T:
        """The answer of a request that failed."""

    @abstractmethod
    def send(self, answer: T) -> None:
        """Send the answer, unless the client has disconnected. Must not raise."""

    def look(self) -> None:
        """Send the answer if it is there. The listener of the stream."""
        try:
            response = self.stream.take_only(self._responses)
            if response is None:
                return
            answer = self.encode(response)
        except Exception as error:  # noqa: BLE001 - around one request in a frontend
            answer = self.failed(error)
        self.stream.close()
        self.send(answer)
