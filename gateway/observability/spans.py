"""Spans of OpenTelemetry, built from the times of a trace.

Names, attributes and events are those of Triton: `InferRequest`, below it a span with the name of
the model, below that `compute`. Those of members and of further programs are below the span of
their model, those of an engine below `compute`.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from gateway.errors import Code, InferenceError
from gateway.messages import NO_PARAMETERS, EngineStamps
from gateway.observability.gen_ai import OTHER_OPERATION
from gateway.observability.otlp_wire import (
    CLIENT,
    FAILED,
    INTERNAL,
    Parent,
    SpanForm,
    SpanRow,
    attributes,
    events,
    numbered,
    trace_state,
)
from gateway.observability.span_trace import SpanTrace
from gateway.observability.traceparent import SpanIds

ROOT = "InferRequest"
OF_MODEL = ("REQUEST_START", "QUEUE_START", "REQUEST_END")
OF_ARRIVAL = ("_RECV_START", "_RECV_END", "_WAITREAD_START", "_WAITREAD_END")
"""Ends of the names of the only events of a cancelled `InferRequest`."""
COMPUTE = SpanForm(
    "compute", ("COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END")
)
REPLICA = SpanForm("replica", kind=CLIENT)
ENGINE_QUEUE, PREFILL, GENERATE = (
    SpanForm(name, kind=INTERNAL) for name in ("engine.queue", "prefill", "generate")
)
MOST_CHARS = 1024
"""Characters of an attribute; longer texts of clients are cut."""
MOST_ID_CHARS = 64
"""Characters of a request id with which the spans of a request are packed at once."""
MOST_EVENTS = 8
"""Events of a span that is packed with them: a stream has two for each write, and no form."""
MOST_FORMS = 1024
"""Forms of spans that are kept: of models and versions, and of rows of events."""
TRACE_NUMBER, PARENT_NUMBER = "triton.trace_id", "triton.trace_parent_id"
REQUEST_ID = "triton.request_id"


def spans_of(trace: SpanTrace) -> list[bytes]:
    """The spans of a complete trace as messages of OTLP; none if it is empty."""
    if _is_usual(trace):
        parent, more = trace.spans.parent, _attributes(trace)
        row = row_of(tuple(trace.names), trace.model, trace.version, len(more), parent is not None)
        return usual_spans(row, trace.spans, _stamps(trace), more)
    if not (trace.events or trace.started_ns):
        return []
    found = _Spans(trace.spans)
    found.add_root(trace)
    for each in trace.members:
        if each.started_ns:
            found.add_model(each)
    return found.built


def _is_usual(trace: SpanTrace) -> bool:
    """Whether the spans of a complete trace are those of most requests: of `row_of`."""
    return not (
        trace.executed_ns == 0
        or trace.error is not None
        or trace.generated is not None
        or trace.asked is not NO_PARAMETERS
        or not 0 < len(trace.events) <= MOST_EVENTS
        or trace.descendants
        or trace.replicas
        or len(trace.request_id) > MOST_ID_CHARS
        or (
            type(trace.ids) is SpanIds
            and trace.ids.parent is not None
            and trace.ids.parent.state != ""
        )
    )


def _stamps(trace: SpanTrace) -> tuple[int, ...]:
    """The times of a usual trace, as `usual_spans` reads them."""
    phases, executed = trace.phases, trace.executed_ns
    return (
        *(trace.started_ns, trace.queued_ns, trace.ended_ns, executed),
        *(phases.input_ns, phases.infer_ns, phases.output_ns, *trace.times),
    )


def usual_spans(row: SpanRow, ids: SpanIds, stamps: Sequence[int], more: bytes) -> list[bytes]:
    """The spans of a request to one model, packed at once.

    Each is as of `_Spans`, which takes twice as long.
    """
    started, queued, ended, executed, input_ns, infer_ns, output_ns, *times = stamps
    gathered = executed + input_ns
    inferred = gathered + infer_ns
    first, last = min(started, times[0]), max(ended, times[-1])
    moments = (first, last, started, queued, ended, executed, gathered, inferred)
    offset_ns, above = ids.offset_ns, ids.parent
    named = [each.to_bytes(8, "big") for each in (ids.root_id, ids.model_id, ids.next_id())]
    return row.messages(
        row_values(
            (ids.trace_id.to_bytes(16, "big"), *named),
            [ns + offset_ns for ns in (*moments, inferred + output_ns, *times)],
            more,
            () if above is None else (above.span_id.to_bytes(8, "big"),),
        )
    )


def row_values(
    ids: Sequence[Any], moments: Sequence[Any], more: Any, above: Sequence[Any] = ()
) -> list[Any]:
    """The values of a row, in its order: one of each kind, or a column for many requests."""
    trace_id, root_id, model_id, compute_id = ids
    first, last, started, queued, ended, executed, gathered, inferred, done, *events = moments
    return [
        *(trace_id, root_id, *above, first, last, *events),
        *(trace_id, model_id, root_id, started, ended, started, queued, ended, more),
        *(trace_id, compute_id, model_id, executed, done, executed, gathered, inferred, done),
    ]


@lru_cache(MOST_FORMS)
def row_of(
    events: tuple[str, ...], model: str, version: str, more_size: int, has_parent: bool = False
) -> SpanRow:
    """The row of `InferRequest`, the span of a model, and `compute`."""
    of_model = _form_of_model(model, version, is_member=False, has_ended=True, more_size=more_size)
    return SpanRow((_form_of_root(events, has_parent), of_model, COMPUTE))


class _Spans:
    """The spans of one trace; times are of `time.perf_counter_ns` and become those of the epoch."""

    __slots__ = ("_ids", "_state", "_trace_id", "built")

    def __init__(self, ids: SpanIds) -> None:
        self.built: list[bytes] = []
        self._ids = ids
        self._trace_id = ids.trace_id.to_bytes(16, "big")
        self._state = b"" if ids.parent is None else trace_state(ids.parent.state)

    def add_root(self, trace: SpanTrace) -> None:
        """Add `InferRequest`, below the span of the caller if there is one."""
        names, times, error = trace.names, trace.times, trace.error
        moments = times
        if trace.started_ns:
            moments = [*times, trace.started_ns, trace.ended_ns or trace.queued_ns]
        if error is not None and error.code is Code.CANCELLED:
            kept = [n for n, name in enumerate(names) if name.endswith(OF_ARRIVAL)]
            names, times = [names[n] for n in kept], [times[n] for n in kept]
        parent, more = self._ids.parent, _failure(error)
        if len(names) > MOST_EVENTS:
            more += events(names, [ns + self._ids.offset_ns for ns in times])
            names, times = [], []
        form = _form_of_root(tuple(names), parent is not None)
        parent_id = 0 if parent is None else parent.span_id
        span = (min(moments), max(moments), *times)
        self._add(form, self._ids.root_id, parent_id, span, more)

    def add_model(self, trace: SpanTrace) -> None:
        """Add the span of a model, and those below it but for its members."""
        start, end = trace.started_ns, trace.ended_ns or trace.queued_ns
        is_member = trace.parent_id != 0
        form = _form_of_model(trace.model, trace.version, is_member, trace.ended_ns != 0)
        events = (start, trace.queued_ns, end) if trace.ended_ns else (start, trace.queued_ns)
        more = _attributes(trace) + _failure(trace.error)
        self._add(form, trace.span_id, trace.parent_span_id, (start, end, *events), more)
        for each in trace.replicas:
            address = attributes({"server.address": each.replica})
            self._add(REPLICA, each.span_id, trace.span_id, (each.ns, end), address)
        if trace.executed_ns:
            times = trace.compute_ns
            compute_id = self._ids.next_id()
            self._add(COMPUTE, compute_id, trace.span_id, (times[0], times[3], *times))
            if trace.generated is not None and trace.generated.engine is not None:
                self._add_engine(trace.generated.engine, compute_id)

    def _add_engine(self, stamps: EngineStamps, parent_id: int) -> None:
        """Add what the engine did; a phase without both times is left out."""
        phases = (
            (ENGINE_QUEUE, stamps.queued_ns, stamps.scheduled_ns),
            (PREFILL, stamps.scheduled_ns, stamps.first_token_ns),
            (GENERATE, stamps.first_token_ns, stamps.last_token_ns),
        )
        for form, start, end in phases:
            if start and end:
                self._add(form, self._ids.next_id(), parent_id, (start, end))

    def _add(
        self,
        form: SpanForm,
        span_id: int,
        parent_id: int,
        times: Sequence[int],
        more: bytes = b"",
    ) -> None:
        """Add a span with its start, its end, and the times of its events."""
        offset_ns = self._ids.offset_ns
        values: list[bytes | int] = [self._trace_id, span_id.to_bytes(8, "big")]
        if parent_id:
            values.append(parent_id.to_bytes(8, "big"))
        values += [ns + offset_ns for ns in times]
        self.built.append(form.message(values, more + self._state))


@lru_cache(MOST_FORMS)
def _form_of_root(events: tuple[str, ...], has_parent: bool) -> SpanForm:
    return SpanForm(ROOT, events, parent=Parent.REMOTE if has_parent else Parent.NONE)


@lru_cache(MOST_FORMS)
def _form_of_model(
    model: str, version: str, is_member: bool, has_ended: bool, more_size: int = 0
) -> SpanForm:
    found = {"triton.model_name": model, "triton.model_version": int(version)}
    if not is_member:
        found[PARENT_NUMBER] = 0
    events = OF_MODEL if has_ended else OF_MODEL[:-1]
    return SpanForm(model, events, fixed=attributes(found), more_size=more_size)


def _failure(error: InferenceError | None) -> bytes:
    """The status and the attribute of a request that has failed."""
    return b"" if error is None else FAILED + attributes({"error.type": error.code.name})


def _attributes(trace: SpanTrace) -> bytes:
    """The attributes of the span of a model, but for those of its form."""
    found = numbered(TRACE_NUMBER, trace.id)
    if trace.parent_id:
        found += numbered(PARENT_NUMBER, trace.parent_id)
    if trace.request_id:
        found += attributes({REQUEST_ID: trace.request_id[:MOST_CHARS]})
    generated = trace.generated
    if generated is not None and generated.has_tokens:
        answered = generated.attributes(trace.model, trace.started_ns)
        return found + attributes(
            {"gen_ai.operation.name": OTHER_OPERATION, **answered, **trace.asked}
        )
    return found + attributes(trace.asked) if trace.asked else found
