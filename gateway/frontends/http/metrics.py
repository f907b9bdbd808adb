"""The metrics endpoint: `GET /metrics`, on a port of its own."""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from gateway.dataplane import DataPlane
from gateway.frontends.http.errors import plain_error
from gateway.metrics_page import (
    CacheReader,
    FrontendsReader,
    MetricsPage,
    RecordingsReader,
    no_cache,
    no_frontends,
    no_recordings,
)
from gateway.observability.exposition import CONTENT_TYPE
from gateway.settings import MetricsSettings


def build_metrics_app(
    dataplane: DataPlane,
    settings: MetricsSettings,
    cache: CacheReader = no_cache,
    recordings: RecordingsReader = no_recordings,
    frontends: FrontendsReader = no_frontends,
) -> Starlette:
    """An application with one page; what it shows is read when it is asked for.

    Every other path is, as on Triton, an empty page.
    """
    page = MetricsPage(dataplane, settings, cache, recordings, frontends)

    async def show(request: Request) -> Response:
        return Response(await page.render(), media_type=CONTENT_TYPE)

    routes = [Route(path, show, methods=["GET"]) for path in ("/metrics", "/metrics/")]
    other = Route("/{path:path}", _nothing, methods=["GET"])
    return Starlette(routes=[*routes, other], exception_handlers={HTTPException: _refused})


async def _nothing(request: Request) -> Response:
    return Response(media_type=CONTENT_TYPE)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101 - what this handler is registered for
    allowed = dict(error.headers or {})
    return plain_error(error.status_code, error.detail, allowed)
