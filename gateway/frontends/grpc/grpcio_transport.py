"""Transport `grpcio`: gRPC on the server of the grpcio library."""

import asyncio
import logging
import math
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import grpc

from gateway.frontends.grpc.response import MAX_MESSAGE_BYTES
from gateway.frontends.grpc.rpc import ClientDisconnected, Method, RpcCall, Transport
from gateway.frontends.grpc.sockets import require_free
from gateway.frontends.grpc.status import Metadata, RpcError
from gateway.policy.certificates import identity
from gateway.settings import CompressionLevel, GrpcKeepaliveSettings, GrpcSettings, netloc
from gateway.tls.certificates import Certificates, PemFiles
from gateway.unix_socket import created_with, unix_path

Context = grpc.aio.ServicerContext[bytes, bytes]

STATUS = {code.value[0]: code for code in grpc.StatusCode}
MAX_METADATA_BYTES = 64 << 10
"""As for the other transport. Of RPCs with more gRPC's core refuses a few of a thousand, by chance.

Its own limit, 8 KiB, is that of many tokens of authorization.
"""
RUNNERS = logging.getLogger("grpc._cython.cygrpc")
"""The logger of grpc.aio for the tasks of methods."""

CERTIFICATE = "x509_pem_cert"
NAMES = ("peer_uri", "peer_dns", "x509_common_name")
"""The names of a client's certificate in gRPC's authentication context, by the kind of name."""

LEVELS = {level: number for number, level in enumerate(CompressionLevel)}
"""gRPC's numbers of the compression levels (compression_types.h)."""


def _is_logged(record: logging.LogRecord) -> bool:
    """Whether a record is more than a status for an ended RPC.

    gRPC's core ends an RPC after an unreadable message, and a client may disconnect.
    """
    return not (record.exc_info and isinstance(record.exc_info[1], grpc.aio.InternalError))


RUNNERS.addFilter(_is_logged)


class GrpcioTransport(Transport):
    """Server of grpc.aio at one address; raises OSError if binding fails."""

    def __init__(self, methods: Mapping[str, Method], settings: GrpcSettings) -> None:
        self._server = grpc.aio.server(options=_options(settings))
        compressed = settings.compression is not CompressionLevel.NONE
        for service, handlers in _handlers(methods, compressed).items():
            self._server.add_registered_method_handlers(service, handlers)
        self._stopped = asyncio.Event()
        self.certificates = Certificates(settings.tls) if settings.tls else None
        self.port = self._bind(settings)

    def _bind(self, settings: GrpcSettings) -> int:
        require_free(settings)
        address = netloc(settings.address, settings.port)
        try:
            with created_with(settings.socket_mode):
                port = self._add_port(address)
        except RuntimeError:
            raise OSError(f"cannot listen on {address}: see the log of gRPC") from None
        return 0 if unix_path(settings.address) else port

    def _add_port(self, address: str) -> int:
        if self.certificates is None:
            return self._server.add_insecure_port(address)
        return self._server.add_secure_port(address, _credentials(self.certificates))

    async def start(self) -> None:
        await self._server.start()

    async def stop(self) -> None:
        # Grace periods are ours: when two of gRPC's end together, one stop destroys the server, the
        # other one uses it, and the process crashes.
        await self._server.stop(math.inf)
        self._stopped.set()

    async def cut_off(self, grace_secs: float) -> None:
        try:
            async with asyncio.timeout(grace_secs):
                await self._stopped.wait()
        except TimeoutError:
            await self._server.stop(None)


class GrpcioCall(RpcCall):
    """RPC of grpc.aio; an `uncompressed` one disables the compression of the server."""

    def __init__(self, context: Context, *, uncompressed: bool) -> None:
        super().__init__()
        self._context = context
        self._uncompressed = uncompressed

    @property
    def metadata(self) -> Metadata:
        return tuple(self._context.invocation_metadata() or ())

    @property
    def peer(self) -> str:
        return self._context.peer()

    @property
    def certificate(self) -> str | None:
        found = self._context.auth_context()
        if CERTIFICATE not in found:
            return None
        kinds = ([each.decode(errors="replace") for each in found.get(kind, ())] for kind in NAMES)
        return identity(*kinds)

    def time_remaining(self) -> float | None:
        remaining: float | None = self._context.time_remaining()
        return remaining

    async def send(self, messages: Sequence[bytes]) -> None:
        with _checking_connection():
            for message in messages:
                self.before_message()
                await self._context.write(message)

    def before_message(self) -> None:
        """Apply `uncompressed` to the next message; called before each."""
        if self._uncompressed:
            self._context.disable_next_message_compression()

    async def send_initial_metadata(self, metadata: Metadata) -> None:
        with _checking_connection():
            await self._context.send_initial_metadata(metadata)

    def set_trailing_metadata(self, metadata: Metadata) -> None:
        self._context.set_trailing_metadata(metadata)

    def on_end(self, ended: Callable[[], None]) -> None:
        def done(_: Context) -> None:
            ended()

        self._context.add_done_callback(done)  # type: ignore[arg-type] # the stubs' callback is a class

    async def fail(self, error: RpcError) -> NoReturn:
        """End the RPC; a client that does not read receives the status when it reads again."""
        await error.due()
        try:
            trailers = (*self._context.trailing_metadata(), *error.trailers)
            await self._context.abort(STATUS[error.status], error.details, trailers)
        except grpc.aio.InternalError:
            # The client has disconnected.
            raise asyncio.CancelledError from None


