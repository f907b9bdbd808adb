"""Spans of OpenTelemetry, built from the stamps of a trace.

Names, attributes and events are those of Triton: `InferRequest`, below it a span with the name of
the model, below that `compute`. Those of members and of further programs are below the span of
their model, those of an engine below `compute`.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from gateway.errors import Code, InferenceError
from gateway.messages import NO_PARAMETERS, EngineStamps
from gateway.observability.gen_ai import OTHER_OPERATION
from gateway.observability.otlp_wire import CLIENT, INTERNAL, SERVER, WireSpan, span_message
from gateway.observability.trace import Stamp, Trace
from gateway.observability.traceparent import SPAN_ID_BITS, SpanIds, new_id

ROOT = "InferRequest"
REPLICA = "replica"
COMPUTE = "compute"
OF_MODEL = frozenset({"REQUEST_START", "QUEUE_START", "REQUEST_END"})
OF_COMPUTE = frozenset(
    {"COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END"}
)
OF_MODEL_OR_COMPUTE = OF_MODEL | OF_COMPUTE
OF_ARRIVAL = ("_RECV_START", "_RECV_END", "_WAITREAD_START", "_WAITREAD_END")
"""Ends of the names of the only events of a cancelled `InferRequest`."""
MOST_CHARS = 1024
"""Characters of an attribute; longer texts of clients are cut."""

Place = tuple[str, int, int, int, int]
"""The name of a span, the ids of it and of its parent (0: the caller), its start and its end."""


def spans_of(trace: Trace) -> list[bytes]:
    """The spans of a complete trace as messages of OTLP; none if it is empty."""
    if trace.spans is None or not trace.stamps:
        return []
    found = _Spans(trace.spans)
    found.add_root(trace)
    models = {each.id: each.span_id for each in trace.members}
    for each in trace.members:
        found.add_model(each, models.get(each.parent_id, trace.spans.root_id))
    return found.built


class _Spans:
    """The spans of one trace; times are of `time.perf_counter_ns`."""

    def __init__(self, ids: SpanIds) -> None:
        self.built: list[bytes] = []
        self._ids = ids
        self._state = "" if ids.parent is None else ids.parent.state

    def add_root(self, trace: Trace) -> None:
        """Add `InferRequest`, below the span of the caller if there is one."""
        events = [each for each in trace.stamps if each[0] not in OF_MODEL_OR_COMPUTE]
        error = trace.error
        if error is not None and error.code is Code.CANCELLED:
            events = [each for each in events if each[0].endswith(OF_ARRIVAL)]
        moments = [ns for _, ns in trace.stamps]
        place = (ROOT, self._ids.root_id, 0, min(moments), max(moments))
        self._add(place, NO_PARAMETERS, events, error)

    def add_model(self, trace: Trace, parent: int) -> None:
        """Add the span of a model, and those below it but for its members."""
        events = [each for each in trace.stamps if each[0] in OF_MODEL]
        about = next((each for each in trace.objects if "model_name" in each), None)
        if about is None or not events:
            return
        start, end = events[0][1], events[-1][1]
        place = (str(about["model_name"]), trace.span_id, parent, start, end)
        self._add(place, _attributes(trace, about, start), events, trace.error)
        for each in trace.objects:
            if "replica" in each:
                self._add_replica(each, trace.span_id, end)
        computed = [each for each in trace.stamps if each[0] in OF_COMPUTE]
        if computed:
            compute_id = new_id(SPAN_ID_BITS)
            below = (COMPUTE, compute_id, trace.span_id, computed[0][1], computed[-1][1])
            self._add(below, NO_PARAMETERS, computed)
            if trace.generated is not None and trace.generated.engine is not None:
                self._add_engine(trace.generated.engine, compute_id)

    def _add_replica(self, sent: Mapping[str, Any], parent: int, end: int) -> None:
        """Add a request to a replica, which continues the trace below it."""
        span_id = int(sent["traceparent"].split("-")[2], 16)
        address = {"server.address": str(sent["replica"])}
        self._add((REPLICA, span_id, parent, sent["ns"], end), address, kind=CLIENT)

    def _add_engine(self, stamps: EngineStamps, parent: int) -> None:
        """Add what the engine did; a phase without both times is left out."""
        phases = (
            ("engine.queue", stamps.queued_ns, stamps.scheduled_ns),
            ("prefill", stamps.scheduled_ns, stamps.first_token_ns),
            ("generate", stamps.first_token_ns, stamps.last_token_ns),
        )
        for name, start, end in phases:
            if start and end:
                place = (name, new_id(SPAN_ID_BITS), parent, start, end)
                self._add(place, NO_PARAMETERS, kind=INTERNAL)

    def _add(
        self,
        place: Place,
        attributes: Mapping[str, Any],
        events: Iterable[Stamp] = (),
        error: InferenceError | None = None,
        kind: int = SERVER,
    ) -> None:
        name, span_id, parent_id, start, end = place
        ids, is_remote = self._ids, False
        if not parent_id and ids.parent is not None:
            parent_id, is_remote = ids.parent.span_id, True
        if error is not None:
            attributes = {**attributes, "error.type": error.code.name}
        span = WireSpan(
            *(name, ids.trace_id, span_id, parent_id, start, end),
            *(kind, self._state, is_remote, error is not None),
        )
        self.built.append(span_message(span, attributes, events, ids.offset_ns))


def _attributes(trace: Trace, about: Mapping[str, Any], start: int) -> dict[str, Any]:
    model = str(about["model_name"])
    found: dict[str, Any] = {
        "triton.model_name": model,
        "triton.model_version": about["model_version"],
        "triton.trace_id": trace.id,
        "triton.trace_parent_id": trace.parent_id,
    }
    if "request_id" in about:
        found["triton.request_id"] = about["request_id"][:MOST_CHARS]
    generated = trace.generated
    if generated is not None and generated.has_tokens:
        found["gen_ai.operation.name"] = OTHER_OPERATION
        found |= generated.attributes(model, start)
    return {**found, **trace.asked}
