"""Traces of a request at both ends: its `traceparent` from a router, and its trace at a replica."""

from gateway.messages import InferRequest, Lineage
from gateway.observability.trace import Trace
from gateway.observability.traceparent import read_parent
from gateway.observability.tracer import Tracer
from gateway.processes.request_terms import TraceParent


def sent_to(address: str, trace: Lineage | None) -> Lineage | None:
    """The `trace` of a request as it is sent; that of this router records the replica."""
    if trace is None or not isinstance(trace, Trace):
        return trace
    return TraceParent(trace.routed(address))


def begin_trace(tracer: Tracer, request: InferRequest, received_ns: int) -> Trace | None:
    """The trace of a request of a router, if its router traces it, or it is sampled here."""
    if not tracer.on:
        return None
    sent = request.trace.text if isinstance(request.trace, TraceParent) else ""
    trace = tracer.begin(request.model, read_parent([sent]))
    if trace is not None:
        trace.stamp("FLEET_RECV_START", received_ns)
        trace.stamp("FLEET_RECV_END")
    return trace


def end_trace(trace: Trace | None) -> None:
    """Complete the trace of a request whose responses are sent."""
    if trace is not None:
        trace.stamp("FLEET_SEND_END")
        trace.sent()
