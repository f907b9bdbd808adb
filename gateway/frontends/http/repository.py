"""The model repository extension over HTTP: index, load, unload (protocol 11)."""

import base64
import binascii
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from gateway.dataplane import DataPlane
from gateway.errors import Code, InferenceError
from gateway.frontends.http.body import read_body
from gateway.frontends.http.errors import JSON
from gateway.frontends.http.request_json import parse_json_object
from gateway.models.index import IndexRow
from gateway.models.override import FILE_PREFIX, Override
from gateway.settings import HttpSettings

REPOSITORY = "/v2/repository"
NAMED = "/v2/repository/{repository}"
CONFIG = "config"


class RepositoryRoutes:
    """`POST /v2/repository[/{repository}]/index`, `.../models/{model}/load` and `unload`."""

    def __init__(self, dataplane: DataPlane, settings: HttpSettings) -> None:
        self._dataplane = dataplane
        self._max_input_size = settings.max_input_size

    def router(self) -> APIRouter:
        """The routes, as FastAPI documents them at /docs."""
        router = APIRouter()
        for path, endpoint in self._endpoints():
            router.add_api_route(path, endpoint, methods=["POST"], response_class=Response)
        return router

    def _endpoints(self) -> list[tuple[str, Any]]:
        return [
            (f"{REPOSITORY}/index", self.index),
            (f"{NAMED}/index", self.index),
            (f"{REPOSITORY}/models/{{model}}/load", self.load),
            (f"{REPOSITORY}/models/{{model}}/unload", self.unload),
            (f"{NAMED}/models/{{model}}/load", self.refuse_repository),
            (f"{NAMED}/models/{{model}}/unload", self.refuse_repository),
        ]

    async def index(self, request: Request) -> Response:
        """Every model in the repositories, with the states of its versions."""
        ready = (await self._body(request)).get("ready", False)
        if not isinstance(ready, bool):
            raise InferenceError(Code.INVALID_ARG, "Invalid value for 'ready': expected a boolean")
        rows = await self._dataplane.index(ready=ready)
        return Response(orjson.dumps([_members(row) for row in rows]), media_type=JSON)

    async def load(self, request: Request, model: str) -> Response:
        """Load or reload a model; it serves when the answer comes."""
        override = _override(_parameters(await self._body(request)))
        await self._dataplane.load(model, override)
        return Response()

    async def unload(self, request: Request, model: str) -> Response:
        """Unload a model: no request finds it any more when the answer comes."""
        found = _parameters(await self._body(request)).get("unload_dependents", False)
        if not isinstance(found, bool):
            raise InferenceError(
                Code.INTERNAL,
                "Unable to parse 'unload_dependents': attempt to access JSON non-boolean as "
                "boolean",
            )
        await self._dataplane.unload(model, unload_dependents=found)
        return Response()

    async def refuse_repository(self, request: Request) -> Response:
        """One repository cannot be meant: 501, as Triton."""
        raise InferenceError(Code.UNSUPPORTED, "'repository_name' specification is not supported")

    async def _body(self, request: Request) -> dict[str, Any]:
        body = await read_body(request, self._max_input_size)
        return parse_json_object(body) if body.strip() else {}


def _members(row: IndexRow) -> dict[str, str]:
    members = {
        "name": row.name,
        "version": row.version,
        "state": row.state,
        "reason": row.reason,
    }
    return {key: value for key, value in members.items() if value}


def _parameters(body: dict[str, Any]) -> dict[str, Any]:
    found = body.get("parameters", {})
    if not isinstance(found, dict):
        raise InferenceError(Code.INTERNAL, "attempt to get members for non-object")
    return found


def _override(parameters: dict[str, Any]) -> Override | None:
    config, files = None, {}
    for key, value in parameters.items():
        if not isinstance(value, str):
            raise InferenceError(
                Code.INTERNAL,
                f"load parameter '{key}': attempt to access JSON non-string as string",
            )
        if key == CONFIG:
            config = value
        elif key.startswith(FILE_PREFIX):
            files[key] = _decoded(key, value)
        else:
            raise InferenceError(
                Code.INTERNAL,
                f"unexpected error on creating Triton parameter: load parameter '{key}' is "
                f"unknown, expected '{CONFIG}' or '{FILE_PREFIX}<path>'",
            )
    return Override(config, files) if parameters else None


def _decoded(key: str, value: str) -> bytes:
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError):
        raise InferenceError(
            Code.INVALID_ARG, f"load parameter '{key}' is no base64 text"
        ) from None
