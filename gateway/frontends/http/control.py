"""Control routes of the v2 protocol: health, metadata, statistics, cancel, logging, traces."""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from gateway import metadata
from gateway.config import pbtxt
from gateway.dataplane import DataPlane
from gateway.errors import Code, InferenceError, exiting
from gateway.frontends.http.audit import note_change
from gateway.frontends.http.body import decoded, read_body
from gateway.frontends.http.documentation import DocumentedRoute
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
from gateway.frontends.http.request_scope import (
    MODEL,
    VERSION,
    addressed,
    caller_in,
    tenant_in,
)
from gateway.observability.log import FORMAT, VERBOSE, read_log_settings, show_log_settings
from gateway.observability.tracer import (
    BOUNDS,
    FILE,
    LEVEL,
    read_trace_settings,
    show_trace_settings,
)
from gateway.request_name import RequestName
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


class ControlRoutes:
    """Health, metadata, configuration and statistics of the server and its models."""

    def __init__(self, dataplane: DataPlane, server_id: str) -> None:
        self._dataplane = dataplane
        self._server_id = server_id

    def routes(self) -> list[DocumentedRoute]:
        """The routes; `stats` of all models stands before the model of that name."""
        return [
            DocumentedRoute("GET", "/v2/health/live", self.live),
            DocumentedRoute("GET", "/v2/health/ready", self.ready),
            DocumentedRoute("GET", "/v2", self.server),
            DocumentedRoute("GET", "/v2/fleet", self.fleet),
            DocumentedRoute("GET", "/v2/memory", self.memory),
            DocumentedRoute("GET", "/admin/tenants", self.tenants),
            DocumentedRoute("GET", "/v2/models/stats", self.all_statistics),
            DocumentedRoute("GET", f"{MODEL}/ready", self.model_ready),
            DocumentedRoute("GET", f"{VERSION}/ready", self.model_ready),
            DocumentedRoute("GET", f"{MODEL}/config", self.config),
            DocumentedRoute("GET", f"{VERSION}/config", self.config),
            DocumentedRoute("GET", f"{MODEL}/stats", self.statistics),
            DocumentedRoute("GET", f"{VERSION}/stats", self.statistics),
            DocumentedRoute("GET", MODEL, self.metadata),
            DocumentedRoute("GET", VERSION, self.metadata),
        ]

    async def live(self, request: Request) -> Response:
        """Whether the process serves requests."""
        if self._dataplane.exiting:
            return plain_error(503, exiting().message)
        return Response()

    async def ready(self, request: Request) -> Response:
        """Whether every model that should be served is ready; if not, 400, as on Triton."""
        if self._dataplane.exiting:
            return plain_error(503, exiting().message)
        return Response(status_code=200 if await self._dataplane.check_ready() else 400)

    async def server(self, request: Request) -> Response:
        """Name, version and extensions of the server."""
        return _json(metadata.server_metadata(self._server_id))

    async def fleet(self, request: Request) -> Response:
        """The replicas of a router, with their models and loads; the routers of a replica."""
        if self._dataplane.fleet is None:
            raise InferenceError(
                Code.NOT_FOUND,
                "this server is part of no fleet: `sluice serve --fleet` starts a router, "
                "`sluice replica` a replica",
            )
        return _json(self._dataplane.fleet.describe())

    async def memory(self, request: Request) -> Response:
        """The models that sleep and wake, their memory, and the budget."""
        return _json(self._dataplane.memory())

    async def tenants(self, request: Request) -> Response:
        """The tenants: their rules, buckets, requests in flight and waiting, refusals by limit."""
        plane = self._dataplane
        if plane.admission is None:
            return _json({"tenants": []})
        in_flight = plane.running.by_tenant()
        return _json({"tenants": plane.admission.describe(plane.models(), in_flight)})

    async def metadata(self, request: Request) -> Response:
        """Inputs, outputs and ready versions of a model."""
        caller = caller_in(request.scope)
        return _json(
            metadata.model_metadata(self._dataplane, *addressed(request, self._dataplane), caller)
        )

    async def model_ready(self, request: Request) -> Response:
        """200 if the model serves requests, else 404 or 503 with the reason."""
        model, version = addressed(request, self._dataplane)
        found = self._dataplane.model(model, version)
        if not found.ready:
            return plain_error(503, f"model '{model}' is unavailable: {found.trouble}")
        await found.check_ready()
        return Response()

    async def config(self, request: Request) -> Response:
        """The model's configuration in force."""
        return _json(
            pbtxt.to_json(self._dataplane.model(*addressed(request, self._dataplane)).config)
        )

    async def statistics(self, request: Request) -> Response:
        """Statistics of the model's ready versions."""
        rows = metadata.statistics(self._dataplane, *addressed(request, self._dataplane))
        return _json({"model_stats": rows})

    async def all_statistics(self, request: Request) -> Response:
        """Statistics of every ready version of every model."""
        return _json({"model_stats": metadata.statistics(self._dataplane, "", "")})


