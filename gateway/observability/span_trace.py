"""Traces of single requests that become spans of OpenTelemetry."""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from gateway.errors import InferenceError
from gateway.messages import InferRequest, InferResponse, Phases
from gateway.observability.gen_ai import Generated
from gateway.observability.trace import NO_NUMBERS, Trace
from gateway.observability.traceparent import SpanIds

NO_PHASES = Phases()


class SentOn(NamedTuple):
    """A request to a replica: its address, the id of its span, and its start."""

    replica: str
    span_id: int
    ns: int


class SpanTrace(Trace):
    """The times of one request, and the facts that its spans name.

    While the rate is 1 each request makes one, so it holds numbers and texts in slots, and few
    objects that the thread of the exporter has to free. A time is 0 before its event. The stamps of
    frontends are `names` and `times`. `phases` follow `executed_ns`, `span_id` and `parent_span_id`
    are those of the span of its model. `descendants` are those of the outermost trace.
    """

    __slots__ = (
        "descendants",
        "ended_ns",
        "error",
        "executed_ns",
        "model",
        "names",
        "parent_id",
        "parent_span_id",
        "phases",
        "queued_ns",
        "replicas",
        "request_id",
        "span_id",
        "spans",
        "started_ns",
        "times",
        "version",
    )

    def __init__(
        self,
        number: int,
        ids: SpanIds,
        keep: Callable[["SpanTrace"], None],
        numbers: Iterator[int] = NO_NUMBERS,
        parent: "SpanTrace | None" = None,
    ) -> None:
        super().__init__(number, keep, numbers, parent)
        self.spans: SpanIds = ids
        self.span_id = ids.next_id()
        if parent is None:
            self.parent_id, self.parent_span_id = 0, ids.root_id
            self.descendants: list[SpanTrace] = []
        else:
            self.parent_id, self.parent_span_id = parent.id, parent.span_id
            self.descendants = parent.descendants
        self.names: list[str] = []
        self.times: list[int] = []
        self.model = self.version = self.request_id = ""
        self.started_ns = self.queued_ns = self.executed_ns = self.ended_ns = 0
        self.phases = NO_PHASES
        self.replicas: tuple[SentOn, ...] = ()
        self.error: InferenceError | None = None

    @property
    def members(self) -> "list[SpanTrace]":
        """The outermost trace, which this is, and its descendants."""
        return [self, *self.descendants]

    @property
    def headers(self) -> Mapping[str, str]:
        return self.spans.as_parent(self.span_id).headers

    def _child(self, number: int) -> "SpanTrace":
        child = SpanTrace(number, self.spans, self._adopt, self._numbers, self)
        self.descendants.append(child)
        return child

    def stamp(self, activity: str, ns: int | None = None) -> None:
        if self._missing:  # its spans may be built already
            self.names.append(activity)
            self.times.append(time.perf_counter_ns() if ns is None else ns)

    def accepted(self, model: str, version: str, request: InferRequest) -> None:
        self.model, self.version, self.request_id = model, version, request.id
        self.started_ns = time.perf_counter_ns()
        self.queued_ns = time.perf_counter_ns()

    @property
    def compute_ns(self) -> tuple[int, int, int, int]:
        """The four times of `compute`."""
        phases, start = self.phases, self.executed_ns
        input_end = start + phases.input_ns
        output_start = input_end + phases.infer_ns
        return start, input_end, output_start, output_start + phases.output_ns

    def routed(self, replica: str) -> str:
        span_id = self.spans.next_id()
        self.replicas += (SentOn(replica, span_id, time.perf_counter_ns()),)
        return self.spans.as_parent(span_id).text

    def responded(self, response: InferResponse, ns: int, *, first: bool) -> None:
        if first:
            self.answered(ns)
        if response.usage is not None or response.engine is not None:
            if self.generated is None:
                self.generated = Generated()
            self.generated.add(response, ns)

    def computed(self, started_ns: int, phases: Phases) -> None:
        self.executed_ns, self.phases = started_ns, phases

    def _end(self, ns: int, error: InferenceError | None) -> None:
        self.ended_ns, self.error = ns, error

    def _refuse(self, error: InferenceError | None) -> None:
        """Keep what is stamped: a caller may know of the trace."""
        self.error = error
