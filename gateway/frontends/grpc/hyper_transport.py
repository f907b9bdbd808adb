"""Transport `hyper`: gRPC on hyper's HTTP/2 (httpunk), its port and its shutdown."""

import asyncio
import socket
from collections.abc import Mapping
from typing import Any

from gateway.frontends.grpc.hyper_connection import GREETING_SECS, HyperConnection, HyperPort
from gateway.frontends.grpc.methods import Method
from gateway.frontends.grpc.rpc import Transport
from gateway.frontends.grpc.sockets import SocketFile, bound, read_certificates, unix_path
from gateway.settings import GrpcSettings

BACKLOG = 4096
"""Connections waiting to be accepted; the clients of further ones retry after a second."""


class HyperTransport(Transport):
    """Server of gRPC connections at one address; raises OSError if binding fails.

    An already `listening` socket may be given; the path of a given Unix socket is not removed.
    """

    def __init__(
        self,
        methods: Mapping[str, Method],
        settings: GrpcSettings,
        listening: socket.socket | None = None,
    ) -> None:
        self._shared = HyperPort(methods, settings)
        self._tls = read_certificates(settings.tls).context if settings.tls else None
        self._socket = listening or bound(settings)
        path = unix_path(settings.address)
        self._is_unix = bool(path)
        self._path = SocketFile(path) if path and listening is None else None
        self._server: asyncio.Server | None = None
        self._stopped = asyncio.Event()
        self.port: int = 0 if path else self._socket.getsockname()[1]

    async def start(self) -> None:
        loop: Any = asyncio.get_running_loop()
        create = loop.create_unix_server if self._is_unix else loop.create_server
        self._server = await create(
            self._connect,
            sock=self._socket,
            ssl=self._tls,
            backlog=BACKLOG,
            ssl_handshake_timeout=GREETING_SECS if self._tls else None,
        )

    async def stop(self) -> None:
        self._shared.is_closing = True
        self._socket.close() if self._server is None else self._server.close()
        if self._path is not None:
            self._path.remove()
        try:
            while remaining := tuple(self._shared.connections):
                ends = [each.graceful_shutdown() for each in remaining]
                await asyncio.gather(*ends, return_exceptions=True)
                await asyncio.gather(*(each.wait_closed() for each in remaining))
                self._shared.connections.difference_update(remaining)
        finally:
            self._stopped.set()

    async def cut_off(self, grace_secs: float) -> None:
        try:
            async with asyncio.timeout(grace_secs):
                await self._stopped.wait()
        except TimeoutError:
            for each in tuple(self._shared.connections):
                each.cut_off()
            await self._stopped.wait()
        finally:
            self._shared.threads.close()

    def _connect(self) -> "HyperConnection":
        return HyperConnection(self._shared)
