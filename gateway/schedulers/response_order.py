"""In which order do responses leave? As their requests came, where the config asks for that."""

from collections import OrderedDict
from collections.abc import Iterable
from enum import Enum, auto

from gateway.stream import ResponseStream

HELD_LIMIT = 1024
"""Requests answered before an earlier one: with so many, later ones wait in the queue."""


class _Stage(Enum):
    QUEUED = auto()
    EXECUTING = auto()
    ENDED = auto()


class ResponseOrder:
    """Holds each stream until every stream before it has ended (`preserve_ordering`).

    What leaves the queue without an execution, cancelled or rejected, is not kept in order: it
    has no response. A stream that is held keeps its responses itself, within its own limit.
    """

    def __init__(self, limit: int = HELD_LIMIT) -> None:
        self._limit = limit
        self._stages: OrderedDict[ResponseStream, _Stage] = OrderedDict()
        self._held = 0

    def arrived(self, stream: ResponseStream) -> None:
        """The next stream in the order."""
        if self._stages:
            stream.hold()
        self._stages[stream] = _Stage.QUEUED

    def started(self, streams: Iterable[ResponseStream]) -> None:
        """An execution has taken these."""
        for stream in streams:
            self._stages[stream] = _Stage.EXECUTING

    def returned(self, stream: ResponseStream) -> None:
        """The execution that took it has not begun: the stream is in the queue again."""
        self._stages[stream] = _Stage.QUEUED

    def ended(self, streams: Iterable[ResponseStream]) -> None:
        """Their execution has ended."""
        for stream in streams:
            self._stages[stream] = _Stage.ENDED
            self._held += 1
        self._settle()

    def left(self, stream: ResponseStream) -> None:
        """The stream has left the queue without an execution."""
        if self._stages.pop(stream, None) is not None:
            stream.release()
            self._settle()

    @property
    def blocked(self) -> bool:
        """Whether no more should be executed until the first has ended."""
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
