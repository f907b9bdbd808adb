"""What the traces of requests over HTTP learn of receiving and sending."""

from collections.abc import Awaitable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.dataplane import DataPlane
from gateway.messages import InferRequest
from gateway.models.model import Model
from gateway.observability.trace import Trace
from gateway.observability.tracer import Tracer
from gateway.stream import ResponseStream

TRACES = "sluice.traces"
"""Where a request's scope has its traces; it is there only while requests are traced."""


class TracedApp:
    """Stands before the application, and tells a request's trace when its response goes out."""

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self._app = app
        self._tracer = tracer

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        app = self._traced if self._tracer.on else self._app
        return app(scope, receive, send)

    async def _traced(self, scope: Scope, receive: Receive, send: Send) -> None:
        traces: list[Trace] = []
        scope[TRACES] = traces

        async def send_and_tell(message: Message) -> None:
            if message["type"] == "http.response.start":
                for trace in traces:
                    trace.stamp("HTTP_SEND_START")
            await send(message)

        try:
            await self._app(scope, receive, send_and_tell)
        finally:
            for trace in traces:
                trace.stamp("HTTP_SEND_END")
                trace.sent()


def infer(
    dataplane: DataPlane, scope: Scope, request: InferRequest, model: Model | None = None
) -> ResponseStream:
    """As `DataPlane.infer`; the request's trace, if it is sampled, learns what HTTP does."""
    return dataplane.infer(request, model, _begin(dataplane.tracer, scope, request))


def _begin(tracer: Tracer, scope: Scope, request: InferRequest) -> Trace | None:
    """The trace of a request that has been received, if it is sampled."""
    traces: list[Trace] | None = scope.get(TRACES)
    if traces is None:
        return None
    trace = tracer.begin(request.model)
    if trace is not None:
        trace.stamp("HTTP_RECV_START", request.received_ns)
        trace.stamp("HTTP_RECV_END")
        traces.append(trace)
    return trace
