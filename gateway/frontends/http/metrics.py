"""The metrics endpoint: `GET /metrics`, on a port of its own."""

from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.dataplane import DataPlane
from gateway.models.model import Model
from gateway.observability.metrics import CONTENT_TYPE, ModelReading, families, render


def build_metrics_app(dataplane: DataPlane) -> Starlette:
    """An application with one page; what it shows is read when it is asked for."""
    endpoint = _endpoint(dataplane)
    return Starlette(
        routes=[Route(path, endpoint, methods=["GET"]) for path in ("/metrics", "/metrics/")]
    )


def _endpoint(dataplane: DataPlane) -> Callable[[Request], Awaitable[Response]]:
    async def metrics(request: Request) -> Response:
        readings = [_reading(model) for model in dataplane.models()]
        return Response(render(families(readings)), media_type=CONTENT_TYPE)

    return metrics


def _reading(model: Model) -> ModelReading:
    return ModelReading(
        name=model.name,
        version=model.version,
        statistics=model.statistics,
        in_flight=model.in_flight,
        ready=model.ready,
        families=[family for instance in model.instances for family in instance.metrics()],
    )
