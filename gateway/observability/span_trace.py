"""Traces of single requests that become spans of OpenTelemetry."""

import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple

from gateway.errors import InferenceError
from gateway.messages import NO_PARAMETERS, InferRequest, InferResponse, Phases
from gateway.observability.gen_ai import Generated
from gateway.observability.trace import (
    ANSWERED,
    END,
    NO_NUMBERS,
    NO_PHASES,
    SENT,
    Trace,
    WireStamps,
)
from gateway.observability.traceparent import NumberedIds, SpanIds


class SentOn(NamedTuple):
    """A request to a replica: its address, the id of its span, and its start."""

    replica: str
    span_id: int
    ns: int


class SpanTrace(Trace):
    """The times of one request, and the facts that its spans name.

    While the rate is 1 each request makes one, so it holds numbers and texts in slots, and few
    objects. Its `spans` are made when they are read first. A time is 0 before its event. `phases`
    follow `executed_ns`. `descendants` are those of the outermost trace. `is_special` once it is
    known that its spans are others than those of most requests.

    A `wire` stamps `begun_ns`, `whole_ns`, `sending_ns` and `sent_ns`; further stamps are events.
    """

    __slots__ = (
        "_descendants",
        "_events",
        "_span_id",
        "begun_ns",
        "ended_ns",
        "error",
        "executed_ns",
        "ids",
        "is_special",
        "model",
        "phases",
        "queued_ns",
        "replicas",
        "request_id",
        "sending_ns",
        "sent_ns",
        "started_ns",
        "version",
        "whole_ns",
        "wire",
    )

    reads_responses = False

    def __init__(
        self,
        number: int,
        ids: SpanIds | NumberedIds,
        keep: Callable[["SpanTrace"], None],
        numbers: Iterator[int] = NO_NUMBERS,
        parent: "SpanTrace | None" = None,
    ) -> None:
        # As of the base, without the call.
        self.id, self._keep, self._numbers = number, keep, numbers
        self._parent = parent  # type: ignore[assignment]
        self._missing = END | SENT if parent is None else END
        self.asked, self.generated, self.answered_ns = NO_PARAMETERS, None, 0
        self.ids: SpanIds | NumberedIds = ids
        self.is_special = False
        self._span_id = 0 if parent is None else self.spans.next_id()
        self._descendants: list[SpanTrace] | None = None
        self.wire: WireStamps | None = None
        self._events: list[tuple[int, str]] | None = None
        self.model = self.version = self.request_id = ""
        self.started_ns = self.queued_ns = self.executed_ns = self.ended_ns = 0
        self.begun_ns = self.whole_ns = self.sending_ns = self.sent_ns = 0
        self.phases = NO_PHASES
        self.replicas: tuple[SentOn, ...] = ()
        self.error: InferenceError | None = None

    @property
    def spans(self) -> SpanIds:
        if not isinstance(self.ids, SpanIds):
            self.ids = self.ids.of(self.id)
        return self.ids

    @property
    def span_id(self) -> int:
        """The id of the span of its model."""
        return self._span_id or self.spans.model_id

    @property
    def parent_span_id(self) -> int:
        """The id of the span above that."""
        return self.spans.root_id if self._parent is None else self._parent.span_id

    @property
    def parent_id(self) -> int:
        """The number of its parent; 0 of the outermost trace."""
        return 0 if self._parent is None else self._parent.id

    @property
    def descendants(self) -> "Sequence[SpanTrace]":
        """The traces of requests for this one, if it is the outermost one; also theirs."""
        return self._descendants or ()

    @property
    def members(self) -> "list[SpanTrace]":
        """The outermost trace, which this is, and its descendants."""
        return [self, *self.descendants]

    @property
    def headers(self) -> Mapping[str, str]:
        return self.spans.as_parent(self.span_id).headers

    @property
    def events(self) -> list[tuple[int, str]]:
        """The times and names of its stamps, in their order."""
        found = list(self._events or ())
        wire = self.wire
        if wire is not None and self.begun_ns:
            found[:0] = zip((self.begun_ns, self.whole_ns), wire.received, strict=True)
        if self.answered_ns and self._parent is None:  # a child has no client
            at = bisect_right(found, self.answered_ns, key=itemgetter(0))
            found.insert(at, (self.answered_ns, ANSWERED))
        if wire is not None and self.sent_ns:
            found += zip((self.sending_ns, self.sent_ns), wire.sent, strict=True)
        return found

    @property
    def names(self) -> list[str]:
        """The names of its stamps."""
        return [name for _, name in self.events]

    @property
    def times(self) -> list[int]:
        """Their times."""
        return [ns for ns, _ in self.events]

    def _child(self, number: int) -> "SpanTrace":
        self.is_special = True
        if self._descendants is None:
            self._descendants = []
        child = SpanTrace(number, self.spans, self._adopt, self._numbers, self)
        child._descendants = self._descendants
        self._descendants.append(child)
        return child

    def stamp(self, activity: str, ns: int | None = None) -> None:
        if not self._missing:  # its spans may be built already
            return
        self.is_special = True
        if self._events is None:
            self._events = []
        self._events.append((time.perf_counter_ns() if ns is None else ns, activity))

    def received(self, wire: WireStamps, begun_ns: int, whole_ns: int) -> None:
        self.wire, self.begun_ns, self.whole_ns = wire, begun_ns, whole_ns

    def answered(self, ns: int) -> None:
        self.answered_ns = ns

    def answer_sent(self, wire: WireStamps, begun_ns: int) -> None:
        if not self._missing:
            return
        self.wire, self.sending_ns, self.sent_ns = wire, begun_ns, time.perf_counter_ns()
        if self._missing == SENT:  # as `sent`, without its calls
            self._missing = 0
            self._keep(self)
        else:
            self.sent()

    def accepted(self, model: str, version: str, request: InferRequest) -> None:
        self.model, self.version, self.request_id = model, version, request.id
        self.started_ns = self.queued_ns = time.perf_counter_ns()

    @property
    def compute_ns(self) -> tuple[int, int, int, int]:
        """The four times of `compute`."""
        phases, start = self.phases, self.executed_ns
        input_end = start + phases.input_ns
        output_start = input_end + phases.infer_ns
        return start, input_end, output_start, output_start + phases.output_ns

    def routed(self, replica: str) -> str:
        self.is_special = True
        span_id = self.spans.next_id()
        self.replicas += (SentOn(replica, span_id, time.perf_counter_ns()),)
        return self.spans.as_parent(span_id).text

    def responded(self, response: InferResponse, ns: int, *, first: bool) -> None:
        if first:
            self.answered_ns = ns
        if response.usage is not None or response.engine is not None:
            if self.generated is None:
                self.generated, self.is_special = Generated(), True
            self.generated.add(response, ns)

    def computed(self, started_ns: int, phases: Phases) -> None:
        self.executed_ns, self.phases = started_ns, phases

    def ended(
        self,
        ns: int,
        error: InferenceError | None = None,
        started_ns: int = 0,
        phases: Phases = NO_PHASES,
    ) -> None:
        if error is not None or not started_ns or self._missing != END | SENT:
            super().ended(ns, error, started_ns, phases)
            return
        # As of the base, without its calls.
        self.executed_ns, self.phases, self.ended_ns = started_ns, phases, ns
        self._missing = SENT

    def _end(self, ns: int, error: InferenceError | None) -> None:
        self.ended_ns, self.error = ns, error
        if error is not None:
            self.is_special = True

    def _refuse(self, error: InferenceError | None) -> None:
        """Keep what is stamped: a caller may know of the trace."""
        self.error, self.is_special = error, True
