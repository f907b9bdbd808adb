"""Counting of requests by one trace setting, and the collection of the traces that it takes."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Protocol

from gateway.observability.escaping import escaped_json
from gateway.observability.span_trace import SpanTrace
from gateway.observability.trace import TIMESTAMPS, FileTrace, Trace, TraceFile
from gateway.observability.traceparent import NumberedIds, ParentSpan, SpanIds
from gateway.settings import TraceSettings

PIECE_CHARS = 256 * 1024
"""Size of the pieces in which the file without a number grows."""
MOST_CHARS = 16 * 1024 * 1024
"""Traces that wait for others of their file; beyond this they are written without them."""


class TraceSampling(ABC):
    """One setting in force: it counts requests, and takes the traces of some.

    `ahead` is the number of requests without a trace before the next one that may have one. It is
    `on` while any request can still be traced.
    """

    def __init__(self, settings: TraceSettings) -> None:
        self._settings = settings
        self._takes_none = bool(refusal(settings))
        self._left = settings.count
        self._rate = math.inf if self._takes_none or not settings.rate else settings.rate
        self.ahead = self._rate - 1
        self.on = not self._takes_none

    @property
    def settings(self) -> TraceSettings:
        """The setting, with `count` reduced by the traces taken."""
        return replace(self._settings, count=self._left)

    @abstractmethod
    def begin(
        self, numbers: Iterator[int], parent: ParentSpan | None, *, is_chosen: bool = False
    ) -> Trace | None:
        """Count a request; return its trace, with the next of the numbers, if it is sampled.

        One that `is_chosen` always is.
        """

    def _is_next(self) -> bool:
        """Count a request; return whether it is the next one of the rate."""
        if self.ahead:
            self.ahead -= 1
            return False
        self.ahead = self._rate - 1
        return self._left != 0

    @abstractmethod
    def retire(self) -> None:
        """Hold no traces from now on: the setting was replaced, or the server stops."""


class FileSampling(TraceSampling):
    """A setting whose traces are written to a file."""

    def __init__(self, settings: TraceSettings, file: TraceFile) -> None:
        super().__init__(settings)
        self._file = file
        self._taken = 0
        self._collected = 0
        self._waiting: list[str] = []
        self._waiting_chars = 0
        self._retired = False
        self.on = self.on and self._left != 0

    def begin(
        self, numbers: Iterator[int], parent: ParentSpan | None, *, is_chosen: bool = False
    ) -> Trace | None:
        is_sampled = self._is_next() or is_chosen
        if self._takes_none or not self._left or not is_sampled:
            return None
        self._left -= self._left > 0
        self.on = self._left != 0
        self._taken += 1
        trace = FileTrace(next(numbers), self._settings.levels, self.keep, numbers)
        if parent is not None:
            trace.traceparent = parent.text
        return trace

    def keep(self, trace: FileTrace) -> None:
        """Write the trace, or hold it until its file is full; an empty one only counts."""
        if trace.objects:
            text = escaped_json(trace.objects)[1:-1]
            self._waiting.append(text)
            self._waiting_chars += len(text)
        self._collected += 1
        frequency = self._settings.log_frequency
        last = self._left == 0 and self._collected == self._taken
        full = frequency and len(self._waiting) >= frequency
        if self._waiting and (last or full or self._waiting_chars > MOST_CHARS):
            self._file.write_numbered(self._waiting)
            self._forget()
        elif self._retired or (self._settings.count < 0 and self._waiting_chars > PIECE_CHARS):
            self._write_rest()

    def retire(self) -> None:
        self._retired = True
        self._write_rest()

    def _write_rest(self) -> None:
        if self._settings.log_frequency and not self._retired:
            return
        if self._settings.log_frequency and self._waiting:
            self._file.write_numbered(self._waiting)
        else:
            self._file.append(self._waiting)
        self._forget()

    def _forget(self) -> None:
        self._waiting = []
        self._waiting_chars = 0


class SpanSink(Protocol):
    """Takes complete traces as spans; `drops` counts those that no collector got, by reason.

    `ids` are those of the traces without a parent, by their numbers.
    """

    drops: Mapping[str, int]
    ids: NumberedIds

    def refuses(self) -> bool:
        """Whether it has no room for the trace of a model; its spans are counted as dropped then.

        Must not wait.
        """

    def keep(self, trace: SpanTrace) -> None:
        """Take a trace. Must not raise or wait."""

    def close(self) -> None:
        """Send what waits, within a limit of time."""


class SpanSampling(TraceSampling):
    """A setting whose traces are spans: without the level TIMESTAMPS there are none.

    With rate 0 only chosen requests are traced. They take nothing of the count.
    """

    def __init__(self, settings: TraceSettings, sink: SpanSink) -> None:
        super().__init__(settings)
        self._sink = sink
        self._keep = sink.keep  # one for all traces

    def begin(
        self, numbers: Iterator[int], parent: ParentSpan | None, *, is_chosen: bool = False
    ) -> Trace | None:
        if not self.ahead and self._left:  # as of `_is_next`, without the call
            self.ahead = self._rate - 1
            self._left -= self._left > 0
            if not is_chosen and self._sink.refuses():
                return None
        elif not self._is_next() and (self._takes_none or not is_chosen):
            return None
        ids = self._sink.ids if parent is None else SpanIds(parent)
        return SpanTrace(next(numbers), ids, self._keep, numbers)

    def retire(self) -> None:
        pass


def refusal(settings: TraceSettings) -> str:
    """The reason why a setting takes no traces; "" if it takes some."""
    if not settings.levels:
        return "tracing is disabled"
    if settings.spans is not None:
        return "" if TIMESTAMPS in settings.levels else "tensors are no part of spans"
    if not settings.rate:
        return "sample rate must be non-zero"
    return "" if settings.file else "trace file name is not given"
