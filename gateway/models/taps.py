"""Observers of single requests: each has a tap on the stream of a request."""

from typing import Protocol

from gateway.messages import InferRequest, StreamRecorder
from gateway.observability.request_record import Record


class Tap(Protocol):
    """Observes one request: its responses, its end, and their times."""

    def recorder(self, record: Record, account: StreamRecorder) -> StreamRecorder:
        """The recorder of the request's stream, which passes every event on to `account`.

        Called when the request is accepted; never for a request that `submit` refuses.
        """


class Tapper(Protocol):
    """Chooses the requests of a model that it observes."""

    def tap(self, request: InferRequest, tap: Tap | None) -> Tap | None:
        """The tap of a request, around another one if there is one."""

    def end(self, reason: str) -> None:
        """End the observation: the model gets no more requests. Idempotent."""
