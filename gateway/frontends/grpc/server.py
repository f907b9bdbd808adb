"""gRPC server: services, health and shutdown behind one transport."""

from collections.abc import Callable, Mapping

from gateway.dataplane import DataPlane
from gateway.frontends.grpc.grpcio_transport import GrpcioTransport
from gateway.frontends.grpc.hyper_transport import HyperTransport
from gateway.frontends.grpc.methods import Method, methods
from gateway.frontends.grpc.rpc import Transport
from gateway.frontends.grpc.servicer import Servicer
from gateway.frontends.grpc.standard_services import HEALTH, HealthServicer, ReflectionServicer
from gateway.protos import grpc_service_pb2 as pb
from gateway.resumption.recordings import Recordings
from gateway.settings import GrpcSettings, GrpcTransport

DESCRIPTOR = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]
COMPRESSING = ("ModelInfer", "ModelStreamInfer")
"""Methods with compressed responses, as in Triton (protocol: gRPC transport)."""
EAGER = ("ModelInfer",)
"""Methods that start without a task; their code never asks for the current task."""
TRANSPORTS = {GrpcTransport.HYPER: HyperTransport, GrpcTransport.GRPCIO: GrpcioTransport}


TransportFactory = Callable[[Mapping[str, Method], GrpcSettings], Transport]
"""Creates a transport for methods; raises OSError if the address cannot be bound."""


def local_transport(methods: Mapping[str, Method], settings: GrpcSettings) -> Transport:
    """The configured transport, in this process."""
    transport: Transport = TRANSPORTS[settings.transport](methods, settings)
    return transport


class GrpcServer:
    """The v2 service, grpc.health.v1 and reflection at one bound address.

    Needs a running event loop. Raises OSError if the address cannot be bound or the TLS files
    cannot be used. The port is 0 for a Unix socket.
    """

    def __init__(
        self,
        dataplane: DataPlane,
        settings: GrpcSettings,
        server_id: str,
        recordings: Recordings | None = None,
        create_transport: TransportFactory = local_transport,
    ) -> None:
        self._dataplane = dataplane
        self._servicer = Servicer(dataplane, settings, server_id, recordings)
        self._health = HealthServicer((DESCRIPTOR.full_name,))
        self._transport = create_transport(self._methods(), settings)
        self.address = settings.address
        self.port = self._transport.port

    def _methods(self) -> Mapping[str, Method]:
        names = (DESCRIPTOR.full_name, HEALTH.full_name)
        return {
            **dict(
                methods(
                    DESCRIPTOR,
                    self._servicer,
                    self._servicer.parsers,
                    COMPRESSING,
                    EAGER,
                    self._servicer.parser_of_large,
                )
            ),
            **dict(methods(HEALTH, self._health)),
            **dict(ReflectionServicer(names).methods()),
        }

    async def start(self) -> None:
        """Start accepting connections."""
        await self._transport.start()

    async def follow_health(self) -> None:
        """Publish each change of readiness through grpc.health.v1, until cancelled."""
        while True:
            self._health.set(ready=self._dataplane.ready)
            await self._dataplane.changed()

    async def stop(self) -> None:
        """Refuse new requests; return when the running ones have ended."""
        self._servicer.stop_reading()
        self._health.close()
        await self._transport.stop()

    async def cut_off(self, grace_secs: float) -> None:
        """Drop the connections that remain after the grace period; call after `stop`."""
        await self._transport.cut_off(grace_secs)
