"""The HTTP applications: all routes of the server, and the page of metrics on its own port."""

from itertools import chain

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from gateway.dataplane import DataPlane
from gateway.errors import InferenceError, unexpected
from gateway.frontends.http.access import LoggedApp
from gateway.frontends.http.control import CancelRoutes, ControlRoutes, LogRoutes, TraceRoutes
from gateway.frontends.http.cross_origin import CrossOriginApp
from gateway.frontends.http.documentation import Documentation, Tagged
from gateway.frontends.http.errors import error_response, openai_error_body, plain_error, refused
from gateway.frontends.http.generate import GenerateRoutes
from gateway.frontends.http.guard import HttpAccess
from gateway.frontends.http.infer import InferRoute
from gateway.frontends.http.openai.answers import openai_error, openai_refused
from gateway.frontends.http.openai.routes import OpenAiRoutes, ServerStateRoutes, is_openai
from gateway.frontends.http.playground.routes import PlaygroundRoutes
from gateway.frontends.http.record import RecordRoutes
from gateway.frontends.http.repository import RepositoryRoutes
from gateway.frontends.http.request_scope import BeginningApp, StreamHandover, TracedApp
from gateway.frontends.http.rollouts import RolloutRoutes
from gateway.frontends.http.shared_memory import SharedMemoryRoutes
from gateway.frontends.http.timing import RECEIPT, timed
from gateway.frontends.http.why import WhyRoutes
from gateway.metrics_page import MetricsPage
from gateway.observability.exposition import CONTENT_TYPE, OPEN_CONTENT_TYPE, reads_open_metrics
from gateway.policy.areas import Area
from gateway.policy.credentials import Credentials
from gateway.resumption.recordings import Recordings
from gateway.settings import HttpSettings


def build_app(
    dataplane: DataPlane,
    settings: HttpSettings,
    server_id: str,
    playground: PlaygroundRoutes | None = None,
    recordings: Recordings | None = None,
    credentials: Credentials | None = None,
) -> ASGIApp:
    """A Starlette application, with `infer` and OpenAI's endpoints in front of it.

    Without `playground` there is no page at /. The headers for pages of other origins are the
    outermost layer, so that each response has them, errors too. Each port has an application of
    its own.
    """
    recordings = recordings or Recordings()
    openai = OpenAiRoutes(dataplane, settings, recordings)
    tagged: Tagged = {
        "OpenAI": openai.routes() + ServerStateRoutes(dataplane).routes(),
        "server and models": ControlRoutes(dataplane, server_id).routes()
        + CancelRoutes(dataplane).routes(),
        "repository": RepositoryRoutes(dataplane, settings).routes()
        + RecordRoutes(dataplane, settings).routes(),
        "rollouts": RolloutRoutes(dataplane, settings).routes(),
        "shared memory": SharedMemoryRoutes(dataplane, settings).routes(),
        "log": LogRoutes(dataplane, settings).routes(),
        "traces": TraceRoutes(dataplane, settings).routes(),
        "administration": WhyRoutes(dataplane).routes(),
    }
    handlers = {InferenceError: _refused, HTTPException: _not_routed, Exception: _unexpected}
    access = HttpAccess(
        *(settings.restrictions, settings.control, credentials, dataplane.audit),
        changes=settings.changes,
    )
    described = {tag: access.offered(found) for tag, found in tagged.items()}
    routes = [
        *(Documentation(described, handlers).routes() if settings.documentation else ()),
        *GenerateRoutes(dataplane, settings, recordings).routes(),
        *chain.from_iterable(tagged.values()),
        *(playground.routes() if playground is not None else ()),
    ]
    app = Starlette(routes=access.guarded(routes), exception_handlers=handlers)
    app.router.redirect_slashes = False
    others = StreamHandover(openai.in_front_of(app, access.guard(Area.INFERENCE)))
    found: BeginningApp = InferRoute(dataplane, settings, others, recordings, access)
    if settings.cors_origins:
        found = CrossOriginApp(found, settings.cors_origins)
    if dataplane.access_log is not None:
        found = LoggedApp(found, dataplane.access_log)
    return TracedApp(found, dataplane.tracer)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, InferenceError)  # noqa: S101 - registered for these
    if is_openai(request.scope["path"]):
        return openai_refused(request, error)
    answer, receipt = refused(request.scope["path"], error), request.scope.get(RECEIPT)
    return answer if receipt is None else timed(answer, receipt)


async def _not_routed(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101 - registered for these
    if is_openai(request.scope["path"]):
        body = openai_error_body(error.status_code, error.detail)
        answer = openai_error(request, error.status_code, body)
    else:
        answer = plain_error(error.status_code, error.detail)
    answer.headers.update(error.headers or {})  # 405 has Allow
    return answer


async def _unexpected(request: Request, error: Exception) -> Response:
    # Starlette logs the traceback where it catches the exception; the client does not get it.
    if is_openai(request.scope["path"]):
        return openai_refused(request, unexpected())
    return error_response(unexpected())


def build_metrics_app(page: MetricsPage, credentials: Credentials | None = None) -> Starlette:
    """An application with the page `/metrics`, rendered for each request.

    Every other path is an empty page, as on Triton. Without `credentials` no request needs a key.
    """

    async def show(request: Request) -> Response:
        if reads_open_metrics(request.headers.get("accept", "")):
            return Response(await page.render(is_open=True), media_type=OPEN_CONTENT_TYPE)
        return Response(await page.render(), media_type=CONTENT_TYPE)

    routes = [Route(path, show, methods=["GET"]) for path in ("/metrics", "/metrics/")]
    other = Route("/{path:path}", _nothing, methods=["GET"])
    found = HttpAccess(credentials=credentials).guarded([*routes, other])
    return Starlette(routes=found, exception_handlers={HTTPException: _no_page})


async def _nothing(request: Request) -> Response:
    return Response(media_type=CONTENT_TYPE)


async def _no_page(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101 - registered for these
    allowed = dict(error.headers or {})
    return plain_error(error.status_code, error.detail, allowed)
