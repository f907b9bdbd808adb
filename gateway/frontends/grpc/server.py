"""gRPC server: the v2 service, rollouts, health, reflection and shutdown behind one transport."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping
from importlib import import_module
from typing import Any, Final

from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from gateway.dataplane import DataPlane
from gateway.frontends.grpc.access import logged
from gateway.frontends.grpc.guard import GrpcAccess
from gateway.frontends.grpc.hyper_transport import HyperTransport
from gateway.frontends.grpc.rollouts import RolloutServicer
from gateway.frontends.grpc.rpc import Beginning, Method, Parse, ParseLarge, RpcCall, Transport
from gateway.frontends.grpc.servicer import Servicer
from gateway.frontends.grpc.status import RpcError, StatusCode
from gateway.policy.credentials import Credentials
from gateway.protos import grpc_service_pb2 as pb
from gateway.protos import rollout_pb2
from gateway.resumption.recordings import Recordings
from gateway.settings import GrpcSettings, GrpcTransport
from gateway.threads import apart
from gateway.tls.certificates import Certificates

DESCRIPTOR = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]
ROLLOUTS = rollout_pb2.DESCRIPTOR.services_by_name["RolloutService"]
COMPRESSING = ("ModelInfer", "ModelStreamInfer")
"""Methods with compressed responses, as in Triton (protocol: gRPC transport)."""
TransportFactory = Callable[[Mapping[str, Method], GrpcSettings], Transport]
"""Creates a transport for methods; raises OSError if the address cannot be bound."""

HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"]


def _grpcio_transport(methods: Mapping[str, Method], settings: GrpcSettings) -> Transport:
    # Other servers do without the import of grpcio, which takes 50 ms.
    library = import_module("gateway.frontends.grpc.grpcio_transport")
    transport: Transport = library.GrpcioTransport(methods, settings)
    return transport


TRANSPORTS: Mapping[GrpcTransport, TransportFactory] = {
    GrpcTransport.HYPER: HyperTransport,
    GrpcTransport.GRPCIO: _grpcio_transport,
}


def local_transport(methods: Mapping[str, Method], settings: GrpcSettings) -> Transport:
    """The configured transport, in this process."""
    return TRANSPORTS[settings.transport](methods, settings)


class GrpcServer:
    """The v2 service, rollouts, health and, by its setting, reflection at one bound address.

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
        credentials: Credentials | None = None,
    ) -> None:
        self._dataplane = dataplane
        self._servicer = Servicer(dataplane, settings, server_id, recordings)
        self._rollouts = RolloutServicer(dataplane)
        self._health = HealthServicer((DESCRIPTOR.full_name,))
        access = GrpcAccess(
            *(settings.restrictions, settings.control, credentials, dataplane.audit),
            changes=settings.changes,
        )
        found = access.guarded(self._methods(settings))
        if dataplane.access_log is not None:
            found = logged(found, dataplane.access_log)
        self._transport = create_transport(found, settings)
        self.address = settings.address
        self.port = self._transport.port

    @property
    def certificates(self) -> Certificates | None:
        """Those of TLS, to be followed while the server runs."""
        return self._transport.certificates

    def _methods(self, settings: GrpcSettings) -> Mapping[str, Method]:
        names = (DESCRIPTOR.full_name, HEALTH.full_name, ROLLOUTS.full_name)
        return {
            **dict(
                methods(
                    DESCRIPTOR,
                    self._servicer,
                    self._servicer.parsers,
                    COMPRESSING,
                    {"ModelInfer": self._servicer.unary},
                    self._servicer.parser_of_large,
                )
            ),
            **dict(methods(ROLLOUTS, self._rollouts)),
            **dict(methods(HEALTH, self._health)),
            **dict(ReflectionServicer(names).methods() if settings.reflection else ()),
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
    """Server reflection with the answers of grpcio's servicer, which the first RPC imports."""

    def __init__(self, services: Iterable[str]) -> None:
        self._services = (*services, *REFLECTION_NAMES)
        self._answers: Any = None

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
        if self._answers is None:
            self._answers = await apart(self._load_answers)
        async for answer in self._answers.ServerReflectionInfo(requests, None):
            await call.send([answer.SerializeToString()])

    def _load_answers(self) -> Any:
        # The import of grpcio takes 50 ms, and few clients ask for reflection.
        library = import_module("grpc_reflection.v1alpha.reflection")
        return library.aio.ReflectionServicer(self._services)


def methods(
    service: Any,
    servicer: object,
    in_bytes: Mapping[str, Parse] | None = None,
    compressing: Collection[str] = (),
    beginnings: Mapping[str, Beginning] | None = None,
    large: Callable[[str, Parse], ParseLarge] | None = None,
) -> Iterator[tuple[str, Method]]:
    """The paths of a service, by its descriptor, with the methods of the servicer.

    The methods named in `in_bytes` use the parsers given there and return bytes. `compressing`
    names the methods with that property; `beginnings` has those that need no task for some
    messages. `large(name, parser)` gives the parser of large messages of a method.
    """
    parsers, begun = in_bytes or {}, beginnings or {}
    for described in service.methods:
        name, answer = described.name, GetMessageClass(described.output_type)
        parse = parsers.get(name) or GetMessageClass(described.input_type).FromString
        yield (
            f"/{service.full_name}/{name}",
            Method(
                serve=getattr(servicer, name),
                parse=parse,
                serialize=bytes if name in parsers else answer.SerializeToString,
                client_streams=described.client_streaming,
                server_streams=described.server_streaming,
                compresses=name in compressing,
                beginning=begun.get(name),
                parse_large=None if large is None else large(name, parse),
            ),
        )
