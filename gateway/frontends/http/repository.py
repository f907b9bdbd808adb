"""Routes of the model repository extension: index, load, unload."""

import base64
import binascii
import re
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response

from gateway.dataplane import DataPlane
from gateway.errors import Code, InferenceError
from gateway.frontends.http.audit import note_change
from gateway.frontends.http.body import decoded, read_body
from gateway.frontends.http.documentation import DocumentedRoute
from gateway.frontends.http.errors import JSON
from gateway.frontends.http.json_object import parse_generate, parse_optional_object
from gateway.frontends.http.large_json import LongString
from gateway.models.index import IndexRow
from gateway.models.model_folder import (
    FILE_PREFIX,
    SHOWN_CHARS,
    VERSIONS,
    Override,
    read_versions,
)
from gateway.settings import HttpSettings
from gateway.tensor import Buffer

REPOSITORY = "/v2/repository"
NAMED = "/v2/repository/{repository}"
CONFIG = "config"
LABELS = "labels"
UNLOAD_DEPENDENTS = "unload_dependents"
NESTED_READY = re.compile(rb'\s*\{\s*"ready"\s*:\s*[\[{]')
"""A `ready` that is not a boolean; it may be nested too deep to be parsed."""
BASE64_UNIT = 4
"""Characters of base64 that are decoded together."""

T = TypeVar("T")


class RepositoryRoutes:
    """`POST /v2/repository[/{repository}]/index`, `.../models/{model}/load` and `unload`."""

    def __init__(self, dataplane: DataPlane, settings: HttpSettings) -> None:
        self._dataplane = dataplane
        self._max_input_size = settings.max_input_size

    def routes(self) -> list[DocumentedRoute]:
        """The routes; those with a repository in the path refuse loads and unloads."""
        return [
            DocumentedRoute("POST", f"{REPOSITORY}/index", self.index),
            DocumentedRoute("POST", f"{NAMED}/index", self.index),
            DocumentedRoute("POST", f"{REPOSITORY}/models/{{model}}/load", self.load),
            DocumentedRoute("POST", f"{REPOSITORY}/models/{{model}}/unload", self.unload),
            DocumentedRoute("GET", f"{REPOSITORY}/models/{{model}}/labels", self.labels),
            DocumentedRoute("POST", f"{REPOSITORY}/models/{{model}}/labels", self.label),
            DocumentedRoute("POST", f"{NAMED}/models/{{model}}/load", self.refuse_repository),
            DocumentedRoute("POST", f"{NAMED}/models/{{model}}/unload", self.refuse_repository),
        ]

    async def index(self, request: Request) -> Response:
        """Every model in the repositories, with the states of its versions."""
        ready = await self._read(request, _ready_of)
        if not isinstance(ready, bool):
            raise InferenceError(Code.INVALID_ARG, "Invalid value for 'ready': expected a boolean")
        rows = await self._dataplane.index(ready=ready)
        return Response(orjson.dumps([_members(row) for row in rows]), media_type=JSON)

    async def load(self, request: Request) -> Response:
        """Load or reload a model; it serves when the response is sent."""
        override = await self._read(request, _override_of)
        if override is not None:
            config = () if override.config is None else (CONFIG,)
            note_change(request.scope, _about([*config, *override.files], override.versions))
        await self._dataplane.load(request.path_params["model"], override)
        return Response()

    async def unload(self, request: Request) -> Response:
        """Unload a model; when the response is sent, no new request reaches it."""
        parameters = _parameters(await self._read(request, parse_optional_object))
        dependents = parameters.get(UNLOAD_DEPENDENTS, False)
        if not isinstance(dependents, bool):
            raise _mismatch(UNLOAD_DEPENDENTS, "boolean")
        given = parameters.get(VERSIONS)
        if given is not None and not isinstance(given, str):
            raise _mismatch(VERSIONS, "string")
        versions = frozenset() if given is None else read_versions(given)
        note_change(request.scope, _about([UNLOAD_DEPENDENTS] if dependents else [], versions))
        name = request.path_params["model"]
        await self._dataplane.unload(name, versions, unload_dependents=dependents)
        return Response()

    async def labels(self, request: Request) -> Response:
        """The labels of a model, each with its version."""
        found = self._dataplane.labels(request.path_params["model"])
        return Response(orjson.dumps({LABELS: found}), media_type=JSON)

    async def label(self, request: Request) -> Response:
        """Name loaded versions of a model; null removes a label. The answer has all labels."""
        changes = await self._read(request, _labels_of)
        note_change(request.scope, {LABELS: changes})
        self._dataplane.set_labels(request.path_params["model"], changes)
        return await self.labels(request)

    async def refuse_repository(self, request: Request) -> Response:
        """A repository in the path is unsupported: 501, as on Triton."""
        raise InferenceError(Code.UNSUPPORTED, "'repository_name' specification is not supported")

    async def _read(self, request: Request, meaning: Callable[[Buffer], T]) -> T:
        """The decoded body; a large one, such as files, is decoded in a thread."""
        body = await read_body(request, self._max_input_size)
        return await decoded(self._dataplane.threads, request.scope, meaning, body)


