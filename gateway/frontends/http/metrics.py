"""The metrics endpoint: `GET /metrics`, on a port of its own."""

import asyncio
from collections.abc import Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.dataplane import DataPlane
from gateway.frontends.http.errors import plain_error
from gateway.models.model import Model
from gateway.observability.exposition import CONTENT_TYPE, label, render
from gateway.observability.machine import Machine
from gateway.observability.metrics import CacheReading, ModelReading, families
from gateway.settings import MetricsSettings

Cache = Callable[[], CacheReading | None]


def build_metrics_app(
    dataplane: DataPlane,
    settings: MetricsSettings,
    cache: Cache = lambda: None,
) -> Starlette:
    """An application with one page; what it shows is read when it is asked for.

    Every other path is, as on Triton, an empty page.
    """
    page = MetricsPage(dataplane, settings, cache)
    routes = [Route(path, page.show, methods=["GET"]) for path in ("/metrics", "/metrics/")]
    other = Route("/{path:path}", _nothing, methods=["GET"])
    return Starlette(routes=[*routes, other], exception_handlers={HTTPException: _refused})


class MetricsPage:
    """What the page shows, and where it comes from."""

    def __init__(self, dataplane: DataPlane, settings: MetricsSettings, cache: Cache) -> None:
        self._dataplane = dataplane
        self._settings = settings
        self._cache = cache
        self._machine = Machine(settings)

    async def show(self, request: Request) -> Response:
        """The page."""
        readings = [_reading(model) for model in self._dataplane.models()]
        found = families(readings, self._settings, self._cache()) + self._machine.families()
        if self._machine.gpus is not None:
            found += await asyncio.to_thread(self._machine.gpus.families)
        return Response(render(found), media_type=CONTENT_TYPE)


def _reading(model: Model) -> ModelReading:
    return ModelReading(
        name=model.name,
        version=model.version,
        statistics=model.statistics,
        in_flight=model.in_flight,
        ready=model.ready,
        families=[family for instance in model.instances for family in instance.metrics()],
        labels=_labels(model),
        cached=model.cached,
        load_secs=model.load_secs,
    )


def _labels(model: Model) -> dict[str, str]:
    tags = {label(f"_{tag}"): value for tag, value in model.config.metric_tags.items()}
    return tags | ({"namespace": model.namespace} if model.namespace else {})


async def _nothing(request: Request) -> Response:
    return Response(media_type=CONTENT_TYPE)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101 - what this handler is registered for
    return plain_error(error.status_code, error.detail)
