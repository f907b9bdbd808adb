"""Taps: observers of single requests, and the base of those that pass every event on."""

from collections.abc import Sequence
from typing import Protocol

from gateway.errors import InferenceError
from gateway.messages import InferResponse, StreamRecorder
from gateway.observability.request_record import Record


class Tap(Protocol):
    """Observes one request: its responses, its end, and their times."""

    def recorder(self, record: Record, account: StreamRecorder) -> StreamRecorder:
        """The recorder of the request's stream, which passes every event on to `account`.

        Called when the request is accepted; never for a request that `submit` refuses.
        """


class StreamTap:
    """Implements `Tap` and `StreamRecorder`: it passes each event on to `account`.

    That is the recorder of the inner tap, if there is one. Both are set once the request is
    accepted.
    """

    __slots__ = ("_inner", "account", "record")

    record: Record
    account: StreamRecorder

    def __init__(self, inner: Tap | None) -> None:
        self._inner = inner

    def recorder(self, record: Record, account: StreamRecorder) -> StreamRecorder:
        """See `Tap`."""
        self.record = record
        self.account = account if self._inner is None else self._inner.recorder(record, account)
        return self

    def responded(self, response: InferResponse) -> None:
        """See `StreamRecorder`."""
        self.account.responded(response)

    def delivered(self, name: str, texts: Sequence[bytes], tokens: Sequence[int | None]) -> None:
        """See `StreamRecorder`."""
        self.account.delivered(name, texts, tokens)

    def taken(self) -> None:
        """See `StreamRecorder`."""
        self.account.taken()

    def wasted(self, response: InferResponse) -> None:
        """See `StreamRecorder`."""
        self.account.wasted(response)

    def ended(self, error: InferenceError | None) -> None:
        """See `StreamRecorder`."""
        self.account.ended(error)
