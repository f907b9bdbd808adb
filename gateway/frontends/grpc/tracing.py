"""What the traces of requests over gRPC learn of receiving and sending."""

from gateway.frontends.grpc.rpc import Call
from gateway.messages import InferRequest
from gateway.observability.trace import Trace
from gateway.observability.tracer import Tracer


def begin(tracer: Tracer, request: InferRequest) -> Trace | None:
    """The trace of a request that has been received, if it is sampled."""
    if not tracer.on:
        return None
    trace = tracer.begin(request.model)
    if trace is not None:
        trace.stamp("GRPC_WAITREAD_START", request.received_ns)
        trace.stamp("GRPC_WAITREAD_END")
    return trace


def follow(trace: Trace, call: Call) -> None:
    """The RPC's answer is about to be sent: tell the trace once that is done."""

    def sent() -> None:
        trace.stamp("GRPC_SEND_END")
        trace.sent()

    trace.stamp("GRPC_SEND_START")
    call.on_end(sent)
