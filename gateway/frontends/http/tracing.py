"""Timestamps of HTTP in the traces of requests."""

from collections.abc import Awaitable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.dataplane import DataPlane
from gateway.messages import InferRequest
from gateway.models.model import Model
from gateway.observability.trace import Trace
from gateway.observability.tracer import Tracer
from gateway.stream import ResponseStream

TRACES = "sluice.traces"
"""The key of a request's traces in its scope; absent while tracing is off."""


class TracedApp:
    """An application that stamps the traces of a request when its response is sent."""

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self._app = app
        self._tracer = tracer

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        app = self._traced if self._tracer.on else self._app
        return app(scope, receive, send)

    async def _traced(self, scope: Scope, receive: Receive, send: Send) -> None:
        traces: list[Trace] = []
        scope[TRACES] = traces

        async def send_and_stamp(message: Message) -> None:
            if message["type"] == "http.response.start":
                for trace in traces:
                    trace.stamp("HTTP_SEND_START")
            await send(message)

        try:
            await self._app(scope, receive, send_and_stamp)
        finally:
            for trace in traces:
                trace.stamp("HTTP_SEND_END")
                trace.sent()


def infer(
    dataplane: DataPlane, scope: Scope, request: InferRequest, model: Model | None = None
) -> ResponseStream:
    """`DataPlane.infer` with a trace that has HTTP's timestamps, if the request is sampled."""
    return dataplane.infer(request, model, _begin(dataplane.tracer, scope, request))


def _begin(tracer: Tracer, scope: Scope, request: InferRequest) -> Trace | None:
    """The trace of a received request, if it is sampled."""
    traces: list[Trace] | None = scope.get(TRACES)
    if traces is None:
        return None
    trace = tracer.begin(request.model)
    if trace is not None:
        trace.stamp("HTTP_RECV_START", request.received_ns)
        trace.stamp("HTTP_RECV_END")
        traces.append(trace)
    return trace