@contextmanager
def _checking_connection() -> Iterator[None]:
    """Raise ClientDisconnected when sending fails before the RPC is cancelled."""
    try:
        yield
    except grpc.aio.InternalError as error:
        raise ClientDisconnected from error


def _options(settings: GrpcSettings) -> list[tuple[str, Any]]:
    return [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.so_reuseport", int(settings.reuse_port)),
        ("grpc.default_compression_level", LEVELS[settings.compression]),
        *_keepalive_options(settings.keepalive),
    ]


def _keepalive_options(keepalive: GrpcKeepaliveSettings) -> Iterator[tuple[str, int]]:
    yield "grpc.keepalive_time_ms", keepalive.time_ms
    yield "grpc.keepalive_timeout_ms", keepalive.timeout_ms
    if keepalive.timeout_ms != GrpcKeepaliveSettings().timeout_ms:
        # gRPC waits a minute for the answer to a ping, unless this option is set too.
        yield "grpc.http2.ping_timeout_ms", keepalive.timeout_ms
    yield "grpc.keepalive_permit_without_calls", int(keepalive.permit_without_calls)
    yield "grpc.http2.max_pings_without_data", keepalive.max_pings_without_data
    yield "grpc.http2.min_ping_interval_without_data_ms", keepalive.min_recv_ping_interval_ms
    yield "grpc.http2.max_ping_strikes", keepalive.max_ping_strikes
    if keepalive.max_connection_age_ms:
        yield "grpc.max_connection_age_ms", keepalive.max_connection_age_ms
    if keepalive.max_connection_age_grace_ms:
        yield "grpc.max_connection_age_grace_ms", keepalive.max_connection_age_grace_ms


def _credentials(certificates: Certificates) -> grpc.ServerCredentials:
    return grpc.dynamic_ssl_server_credentials(
        _configuration(certificates.files),
        ChangedCertificates(certificates),  # type: ignore[arg-type] # the stubs lack None
        require_client_authentication=certificates.settings.mutual,
    )


def _configuration(files: PemFiles) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(files.key, files.cert)], files.root or None)


class ChangedCertificates:
    """The answer to gRPC's core, which asks at each handshake, in a thread of its own."""

    def __init__(self, certificates: Certificates) -> None:
        self._certificates = certificates
        self._given = certificates.files

    def __call__(self) -> grpc.ServerCertificateConfiguration | None:
        """The certificates, if they have changed since the last call."""
        found = self._certificates.files
        if found is self._given:
            return None
        self._given = found
        return _configuration(found)


def _handlers(methods: Mapping[str, Method], compressed: bool) -> Mapping[str, Mapping[str, Any]]:
    found: dict[str, dict[str, Any]] = defaultdict(dict)
    for path, method in methods.items():
        _, service, name = path.split("/")
        handler = _unary if method.unary else _streaming
        found[service][name] = handler(method, compressed and not method.compresses)
    return found


def _unary(method: Method, uncompressed: bool) -> Any:
    async def answer(message: bytes, context: Context) -> bytes:
        call = GrpcioCall(context, uncompressed=uncompressed)
        call.before_message()
        try:
            return await method.answer(message, call)
        except RpcError as error:
            await call.fail(error)
        except ClientDisconnected:
            raise asyncio.CancelledError from None

    return grpc.unary_unary_rpc_method_handler(answer)


def _streaming(method: Method, uncompressed: bool) -> Any:
    async def run(messages: AsyncIterator[bytes], context: Context) -> None:
        call = GrpcioCall(context, uncompressed=uncompressed)
        try:
            await method.run(messages, call)
        except RpcError as error:
            await call.fail(error)
        except ClientDisconnected:
            raise asyncio.CancelledError from None

    return grpc.stream_stream_rpc_method_handler(run)
