"""Control routes of the v2 protocol: health, metadata, statistics, cancel, logging, traces."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Depends, Request, Response

from gateway import metadata
from gateway.config import pbtxt
from gateway.dataplane import DataPlane, RequestName
from gateway.errors import Code, InferenceError, exiting
from gateway.frontends.http.body import decoded, read_body
from gateway.frontends.http.errors import JSON, plain_error
from gateway.frontends.http.json_object import (
    ARRAY,
    STRING,
    boolean_member,
    mismatch,
    parse_json_object,
    string_member,
    unsigned_member,
)
from gateway.frontends.http.request_scope import MODEL, VERSION, version_of
from gateway.observability.log import FORMAT, VERBOSE, read_log_settings, show_log_settings
from gateway.observability.tracer import BOUNDS, LEVEL, read_trace_settings, show_trace_settings
from gateway.settings import HttpSettings

CANCEL = "/requests/{request_id:path}/cancel"
"""An id may contain slashes."""

LOGGING = "/v2/logging"
READERS = {
    "log_info": boolean_member,
    "log_warning": boolean_member,
    "log_error": boolean_member,
    VERBOSE: unsigned_member,
    FORMAT: string_member,
}


async def _version(request: Request) -> str:
    return version_of(request)


Version = Annotated[str, Depends(_version)]


class ControlRoutes:
    """Health, metadata, configuration and statistics of the server and its models."""

    def __init__(self, dataplane: DataPlane, server_id: str) -> None:
        self._dataplane = dataplane
        self._server_id = server_id

    def router(self) -> APIRouter:
        """The routes, as FastAPI documents them at /docs."""
        router = APIRouter()
        for path, endpoint in self._endpoints():
            router.add_api_route(path, endpoint, methods=["GET"], response_class=Response)
        return router

    def _endpoints(self) -> list[tuple[str, Any]]:
        return [
            ("/v2/health/live", self.live),
            ("/v2/health/ready", self.ready),
            ("/v2", self.server),
            ("/v2/models/stats", self.all_statistics),
            (f"{MODEL}/ready", self.model_ready),
            (f"{VERSION}/ready", self.model_ready),
            (f"{MODEL}/config", self.config),
            (f"{VERSION}/config", self.config),
            (f"{MODEL}/stats", self.statistics),
            (f"{VERSION}/stats", self.statistics),
            (MODEL, self.metadata),
            (VERSION, self.metadata),
        ]

    async def live(self) -> Response:
        """Whether the process serves requests."""
        if self._dataplane.exiting:
            return plain_error(503, exiting().message)
        return Response()

    async def ready(self) -> Response:
        """Whether every model that should be served is ready; if not, 400, as on Triton."""
        if self._dataplane.exiting:
            return plain_error(503, exiting().message)
        return Response(status_code=200 if await self._dataplane.check_ready() else 400)

    async def server(self) -> Response:
        """Name, version and extensions of the server."""
        return _json(metadata.server_metadata(self._server_id))

    async def metadata(self, model: str, version: Version) -> Response:
        """Inputs, outputs and ready versions of a model."""
        return _json(metadata.model_metadata(self._dataplane, model, version))

    async def model_ready(self, model: str, version: Version) -> Response:
        """200 if the model serves requests, else 404 or 503 with the reason."""
        found = self._dataplane.model(model, version)
        if not found.ready:
            return plain_error(503, f"model '{model}' is unavailable: {found.trouble}")
        await found.check_ready()
        return Response()

    async def config(self, model: str, version: Version) -> Response:
        """The model's configuration in force."""
        return _json(pbtxt.to_json(self._dataplane.model(model, version).config))

    async def statistics(self, model: str, version: Version) -> Response:
        """Statistics of the model's ready versions."""
        rows = metadata.statistics(self._dataplane, model, version)
        return _json({"model_stats": rows})

    async def all_statistics(self) -> Response:
        """Statistics of every ready version of every model."""
        return _json({"model_stats": metadata.statistics(self._dataplane, "", "")})