class CancelRoutes:
    """`POST /v2/models/{model}[/versions/{version}]/requests/{id}/cancel`."""

    def __init__(self, dataplane: DataPlane) -> None:
        self._dataplane = dataplane

    def routes(self) -> list[DocumentedRoute]:
        """The routes, with and without a version."""
        return [
            DocumentedRoute("POST", f"{path}{CANCEL}", self.cancel) for path in (MODEL, VERSION)
        ]

    async def cancel(self, request: Request) -> Response:
        """Cancel every request with that id on that model; 404 if there is none."""
        request_id, tenant = request.path_params["request_id"], tenant_in(request.scope)
        caller = caller_in(request.scope)
        named = RequestName(*addressed(request, self._dataplane), request_id, tenant)
        name = self._dataplane.numbered(named, caller)
        await self._dataplane.running.cancel_anywhere(name, caller=caller)
        return Response(b"{}", media_type=JSON)


class LogRoutes:
    """Reads and changes the log settings (logging extension)."""

    def __init__(self, dataplane: DataPlane, settings: HttpSettings) -> None:
        self._log = dataplane.log
        self._threads = dataplane.threads
        self._max_input_size = settings.max_input_size

    def routes(self) -> list[DocumentedRoute]:
        """The routes that read and change."""
        return [
            DocumentedRoute("GET", LOGGING, self.show),
            DocumentedRoute("POST", LOGGING, self.change),
        ]

    async def show(self, request: Request) -> Response:
        """The settings in force."""
        return Response(orjson.dumps(show_log_settings(self._log.settings)), media_type=JSON)

    async def change(self, request: Request) -> Response:
        """Change the settings in the body; null leaves one unchanged."""
        body = await read_body(request, self._max_input_size)
        members = await decoded(self._threads, request.scope, parse_json_object, body)
        given = {name: value for name, value in members.items() if value is not None}
        note_change(request.scope, {"settings": given})
        wanted = read_log_settings(_checked(given), refused_format, self._log.file_named)
        self._log.change(wanted)
        return await self.show(request)


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

    def routes(self) -> list[DocumentedRoute]:
        """The routes that read and change, of all models and of one."""
        return [
            DocumentedRoute(method, path, endpoint)
            for path in ("/v2/trace/setting", f"{MODEL}/trace/setting")
            for method, endpoint in (("GET", self.show), ("POST", self.change))
        ]

    async def show(self, request: Request) -> Response:
        """The settings in force."""
        return self._settings(self._model(request))

    async def change(self, request: Request) -> Response:
        """Change the settings in the body; null resets one."""
        model = self._model(request)
        body = await read_body(request, self._max_input_size)
        members = await decoded(self._threads, request.scope, parse_json_object, body)
        note_change(request.scope, {"settings": members})
        wanted = {name: _texts(name, value) for name, value in members.items()}
        tracer = self._dataplane.tracer
        tracer.update(model, read_trace_settings(wanted, tracer.file_named))
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
    if name == FILE and value is not None:
        return [value] if isinstance(value, str) else []
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
