"""The order of responses with `preserve_ordering`."""

from collections import OrderedDict
from collections.abc import Iterable
from enum import Enum, auto

from gateway.stream import ResponseStream

HELD_LIMIT = 1024
"""Limit of requests whose responses wait for an earlier one; then no more are executed."""


class _Stage(Enum):
    QUEUED = auto()
    EXECUTING = auto()
    ENDED = auto()


class ResponseOrder:
    """Holds each stream until every stream before it has ended.

    Requests that leave the queue without an execution, cancelled or rejected, have no place in the
    order. A held stream keeps its responses itself, within its own limit.
    """

    def __init__(self, limit: int = HELD_LIMIT) -> None:
        self._limit = limit
        self._stages: OrderedDict[ResponseStream, _Stage] = OrderedDict()
        self._held = 0

    def arrived(self, stream: ResponseStream) -> None:
        """Append a stream to the order."""
        if self._stages:
            stream.hold()
        self._stages[stream] = _Stage.QUEUED

    def started(self, streams: Iterable[ResponseStream]) -> None:
        """Their execution started."""
        for stream in streams:
            self._stages[stream] = _Stage.EXECUTING

    def returned(self, stream: ResponseStream) -> None:
        """Its execution did not begin: the stream is queued again."""
        self._stages[stream] = _Stage.QUEUED

    def ended(self, streams: Iterable[ResponseStream]) -> None:
        """Their execution ended."""
        for stream in streams:
            self._stages[stream] = _Stage.ENDED
            self._held += 1
        self._settle()

    def answered(self, stream: ResponseStream) -> None:
        """Append the stream of a request that the response cache answers."""
        self.arrived(stream)
        self.started((stream,))
        self.ended((stream,))

    def left(self, stream: ResponseStream) -> None:
        """The stream left the queue without an execution."""
        if self._stages.pop(stream, None) is not None:
            stream.release()
            self._settle()

    @property
    def blocked(self) -> bool:
        """Whether no more may be executed until the first stream has ended."""
        return self._held >= self._limit and self._first() is _Stage.EXECUTING

    def _settle(self) -> None:
        while self._first() is _Stage.ENDED:
            stream, _ = self._stages.popitem(last=False)
            stream.release()
            self._held -= 1
        if self._stages:
            next(iter(self._stages)).release()

    def _first(self) -> _Stage | None:
        return next(iter(self._stages.values()), None)
