"""Traces of requests over gRPC, with the metadata by which they continue those of their callers."""

from gateway.frontends.grpc.status import Metadata
from gateway.messages import InferRequest
from gateway.observability.trace import Trace
from gateway.observability.traceparent import TRACEPARENT, TRACESTATE, read_parent
from gateway.observability.tracer import Tracer


def begin_trace(
    tracer: Tracer, request: InferRequest, metadata: Metadata, begun_ns: int
) -> Trace | None:
    """The trace of a request whose RPC or message began then, if the request is sampled."""
    parent = None
    if tracer.reads_headers:
        parents, states = (
            [str(value) for each, value in metadata if each == name]
            for name in (TRACEPARENT, TRACESTATE)
        )
        parent = read_parent(parents, states)
    trace = tracer.begin(request.model, parent, request.caller)
    if trace is not None:
        trace.stamp("GRPC_WAITREAD_START", begun_ns)
        trace.stamp("GRPC_WAITREAD_END", request.received_ns)
    return trace
