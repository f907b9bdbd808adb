"""The HTTP listener: uvicorn, started and drained by the server."""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from http import HTTPStatus
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.client_limits import ConnectionLimits
from gateway.frontends.http.connection import BoundedProtocol
from gateway.frontends.http.connection_parts import refusal
from gateway.frontends.http.request_scope import CERTIFICATE, HEADER_NAMES, TracedApp
from gateway.policy.certificates import identity_of
from gateway.settings import MOST_PER_ADDRESS, UNIX, HttpTimeLimits
from gateway.tls.certificates import Certificates
from gateway.tls.connection import TlsPort
from gateway.unix_socket import SocketFile

BACKLOG = 2048
SEND_TIMEOUT_SECS = 30.0
DEFAULT_LIMITS = HttpTimeLimits()
HALF_REQUESTS_SECS = 0.5
"""Interval of looking for half requests while the last connections end."""
NO_TLS = "this port is served over TLS, expected https:// in the URL"


class _Server(uvicorn.Server):
    """uvicorn without signal handlers and ticks: the gateway's server decides when it stops."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ended = False
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Stop accepting; `serve` returns when every connection has closed."""
        self.should_exit = True
        self._stopping.set()

    async def main_loop(self) -> None:
        """Wait for `stop`; uvicorn's own checks it ten times a second, and sets the date header."""
        await self._stopping.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Note the end of `serve` instead, which this encloses."""
        try:
            yield
        finally:
            self.ended = True


class NamingProtocol(BoundedProtocol):
    """The same; its requests have the names of their headers as the client wrote them."""

    __slots__ = ("_header_names",)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._header_names: list[bytes] = []
        self.scope["state"][HEADER_NAMES] = self._header_names

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:
            self._header_names.append(name)
        super().on_header(name, value)


class CertifiedProtocol(BoundedProtocol):
    """The same over mutual TLS; its requests have the identity of the client's certificate."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._certificate = identity_of(transport.get_extra_info("ssl_object"))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"][CERTIFICATE] = self._certificate


class CertifiedNamingProtocol(NamingProtocol, CertifiedProtocol):
    """Both of them."""


PROTOCOLS = {
    (False, False): BoundedProtocol,
    (True, False): NamingProtocol,
    (False, True): CertifiedProtocol,
    (True, True): CertifiedNamingProtocol,
}
"""The connections of a listener, by `header_names` and mutual TLS."""


class HttpListener:
    """One application, served on one listening socket, over TLS if it has `certificates`.

    With `header_names` its requests have the names of their headers as the client wrote them. The
    port is 0 for a Unix socket, which is removed when the listener stops. An address has at most
    `per_address` connections, 0 for any number.
    """

    def __init__(  # noqa: PLR0913 - what its connections have
        self,
        app: ASGIApp,
        listening: socket.socket,
        send_timeout_secs: float = SEND_TIMEOUT_SECS,
        limits: HttpTimeLimits = DEFAULT_LIMITS,
        *,
        certificates: Certificates | None = None,
        header_names: bool = False,
        per_address: int = MOST_PER_ADDRESS,
    ) -> None:
        self._socket = listening
        self.port = 0
        self._path: SocketFile | None = None
        if listening.family == socket.AF_UNIX:
            self._path = SocketFile(listening.getsockname())
            app = _at_unix_socket(app)
        else:
            self.port = listening.getsockname()[1]
        connections = ConnectionLimits(per_address)
        self._tls: TlsPort | None = None
        if certificates is not None:
            text = refusal(HTTPStatus.BAD_REQUEST, NO_TLS)
            self._tls = TlsPort(certificates, connections, text)
            # Over TLS a connection counts from its beginning, before the handshake.
            connections = ConnectionLimits(0)
        protocol: Callable[..., asyncio.Protocol] = partial(
            PROTOCOLS[header_names, certificates is not None and certificates.settings.mutual],
            send_timeout_secs=send_timeout_secs,
            limits=limits,
            connections=connections,
            begin=app.begin if isinstance(app, TracedApp) else None,
        )
        if self._tls is not None:
            protocol = partial(_accepted, self._tls, protocol)
        self._server = _Server(_config(app, protocol))

    def serve(self) -> Coroutine[Any, Any, None]:
        """Serve until `stop` has been called and every connection has closed."""
        return self._server.serve(sockets=[self._socket])

    def stop(self, grace_secs: float) -> None:
        """Stop accepting; requests in flight have `grace_secs` seconds, then they are dropped."""
        asyncio.get_running_loop().call_later(grace_secs, self._drop_all)
        if self._path is not None:
            self._path.remove()
        if self._tls is not None:
            self._tls.stop()
        self._server.stop()

    def drop_half_requests(self) -> None:
        """Drop half requests and close connections without one, also later ones, to the end.

        Connections accepted in the turn of the event loop that stops are begun after the stop, and
        a process that was still starting accepts what waited at its socket: uvicorn closes neither.
        """
        for connection in self._connections():
            if connection.is_receiving:
                connection.transport.abort()
            elif self._server.should_exit:
                connection.shutdown()
        if not self._server.ended:
            asyncio.get_running_loop().call_later(HALF_REQUESTS_SECS, self.drop_half_requests)

    def _drop_all(self) -> None:
        for connection in self._connections():
            connection.transport.abort()

    def _connections(self) -> list[BoundedProtocol]:
        found = tuple(self._server.server_state.connections)
        return [each for each in found if isinstance(each, BoundedProtocol)]


def _at_unix_socket(app: ASGIApp) -> ASGIApp:
    """The application with the address of its clients, which uvicorn takes for unknown."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        scope["client"] = (UNIX, 0)
        await app(scope, receive, send)

    return answer


def _accepted(
    port: TlsPort, create: Callable[..., asyncio.Protocol], **options: Any
) -> asyncio.Protocol:
    """A connection over TLS, as uvicorn creates connections."""
    return port.accept(partial(create, **options))


def _config(app: ASGIApp, protocol: Callable[..., asyncio.Protocol]) -> uvicorn.Config:
    options: dict[str, Any] = {
        "loop": "none",
        "http": protocol,
        "interface": "asgi3",
        "ws": "none",
        "lifespan": "off",
        "log_config": None,
        "access_log": False,
        "proxy_headers": False,
        "server_header": False,
        "date_header": False,
        "backlog": BACKLOG,
    }
    return uvicorn.Config(app, **options)


def listening_at(address: str, port: int, *, reuse_port: bool = False) -> socket.socket:
    """A listening socket, on a free port if `port` is 0; OSError says why listening failed."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if reuse_port:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        found.bind((address, port))
        found.listen(BACKLOG)
    except OSError as error:
        found.close()
        host = f"[{address}]" if ":" in address else address
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    return found
