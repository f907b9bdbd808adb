"""Log settings over HTTP: `/v2/logging`."""

from collections.abc import Mapping
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from gateway.dataplane import DataPlane
from gateway.errors import Code, InferenceError
from gateway.frontends.http.body import decoded, read_body
from gateway.frontends.http.errors import JSON
from gateway.frontends.http.json_object import parse_json_object
from gateway.frontends.http.members import boolean, string, unsigned
from gateway.observability.log import FORMAT, VERBOSE, read_log_settings, show_log_settings
from gateway.settings import HttpSettings

PATH = "/v2/logging"
READERS = {
    "log_info": boolean,
    "log_warning": boolean,
    "log_error": boolean,
    VERBOSE: unsigned,
    FORMAT: string,
}


class LogRoutes:
    """Reads and changes what is logged, and how (logging extension)."""

    def __init__(self, dataplane: DataPlane, settings: HttpSettings) -> None:
        self._log = dataplane.log
        self._threads = dataplane.threads
        self._max_input_size = settings.max_input_size

    def router(self) -> APIRouter:
        """The routes, as FastAPI documents them at /docs."""
        router = APIRouter()
        router.add_api_route(PATH, self.show, methods=["GET"], response_class=Response)
        router.add_api_route(PATH, self.change, methods=["POST"], response_class=Response)
        return router

    async def show(self) -> Response:
        """The settings in force."""
        return Response(orjson.dumps(show_log_settings(self._log.settings)), media_type=JSON)

    async def change(self, request: Request) -> Response:
        """Change the settings that the body names; null leaves one as it is."""
        body = await read_body(request, self._max_input_size)
        members = await decoded(self._threads, request.scope, parse_json_object, body)
        given = {name: value for name, value in members.items() if value is not None}
        self._log.change(read_log_settings(_checked(given), refused_format))
        return await self.show()


def refused_format(text: str) -> InferenceError:
    """Triton answers 503 here, and INVALID_ARGUMENT over gRPC."""
    return InferenceError(Code.UNAVAILABLE, f"invalid argument for --log_format, got: {text}")


def _checked(given: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: READERS[name](given, name) if name in READERS else value
        for name, value in given.items()
    }