class CancelRoutes:
    """`POST /v2/models/{model}[/versions/{version}]/requests/{id}/cancel`."""

    def __init__(self, dataplane: DataPlane) -> None:
        self._dataplane = dataplane

    def router(self) -> APIRouter:
        """The routes, as FastAPI documents them at /docs."""
        router = APIRouter()
        for path in (MODEL, VERSION):
            router.add_api_route(
                f"{path}{CANCEL}", self.cancel, methods=["POST"], response_class=Response
            )
        return router

    async def cancel(self, request: Request, model: str, request_id: str) -> Response:
        """Cancel every request with that id on that model; 404 if there is none."""
        self._dataplane.cancel(RequestName(model, version_of(request), request_id))
        return Response(b"{}", media_type=JSON)


class LogRoutes:
    """Reads and changes the log settings (logging extension)."""

    def __init__(self, dataplane: DataPlane, settings: HttpSettings) -> None:
        self._log = dataplane.log
        self._threads = dataplane.threads
        self._max_input_size = settings.max_input_size

    def router(self) -> APIRouter:
        """The routes, as FastAPI documents them at /docs."""
        router = APIRouter()
        router.add_api_route(LOGGING, self.show, methods=["GET"], response_class=Response)
        router.add_api_route(LOGGING, self.change, methods=["POST"], response_class=Response)
        return router

    async def show(self) -> Response:
        """The settings in force."""
        return Response(orjson.dumps(show_log_settings(self._log.settings)), media_type=JSON)

    async def change(self, request: Request) -> Response:
        """Change the settings in the body; null leaves one unchanged."""
        body = await read_body(request, self._max_input_size)
        members = await decoded(self._threads, request.scope, parse_json_object, body)
        given = {name: value for name, value in members.items() if value is not None}
        self._log.change(read_log_settings(_checked(given), refused_format))
        return await self.show()


def refused_format(text: str) -> InferenceError:
    """The error for a log format: 503, as on Triton; INVALID_ARGUMENT over gRPC."""
    return InferenceError(Code.UNAVAILABLE, f"invalid argument for --log_format, got: {text}")


def _checked(given: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: READERS[name](given, name) if name in READERS else value
        for name, value in given.items()
    }


class TraceRoutes:
    """Reads and changes the trace settings, of all models or of one (trace extension)."""

    def __init__(self, dataplane: DataPlane, settings: HttpSettings) -> None:
        self._dataplane = dataplane
        self._threads = dataplane.threads
        self._max_input_size = settings.max_input_size

    def router(self) -> APIRouter:
        """The routes, as FastAPI documents them at /docs."""
        router = APIRouter()
        for path in ("/v2/trace/setting", f"{MODEL}/trace/setting"):
            router.add_api_route(path, self.show, methods=["GET"], response_class=Response)
            router.add_api_route(path, self.change, methods=["POST"], response_class=Response)
        return router

    async def show(self, request: Request) -> Response:
        """The settings in force."""
        return self._settings(self._model(request))

    async def change(self, request: Request) -> Response:
        """Change the settings in the body; null resets one."""
        model = self._model(request)
        body = await read_body(request, self._max_input_size)
        members = await decoded(self._threads, request.scope, parse_json_object, body)
        wanted = {name: _texts(name, value) for name, value in members.items()}
        self._dataplane.tracer.update(model, read_trace_settings(wanted))
        return self._settings(model)

    def _model(self, request: Request) -> str:
        """The model in the path, "" for all; InferenceError if the model is unknown."""
        name: str = request.path_params.get("model", "")
        return self._dataplane.model(name).name if name else ""

    def _settings(self, model: str) -> Response:
        found = show_trace_settings(self._dataplane.tracer.settings(model))
        return Response(orjson.dumps(found), media_type=JSON)


def _texts(name: str, value: Any) -> Sequence[str] | None:
    """A value of a trace setting as texts; InferenceError INTERNAL for one of another kind."""
    if value is None or name not in {LEVEL, *BOUNDS}:
        return None
    if name != LEVEL:
        value = [value]
    elif not isinstance(value, list):
        raise mismatch(name, ARRAY)
    if not all(isinstance(each, str) for each in value):
        raise mismatch(name, STRING)
    return [str(each) for each in value]


def _json(found: Any) -> Response:
    return Response(orjson.dumps(found), media_type=JSON)
