"""Trace settings over HTTP: `/v2/trace/setting`, of all models and of one."""

from collections.abc import Sequence
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from gateway.dataplane import DataPlane
from gateway.frontends.http.body import decoded, read_body
from gateway.frontends.http.errors import JSON
from gateway.frontends.http.json_object import parse_json_object
from gateway.frontends.http.members import ARRAY, STRING, mismatch
from gateway.frontends.http.paths import MODEL
from gateway.observability.tracer import BOUNDS, LEVEL, read_trace_settings, show_trace_settings
from gateway.settings import HttpSettings


class TraceRoutes:
    """Reads and changes what is traced (trace extension)."""

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
        """Change the settings that the body names; null lets one fall back."""
        model = self._model(request)
        body = await read_body(request, self._max_input_size)
        members = await decoded(self._threads, request.scope, parse_json_object, body)
        wanted = {name: _texts(name, value) for name, value in members.items()}
        self._dataplane.tracer.update(model, read_trace_settings(wanted))
        return self._settings(model)

    def _model(self, request: Request) -> str:
        """The model that is meant, "" for all; InferenceError if there is none of that name."""
        name: str = request.path_params.get("model", "")
        return self._dataplane.model(name).name if name else ""

    def _settings(self, model: str) -> Response:
        found = show_trace_settings(self._dataplane.tracer.settings(model))
        return Response(orjson.dumps(found), media_type=JSON)


def _texts(name: str, value: Any) -> Sequence[str] | None:
    """A value as the trace settings take it; InferenceError INTERNAL if it is of another kind."""
    if value is None or name not in {LEVEL, *BOUNDS}:
        return None
    if name != LEVEL:
        value = [value]
    elif not isinstance(value, list):
        raise mismatch(name, ARRAY)
    if not all(isinstance(each, str) for each in value):
        raise mismatch(name, STRING)
    return [str(each) for each in value]
