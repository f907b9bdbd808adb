"""Listening for HTTP: uvicorn, bounded where it is not, started and drained by the server."""

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024
BACKLOG = 2048
KEEP_ALIVE_SECS = 600
_ERROR = b'{"error":"request line and headers exceed %d bytes"}' % MAX_HEAD_BYTES
TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\n"
    b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
) % (len(_ERROR), _ERROR)


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 protocol with a bound on a request's line and headers together.

    The parser collects them without a limit of its own, so what arrives before their end is
    counted here, read by read.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._in_head = True
        self._head_bytes = 0

    def on_message_begin(self) -> None:
        self._in_head = True
        self._head_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self.transport.write(TOO_LARGE)
                self.transport.close()


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the gateway's server decides when it ends."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpListener:
    """One bound port with an application behind it."""

    def __init__(self, app: ASGIApp, address: str, port: int) -> None:
        self._socket = _bind(address, port)
        self.address: str = address
        self.port: int = self._socket.getsockname()[1]
        self._server = _Server(_config(app))

    async def serve(self) -> None:
        """Serve until `stop` was called and every connection has ended."""
        await self._server.serve(sockets=[self._socket])

    def stop(self, grace_secs: float) -> None:
        """Stop accepting; what is under way may end within the grace period."""
        self._server.config.timeout_graceful_shutdown = max(1, round(grace_secs))
        self._server.should_exit = True


def _config(app: ASGIApp) -> uvicorn.Config:
    options: dict[str, Any] = {
        "loop": "none",
        "http": BoundedProtocol,
        "ws": "none",
        "lifespan": "off",
        "log_config": None,
        "access_log": False,
        "server_header": False,
        "date_header": False,
        "backlog": BACKLOG,
        "timeout_keep_alive": KEEP_ALIVE_SECS,
    }
    return uvicorn.Config(app, **options)


def _bind(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind((address, port))
    return bound
