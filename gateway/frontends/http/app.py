"""The HTTP applications: all routes of the server, and the page of metrics on its own port."""

from fastapi.exceptions import RequestValidationError
from fastapi_offline import FastAPIOffline
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from gateway import __version__
from gateway.dataplane import DataPlane
from gateway.errors import InferenceError, unexpected
from gateway.frontends.http.control import CancelRoutes, ControlRoutes, LogRoutes, TraceRoutes
from gateway.frontends.http.errors import error_response, openai_error_body, plain_error, refused
from gateway.frontends.http.generate import GenerateRoutes
from gateway.frontends.http.infer import InferRoute
from gateway.frontends.http.openai.answers import openai_error, openai_refused
from gateway.frontends.http.openai.routes import OpenAiRoutes, ServerStateRoutes, is_openai
from gateway.frontends.http.playground.routes import PlaygroundRoutes
from gateway.frontends.http.repository import RepositoryRoutes
from gateway.frontends.http.request_scope import StreamHandover, TracedApp
from gateway.frontends.http.shared_memory import SharedMemoryRoutes
from gateway.metrics_page import (
    CacheReader,
    FrontendsReader,
    MetricsPage,
    RecordingsReader,
    no_reading,
)
from gateway.observability.exposition import CONTENT_TYPE
from gateway.resumption.recordings import Recordings
from gateway.settings import HttpSettings, MetricsSettings


def build_app(
    dataplane: DataPlane,
    settings: HttpSettings,
    server_id: str,
    playground: PlaygroundRoutes | None = None,
    recordings: Recordings | None = None,
) -> ASGIApp:
    """A FastAPI application, with `infer` and OpenAI's endpoints in front of it.

    The page at /docs loads nothing from other servers. Without `playground` there is no page at /.
    """
    app = FastAPIOffline(
        title="Sluice",
        version=__version__,
        redirect_slashes=False,
        exception_handlers={
            InferenceError: _refused,
            HTTPException: _not_routed,
            RequestValidationError: _invalid,
            Exception: _unexpected,
        },
    )
    recordings = recordings or Recordings()
    app.router.routes.extend(GenerateRoutes(dataplane, settings, recordings).routes())
    openai = OpenAiRoutes(dataplane, settings, recordings)
    app.router.routes.extend(openai.routes())
    app.include_router(openai.router(), tags=["OpenAI"])
    app.include_router(ServerStateRoutes(dataplane).router(), tags=["OpenAI"])
    app.include_router(ControlRoutes(dataplane, server_id).router(), tags=["server and models"])
    app.include_router(CancelRoutes(dataplane).router(), tags=["server and models"])
    app.include_router(RepositoryRoutes(dataplane, settings).router(), tags=["repository"])
    app.include_router(SharedMemoryRoutes(dataplane, settings).router(), tags=["shared memory"])
    app.include_router(LogRoutes(dataplane, settings).router(), tags=["log"])
    app.include_router(TraceRoutes(dataplane, settings).router(), tags=["traces"])
    if playground is not None:
        app.router.routes.extend(playground.routes())
    others = StreamHandover(openai.in_front_of(app))
    return TracedApp(InferRoute(dataplane, settings, others, recordings), dataplane.tracer)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, InferenceError)  # noqa: S101 - registered for these
    if is_openai(request.url.path):
        return openai_refused(request, error)
    return refused(request.url.path, error)


async def _not_routed(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101 - registered for these
    if is_openai(request.url.path):
        body = openai_error_body(error.status_code, error.detail)
        answer = openai_error(request, error.status_code, body)
    else:
        answer = plain_error(error.status_code, error.detail)
    answer.headers.update(error.headers or {})  # 405 has Allow
    return answer


async def _invalid(request: Request, error: Exception) -> Response:
    return plain_error(400, f"invalid path or query of {request.url.path}")


async def _unexpected(request: Request, error: Exception) -> Response:
    # Starlette logs the traceback where it catches the exception; the client does not get it.
    if is_openai(request.url.path):
        return openai_refused(request, unexpected())
    return error_response(unexpected())


def build_metrics_app(
    dataplane: DataPlane,
    settings: MetricsSettings,
    cache: CacheReader = no_reading,
    recordings: RecordingsReader = no_reading,
    frontends: FrontendsReader = no_reading,
) -> Starlette:
    """An application with the page `/metrics`, rendered for each request.

    Every other path is an empty page, as on Triton.
    """
    page = MetricsPage(dataplane, settings, cache, recordings, frontends)

    async def show(request: Request) -> Response:
        return Response(await page.render(), media_type=CONTENT_TYPE)

    routes = [Route(path, show, methods=["GET"]) for path in ("/metrics", "/metrics/")]
    other = Route("/{path:path}", _nothing, methods=["GET"])
    return Starlette(routes=[*routes, other], exception_handlers={HTTPException: _no_page})


async def _nothing(request: Request) -> Response:
    return Response(media_type=CONTENT_TYPE)


async def _no_page(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101 - registered for these
    allowed = dict(error.headers or {})
    return plain_error(error.status_code, error.detail, allowed)
