"""Traces of requests over gRPC, with the metadata by which they continue those of their callers."""

from gateway.frontends.grpc.status import Metadata
from gateway.messages import InferRequest
from gateway.observability.trace import Trace, WireStamps
from gateway.observability.traceparent import TRACEPARENT, parent_in
from gateway.observability.tracer import Tracer

GRPC = WireStamps(
    ("GRPC_WAITREAD_START", "GRPC_WAITREAD_END"), ("GRPC_SEND_START", "GRPC_SEND_END")
)


def begin_trace(
    tracer: Tracer, request: InferRequest, metadata: Metadata, begun_ns: int
) -> Trace | None:
    """The trace of a request whose RPC or message began then, if the request is sampled."""
    parent = None
    if tracer.reads_headers and TRACEPARENT in [name for name, _ in metadata]:
        parent = parent_in((name, str(value)) for name, value in metadata)
    trace = tracer.begin(request.model, parent, request.caller)
    if trace is not None:
        trace.received(GRPC, begun_ns, request.received_ns)
    return trace
