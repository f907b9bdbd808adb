"""The gRPC server: the services behind a transport, their health, and their end."""

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
"""As Triton: what management answers is not compressed (protocol: gRPC transport)."""
AT_ONCE = ("ModelInfer",)
"""What is asked often and answered soon; nothing on its way asks for the current task."""
TRANSPORTS = {GrpcTransport.HYPER: HyperTransport, GrpcTransport.GRPCIO: GrpcioTransport}


TransportFactory = Callable[[Mapping[str, Method], GrpcSettings], Transport]
"""Makes what carries methods; raises OSError when the address cannot be had."""


def local_transport(methods: Mapping[str, Method], settings: GrpcSettings) -> Transport:
    """The transport of that name, in this process."""
    transport: Transport = TRANSPORTS[settings.transport](methods, settings)
    return transport


class GrpcServer:
    """One bound address with the v2 service, grpc.health.v1 and reflection behind it.

    Built inside the running event loop; raises OSError when the address cannot be had, or its TLS
    cannot be served. The port is 0 for a Unix socket.
    """

    def __init__(
        self,
        dataplane: DataPlane,
        settings: GrpcSettings,
        server_id: str,
        recordings: Recordings | None = None,
        carry: TransportFactory = local_transport,
    ) -> None:
        self._dataplane = dataplane
        self._servicer = Servicer(dataplane, settings, server_id, recordings)
        self._health = HealthServicer((DESCRIPTOR.full_name,))
        self._transport = carry(self._methods(), settings)
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
                    AT_ONCE,
                    self._servicer.parser_of_large,
                )
            ),
            **dict(methods(HEALTH, self._health)),
            **dict(ReflectionServicer(names).methods()),
        }

    async def start(self) -> None:
        """Begin to accept."""
        await self._transport.start()

    async def follow_health(self) -> None:
        """Keep grpc.health.v1 in step with the server's readiness, until cancelled."""
        while True:
            self._health.set(ready=self._dataplane.ready)
            await self._dataplane.changed()

    async def stop(self) -> None:
        """Take no more requests; returns once those under way have ended."""
        self._servicer.stop_reading()
        self._health.close()
        await self._transport.stop()

    async def cut_off(self, grace_secs: float) -> None:
        """Drop what is still under way when the grace period is over; comes after `stop`."""
        await self._transport.cut_off(grace_secs)