def _ready_of(body: Buffer) -> Any:
    return None if NESTED_READY.match(body) else parse_optional_object(body).get("ready", False)


def _labels_of(body: Buffer) -> dict[str, int | None]:
    members = parse_optional_object(body)
    found = members.get(LABELS)
    if not isinstance(found, dict) or len(members) > 1:
        raise InferenceError(
            Code.INVALID_ARG,
            f"expected an object with the only member '{LABELS}', an object with a version number "
            "or null for each label",
        )
    for label, number in found.items():
        if number is not None and (not isinstance(number, int) or isinstance(number, bool)):
            raise InferenceError(
                Code.INVALID_ARG,
                f"'{LABELS}': found {orjson.dumps(number).decode()[:SHOWN_CHARS]} for label "
                f"{label[:SHOWN_CHARS]!r}, expected a version number or null",
            )
    return found


def _override_of(body: Buffer) -> Override | None:
    return _override(_parameters(parse_optional_object(body, parse_generate)))


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


def _mismatch(parameter: str, kind: str) -> InferenceError:
    text = f"Unable to parse '{parameter}': attempt to access JSON non-{kind} as {kind}"
    return InferenceError(Code.INTERNAL, text)


def _about(parameters: Collection[str], versions: Collection[int]) -> dict[str, Any]:
    """The parameters of a load or an unload, for the audit log."""
    if versions:
        listed = ",".join(map(str, sorted(versions)))
        return {"parameters": [*parameters, VERSIONS], VERSIONS: listed}
    return {"parameters": list(parameters)} if parameters else {}


def _text(value: str | LongString) -> str:
    return value if isinstance(value, str) else value.text()


def _override(parameters: dict[str, Any]) -> Override | None:
    config, files, versions = None, {}, frozenset[int]()
    for key, value in parameters.items():
        if not isinstance(value, str | LongString):
            raise InferenceError(
                Code.INTERNAL,
                f"load parameter '{key}': attempt to access JSON non-string as string",
            )
        if key == CONFIG:
            config = _text(value)
        elif key == VERSIONS:
            versions = read_versions(_text(value))
        elif key.startswith(FILE_PREFIX):
            files[key] = _decoded(key, value)
        else:
            raise InferenceError(
                Code.INTERNAL,
                f"unexpected error on creating Triton parameter: load parameter '{key}' is "
                f"unknown, expected '{CONFIG}', '{VERSIONS}' or '{FILE_PREFIX}<path>'",
            )
    return Override(config, files, versions) if parameters else None


def _decoded(key: str, value: str | LongString) -> bytes:
    """A file from base64, decoded in parts, since each call holds the interpreter lock."""
    pieces = [value.encode()] if isinstance(value, str) else value.pieces
    parts: list[bytes] = []
    rest = b""
    try:
        for piece in pieces:
            text = rest + piece
            end = len(text) - len(text) % BASE64_UNIT
            if parts and len(parts[-1]) % 3:
                raise ValueError
            parts.append(base64.b64decode(text[:end], validate=True))
            rest = text[end:]
        parts.append(base64.b64decode(rest, validate=True))
        return b"".join(parts)
    except (binascii.Error, ValueError):
        raise InferenceError(
            Code.INVALID_ARG, f"load parameter '{key}' is no base64 text"
        ) from None
