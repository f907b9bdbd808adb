"""Routes of the shared memory extensions: status, register, unregister."""

import base64
import binascii
from collections.abc import Mapping
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from gateway.dataplane import DataPlane
from gateway.errors import Code, InferenceError
from gateway.frontends.http.body import decoded, read_body
from gateway.frontends.http.documentation import DocumentedRoute
from gateway.frontends.http.errors import JSON
from gateway.frontends.http.json_object import parse_json_object
from gateway.frontends.http.request_scope import caller_in
from gateway.settings import HttpSettings
from gateway.shared_memory.regions import RegionKind, SharedMemory

PATHS = {RegionKind.SYSTEM: "/v2/systemsharedmemory", RegionKind.CUDA: "/v2/cudasharedmemory"}
NO_STRING = "attempt to access JSON non-string as string"
NO_UNSIGNED = "attempt to access JSON non-unsigned-integer as unsigned-integer"


class SharedMemoryRoutes:
    """`/v2/systemsharedmemory` and `/v2/cudasharedmemory` (protocol: shared memory)."""

    def __init__(self, dataplane: DataPlane, settings: HttpSettings) -> None:
        self._shared_memory = dataplane.shared_memory
        self._threads = dataplane.threads
        self._max_input_size = settings.max_input_size

    def routes(self) -> list[DocumentedRoute]:
        """The routes of both kinds of regions."""
        system, cuda = PATHS.values()
        return [
            DocumentedRoute("GET", f"{system}/status", self.system_status),
            DocumentedRoute("GET", f"{system}/region/{{region}}/status", self.system_status),
            DocumentedRoute("POST", f"{system}/register", self.register_system),
            DocumentedRoute("POST", f"{system}/region/{{region}}/register", self.register_system),
            DocumentedRoute("POST", f"{system}/unregister", self.unregister_system),
            DocumentedRoute(
                "POST", f"{system}/region/{{region}}/unregister", self.unregister_system
            ),
            DocumentedRoute("GET", f"{cuda}/status", self.cuda_status),
            DocumentedRoute("GET", f"{cuda}/region/{{region}}/status", self.cuda_status),
            DocumentedRoute("POST", f"{cuda}/register", self.register_cuda),
            DocumentedRoute("POST", f"{cuda}/region/{{region}}/register", self.register_cuda),
            DocumentedRoute("POST", f"{cuda}/unregister", self.unregister_cuda),
            DocumentedRoute("POST", f"{cuda}/region/{{region}}/unregister", self.unregister_cuda),
        ]

    async def system_status(self, request: Request) -> Response:
        """One system region, or all."""
        found = self._regions(request).system_status(_region(request))
        rows = [
            {"name": each.name, "key": each.key, "offset": each.offset, "byte_size": each.byte_size}
            for each in found
        ]
        return Response(orjson.dumps(rows), media_type=JSON)

    async def cuda_status(self, request: Request) -> Response:
        """One CUDA region, or all."""
        found = self._regions(request).cuda_status(_region(request))
        rows = [
            {"name": each.name, "device_id": each.device_id, "byte_size": each.byte_size}
            for each in found
        ]
        return Response(orjson.dumps(rows), media_type=JSON)

    async def register_system(self, request: Request) -> Response:
        """Register a POSIX shared memory object, or a part of it."""
        members = await self._members(request, RegionKind.SYSTEM)
        _require(members, "key", "byte_size")
        key = members["key"]
        if not isinstance(key, str):
            raise InferenceError(Code.INTERNAL, NO_STRING)
        offset, byte_size = _unsigned(members.get("offset", 0)), _unsigned(members["byte_size"])
        self._regions(request).register_system(_region(request), key, offset, byte_size)
        return Response(media_type=JSON)

    async def register_cuda(self, request: Request) -> Response:
        """Register the memory behind a cudaIpcMemHandle_t."""
        members = await self._members(request, RegionKind.CUDA)
        _require(members, "raw_handle", "byte_size")
        handle = _handle(members["raw_handle"])
        device_id, byte_size = _unsigned(_member(members, "device_id")), members["byte_size"]
        byte_size = _unsigned(byte_size)
        self._regions(request).register_cuda(_region(request), handle, device_id, byte_size)
        return Response(media_type=JSON)

    async def unregister_system(self, request: Request) -> Response:
        """Unregister one system region, or all."""
        self._regions(request).unregister(RegionKind.SYSTEM, _region(request))
        return Response(media_type=JSON)

    async def unregister_cuda(self, request: Request) -> Response:
        """Unregister one CUDA region, or all."""
        self._regions(request).unregister(RegionKind.CUDA, _region(request))
        return Response(media_type=JSON)

    def _regions(self, request: Request) -> SharedMemory:
        return self._shared_memory.of(caller_in(request.scope))

    async def _members(self, request: Request, kind: RegionKind) -> Mapping[str, Any]:
        self._regions(request).check_new(kind, _region(request))
        body = await read_body(request, self._max_input_size)
        return await decoded(self._threads, request.scope, parse_json_object, body)


def _region(request: Request) -> str:
    name: str = request.path_params.get("region", "")
    return name


def _require(members: Mapping[str, Any], *names: str) -> None:
    for name in names:
        if name not in members:
            raise InferenceError(
                Code.INVALID_ARG, f"Shared memory register request has no '{name}' field"
            )


def _member(members: Any, name: str) -> Any:
    if not isinstance(members, dict) or name not in members:
        raise InferenceError(
            Code.INTERNAL, f"attempt to access non-existing object member '{name}'"
        )
    return members[name]


def _unsigned(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**64:
        raise InferenceError(Code.INTERNAL, NO_UNSIGNED)
    return value


def _handle(found: Any) -> bytes:
    text = _member(found, "b64")
    if not isinstance(text, str):
        raise InferenceError(Code.INTERNAL, NO_STRING)
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InferenceError(
            Code.INVALID_ARG, "'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t"
        ) from None
