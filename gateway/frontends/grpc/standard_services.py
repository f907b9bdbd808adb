"""Standard services of gRPC: health (grpc.health.v1) and reflection (v1, v1alpha)."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any, Final

from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection import aio

from gateway.frontends.grpc.methods import Method
from gateway.frontends.grpc.rpc import RpcCall, RpcError, StatusCode

HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"]


class HealthServicer:
    """Health of the server as a whole ("") and of the services with these names.

    The servicer of grpcio requires grpcio's transport, and drops all watchers of a service when
    one disconnects.
    """

    def __init__(self, services: tuple[str, ...]) -> None:
        self._services: Final = ("", *services)
        self._status = health_pb2.HealthCheckResponse.SERVING
        self._changed = asyncio.Event()
        self._closed = False

    def set(self, *, ready: bool) -> None:
        """Set the status of all services; no effect after `close`."""
        if not self._closed:
            self._set(
                health_pb2.HealthCheckResponse.SERVING
                if ready
                else health_pb2.HealthCheckResponse.NOT_SERVING
            )

    def close(self) -> None:
        """Set NOT_SERVING and end all watches, because the server shuts down."""
        self._set(health_pb2.HealthCheckResponse.NOT_SERVING)
        self._closed = True

    async def Check(
        self, request: health_pb2.HealthCheckRequest, call: RpcCall
    ) -> health_pb2.HealthCheckResponse:
        if request.service not in self._services:
            raise RpcError(StatusCode.NOT_FOUND, f"no service '{request.service}' is served here")
        return health_pb2.HealthCheckResponse(status=self._status)

    async def Watch(self, request: health_pb2.HealthCheckRequest, call: RpcCall) -> None:
        """Send the status now and after each change; UNAVAILABLE at shutdown."""
        sent = None
        while True:
            changed, ended = self._changed, self._closed
            found = self._status_of(request.service)
            if found != sent:
                sent = found
                await call.send([health_pb2.HealthCheckResponse(status=found).SerializeToString()])
            if ended:
                raise RpcError(StatusCode.UNAVAILABLE, "the server ends")
            await changed.wait()

    def _status_of(self, service: str) -> Any:
        known = service in self._services
        return self._status if known else health_pb2.HealthCheckResponse.SERVICE_UNKNOWN

    def _set(self, status: Any) -> None:
        self._status = status
        self._changed.set()
        self._changed = asyncio.Event()


REFLECTION = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]
REFLECTION_NAMES = (REFLECTION.full_name, "grpc.reflection.v1.ServerReflection")
"""Both versions have the same messages; clients try the newer one first."""


class ReflectionServicer:
    """Server reflection with the answers of grpcio's servicer."""

    def __init__(self, services: Iterable[str]) -> None:
        self._answers: Any = aio.ReflectionServicer((*services, *REFLECTION_NAMES))

    def methods(self) -> Iterator[tuple[str, Method]]:
        """The paths of both versions, with the method."""
        (described,) = REFLECTION.methods
        for name in REFLECTION_NAMES:
            yield (
                f"/{name}/{described.name}",
                Method(
                    self.ServerReflectionInfo,
                    reflection_pb2.ServerReflectionRequest.FromString,
                    reflection_pb2.ServerReflectionResponse.SerializeToString,
                    client_streams=True,
                    server_streams=True,
                ),
            )

    async def ServerReflectionInfo(
        self, requests: AsyncIterator[reflection_pb2.ServerReflectionRequest], call: RpcCall
    ) -> None:
        async for answer in self._answers.ServerReflectionInfo(requests, None):
            await call.send([answer.SerializeToString()])
