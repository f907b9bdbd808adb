"""The gRPC server: build it, listen, drain."""

import asyncio
import math
import socket
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from gateway.dataplane import DataPlane
from gateway.frontends.grpc.methods import Methods
from gateway.frontends.grpc.response import MAX_MESSAGE_BYTES
from gateway.frontends.grpc.servicer import Servicer
from gateway.frontends.grpc.wire import parse_request
from gateway.protos import grpc_service_pb2 as pb
from gateway.protos.grpc_service_pb2_grpc import add_GRPCInferenceServiceServicer_to_server
from gateway.settings import GrpcSettings

SERVICE = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
PARSERS = {"ModelInfer": parse_request, "ModelStreamInfer": parse_request}
OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),
]


class GrpcServer:
    """One bound port with the v2 service, grpc.health.v1 and reflection behind it.

    Built inside the running event loop; raises OSError when the port cannot be had.
    """

    def __init__(self, dataplane: DataPlane, settings: GrpcSettings, server_id: str) -> None:
        self._dataplane = dataplane
        self._server = grpc.aio.server(options=OPTIONS)
        self._servicer = Servicer(dataplane, settings, server_id)
        self._health = health.aio.HealthServicer()
        self._stopped = asyncio.Event()
        self._add_services()
        self.address = settings.address
        self.port = self._bind(settings)

    def _add_services(self) -> None:
        methods: Any = Methods(self._server, PARSERS)
        add_servicer: Any = add_GRPCInferenceServiceServicer_to_server
        add_servicer(self._servicer, methods)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, methods)
        reflection.enable_server_reflection((SERVICE, HEALTH, reflection.SERVICE_NAME), methods)

    def _bind(self, settings: GrpcSettings) -> int:
        _require_free(settings.address, settings.port)
        host = f"[{settings.address}]" if ":" in settings.address else settings.address
        try:
            return self._server.add_insecure_port(f"{host}:{settings.port}")
        except RuntimeError:
            raise OSError(f"port {settings.port} of {settings.address} cannot be had") from None

    async def start(self) -> None:
        """Begin to accept."""
        await self._server.start()

    async def follow_health(self) -> None:
        """Keep grpc.health.v1 in step with the server's readiness, until cancelled."""
        statuses = health_pb2.HealthCheckResponse
        while True:
            ready = self._dataplane.ready
            status = statuses.SERVING if ready else statuses.NOT_SERVING
            for service in ("", SERVICE):
                await self._health.set(service, status)
            await self._dataplane.changed()

    async def stop(self) -> None:
        """Take no more requests; returns once those under way have ended."""
        self._servicer.stop_reading()
        await self._health.enter_graceful_shutdown()
        # Grace periods are not gRPC's: of two that end together, as one stop destroys the server,
        # the other one's reaches for what is no more, and the process dies of it.
        await self._server.stop(math.inf)
        self._stopped.set()

    async def cut_off(self, grace_secs: float) -> None:
        """Drop what is still under way when the grace period is over; comes after `stop`."""
        try:
            async with asyncio.timeout(grace_secs):
                await self._stopped.wait()
        except TimeoutError:
            await self._server.stop(None)


def _require_free(address: str, port: int) -> None:
    """Raise OSError that says why a port cannot be had; gRPC only logs that, in its own form."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        socket.create_server((address, port), family=family).close()
    except OSError as error:
        raise OSError(f"port {port} of {address} cannot be had: {error.strerror}") from None
