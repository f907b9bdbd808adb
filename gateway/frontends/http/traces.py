"""The beginning of a request's trace, with the headers by which it continues that of its caller."""

from collections.abc import Iterable, Sequence

from gateway.messages import InferRequest
from gateway.observability.trace import Trace, WireStamps
from gateway.observability.traceparent import (
    TRACEPARENT,
    TRACESTATE,
    ParentSpan,
    parent_in,
)
from gateway.observability.tracer import Tracer

PARENT, STATE = TRACEPARENT.encode(), TRACESTATE.encode()
"""The headers of a request with the span of its caller."""
HTTP = WireStamps(("HTTP_RECV_START", "HTTP_RECV_END"), ("HTTP_SEND_START", "HTTP_SEND_END"))


def trace_of(
    headers: Sequence[tuple[bytes, bytes]],
    tracer: Tracer,
    request: InferRequest,
    begun_ns: int,
    whole_ns: int,
) -> Trace | None:
    """The trace of a request, if it is sampled: its head began, and its body was whole, then."""
    parent = _context(headers) if tracer.reads_headers else None
    trace = tracer.begin(request.model, parent, request.caller)
    if trace is not None:
        trace.received(HTTP, begun_ns, whole_ns)
    return trace


def _context(headers: Iterable[tuple[bytes, bytes]]) -> ParentSpan | None:
    found = [pair for pair in headers if pair[0] in (PARENT, STATE)]
    if not found:
        return None
    return parent_in((name.decode(), value.decode("latin-1")) for name, value in found)
