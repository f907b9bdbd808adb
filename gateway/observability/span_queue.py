"""The queue between the event loop, which has complete traces, and the thread that sends spans."""

import logging
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from gateway.messages import NO_PARAMETERS
from gateway.observability.span_rows import SPANS_OF_ROW, SpanRows
from gateway.observability.span_trace import SpanTrace
from gateway.observability.spans import MOST_ID_CHARS, spans_of
from gateway.observability.trace import WireStamps
from gateway.observability.traceparent import NumberedIds
from gateway.tensor import Buffer

log = logging.getLogger("sluice.trace")

NOT_QUEUED = "not_queued"
"""The reason of spans that were dropped because the queue was full."""
SPANS_OF_MODEL = 2
"""The spans of a model as they are counted: its own, and `compute`."""
MOST_ROWS = 256
"""Versions of models, each with a wire, whose usual traces are kept as rows."""


class SpanBatch:
    """The spans of some traces: `counted` by the queue, `failed` of these could not be built."""

    def __init__(self) -> None:
        self.counted = self.failed = 0
        self._spans: list[bytes] = []
        self._tables: list[bytearray] = []
        self._in_tables = 0

    def add(self, trace: SpanTrace, counted: int) -> None:
        """Add the spans of a trace."""
        self.counted += counted
        try:
            self._spans += spans_of(trace)
        except Exception:
            # Around one trace: the others are sent.
            log.exception("spans not built")
            self.failed += counted

    def add_rows(self, rows: SpanRows, most: int, ids: NumberedIds) -> None:
        """Add the spans of the oldest rows, at most `most`."""
        taken = rows.take(most)
        counted = SPANS_OF_ROW * len(taken)
        self.counted += counted
        try:
            spans, tables = rows.spans(taken, ids)
        except Exception:  # as of a trace
            log.exception("spans not built")
            self.failed += counted
            return
        self._spans += spans
        self._tables += tables
        self._in_tables += counted - len(spans)

    def messages(self, most: int) -> Iterator[tuple[Sequence[Buffer], int]]:
        """The spans of each message, as pieces, and their number: at most `most`."""
        begin = max(0, most - self._in_tables)
        first = self._spans[:begin]
        if first or self._tables:
            yield [*self._tables, *first], self._in_tables + len(first)
        for at in range(begin, len(self._spans), most):
            spans = self._spans[at : at + most]
            yield spans, len(spans)


class SpanQueue:
    """Complete traces in the order of their ends, of at most `most` spans; beyond that they drop.

    The event loop keeps traces, another thread takes their spans. Most traces are kept as rows.
    `ids` are those of new traces without a parent. `wake` is set if a batch waits; `on_first` is
    called for the first trace at the latest.
    """

    def __init__(
        self, most: int, batch: int, drops: dict[str, int], on_first: Callable[[], object]
    ) -> None:
        self.ids, self.wake = NumberedIds(), threading.Event()
        self.most, self._batch, self._on_first = most, batch, on_first
        self._drops = drops
        # Each has one writer, so that neither needs a lock.
        self._put = self._got = 0
        self._traces: deque[tuple[SpanTrace, int]] = deque()
        self._rows: dict[tuple[WireStamps | None, str, str], SpanRows] = {}
        self._turns: deque[SpanRows] = deque()  # the same; the next batch begins with the first

    @property
    def waiting(self) -> int:
        """The spans that wait, as they are counted."""
        return self._put - self._got

    def refuses(self) -> bool:
        """Whether there is no room for a trace of one model; then its spans are dropped."""
        if self._put - self._got + SPANS_OF_ROW <= self.most:
            return False
        self._drops[NOT_QUEUED] += SPANS_OF_ROW
        return True

    def keep(self, trace: SpanTrace) -> None:
        """Keep a trace, or drop it."""
        waiting = self._put - self._got + SPANS_OF_ROW
        if (
            not trace.is_special
            and trace.ids is self.ids
            and trace.executed_ns
            and trace.begun_ns
            and trace.answered_ns
            and trace.sent_ns
            and trace.asked is NO_PARAMETERS
            and len(trace.request_id) <= MOST_ID_CHARS
            and trace.request_id.isprintable()
            and waiting <= self.most
        ):
            rows = self._rows.get((trace.wire, trace.model, trace.version))
            try:
                if rows is not None or (rows := self._new_rows(trace)) is not None:
                    rows.add(trace)
                    self._put += SPANS_OF_ROW
                    if waiting >= self._batch and not self.wake.is_set():
                        self.wake.set()
                    return
            except struct.error:  # its times are no numbers
                pass
        self._keep_whole(trace)

    def _keep_whole(self, trace: SpanTrace) -> None:
        self._on_first()
        count = 1 + SPANS_OF_MODEL * (1 + len(trace.descendants))
        if self.waiting + count > self.most:
            self._drops[NOT_QUEUED] += count
        else:
            self._traces.append((trace, count))
            self._put += count
        if self.waiting >= self._batch:
            self.wake.set()

    def _new_rows(self, trace: SpanTrace) -> SpanRows | None:
        """The rows for traces as this one, which has none yet; None beyond the limit."""
        if trace.wire is None or len(self._rows) == MOST_ROWS:
            return None
        self._on_first()
        rows = SpanRows(trace.wire, trace.model, trace.version)
        self._rows[trace.wire, trace.model, trace.version] = rows
        self._turns.append(rows)
        return rows

    def next_batch(self, most: int) -> SpanBatch:
        """The spans of the oldest traces and rows, which count as at most `most`.

        If both wait, each has half of it. The first trace may count as more.
        """
        batch = SpanBatch()
        self._take_traces(batch, most // 2)
        for _ in range(len(self._turns)):
            left = max((most - batch.counted) // SPANS_OF_ROW, batch.counted == 0)
            if not left:
                break
            if rows := self._turns[0]:
                batch.add_rows(rows, left, self.ids)
            self._turns.rotate(-1)
        self._take_traces(batch, most)
        self._got += batch.counted
        return batch

    def _take_traces(self, batch: SpanBatch, most: int) -> None:
        while self._traces and (batch.counted == 0 or batch.counted + self._traces[0][1] <= most):
            batch.add(*self._traces.popleft())
