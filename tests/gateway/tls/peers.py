"""A port with TLS, the protocols of its connections, and clients."""

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

from gateway.client_limits import ConnectionLimits
from gateway.settings import TlsSettings
from gateway.tls.certificates import Certificates
from gateway.tls.connection import TlsPort
from tests.builders import settle, soon
from tests.certificates import Certificate

LARGE = bytes(range(256)) * (16 << 10)
"""4 MiB: more than the buffers of a socket hold."""
REFUSED = b"no TLS"
HELLO = b"\x16\x03\x01\x02\x00\x01"
"""The begin of a handshake."""


class Peer(asyncio.Protocol):
    """A protocol that notes its events. It closes at the end of the input, if it is not `open`."""

    def __init__(self) -> None:
        self.transport: Any = None
        self.received = b""
        self.events: list[str] = []
        self.stays_open = False
        self.lost = asyncio.Event()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.events.append("made")

    def data_received(self, data: bytes) -> None:
        self.received += data
        if data == b"echo":
            self.transport.write(data)

    def eof_received(self) -> bool:
        self.events.append("eof")
        return self.stays_open

    def pause_writing(self) -> None:
        self.events.append("pause")

    def resume_writing(self) -> None:
        self.events.append("resume")

    def connection_lost(self, exc: Exception | None) -> None:
        self.events.append("lost")
        self.lost.set()


class Port:
    """A port with TLS, and the protocols of its connections."""

    def __init__(self, server: Certificate, root: str) -> None:
        settings = TlsSettings(
            wire="http", cert=str(server.cert), key=str(server.key), root=root, mutual=bool(root)
        )
        self.tls = TlsPort(Certificates(settings), ConnectionLimits(0), REFUSED)
        self.peers: list[Peer] = []
        self.port = 0

    def create(self) -> Peer:
        self.peers.append(Peer())
        return self.peers[-1]

    @property
    def peer(self) -> Peer:
        """The protocol of the only connection."""
        (found,) = self.peers
        return found


@asynccontextmanager
async def serving(port: Port) -> AsyncIterator[Port]:
    """Listen on a port; at the end no handshake and no connection is left."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: port.tls.accept(port.create), "127.0.0.1", 0)
    port.port = server.sockets[0].getsockname()[1]
    try:
        yield port
    finally:
        server.close()
        port.tls.stop()
        for each in port.peers:
            if each.transport is not None and not each.lost.is_set():
                each.transport.abort()
                await soon(each.lost.wait())
        await settle()
    assert not port.tls.handshakes


@asynccontextmanager
async def client(
    port: Port, context: ssl.SSLContext, buffer: int = 0
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A client over TLS, with a receive buffer of that size."""
    wire = socket.socket()
    if buffer:
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    wire.setblocking(False)
    await asyncio.get_running_loop().sock_connect(wire, ("127.0.0.1", port.port))
    opening = asyncio.open_connection(
        sock=wire, ssl=context, server_hostname="localhost", limit=buffer or 1 << 16
    )
    reader, writer = await soon(opening)
    try:
        yield reader, writer
    finally:
        await aborted(writer)


@contextmanager
def wire(port: Port) -> Iterator[socket.socket]:
    """A client of bytes."""
    with socket.create_connection(("127.0.0.1", port.port)) as found:
        found.setblocking(False)
        yield found


async def rest_of(client: socket.socket) -> bytes:
    """The bytes of the server before it ends the connection."""
    found = b""
    with suppress(ConnectionResetError):
        while data := await soon(asyncio.get_running_loop().sock_recv(client, 1 << 16)):
            found += data
    return found


async def aborted(writer: asyncio.StreamWriter) -> None:
    """Drop a client."""
    writer.transport.abort()
    with suppress(OSError):
        await soon(writer.wait_closed())


async def until(holds: Callable[[], object]) -> None:
    async def wait() -> None:
        while not holds():  # noqa: ASYNC110 - the client and the server share the loop
            await asyncio.sleep(0.001)

    await soon(wait())


class SlowSocket:
    """A socket without a network: its client reads when the test does.

    Writing is paused while more than `limit` bytes are unread.
    """

    def __init__(self, limit: int) -> None:
        self.unread = b""
        self._limit = limit
        self._is_paused = False
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._session: Any = None
        self._connection: Any = None

    def attach(self, connection: asyncio.Protocol, context: ssl.SSLContext) -> None:
        """Connect, and shake hands."""
        self._connection = connection
        self._session = context.wrap_bio(
            self._incoming, self._outgoing, server_hostname="localhost"
        )
        connection.connection_made(self)  # type: ignore[arg-type] # a part of a transport
        for _ in range(2):
            with suppress(ssl.SSLWantReadError):
                self._session.do_handshake()
            connection.data_received(self._outgoing.read())
            self._take()

    def read(self) -> bytes:
        """Read all that was sent; then more is."""
        found = b""
        with suppress(ssl.SSLWantReadError):
            while data := self._session.read(1 << 16):
                found += data
        self._take()
        return found

    def _take(self) -> None:
        self._incoming.write(self.unread)
        self.unread = b""
        if self._is_paused:
            self._is_paused = False
            self._connection.resume_writing()

    def write(self, data: bytes) -> None:
        self.unread += data
        if len(self.unread) > self._limit and not self._is_paused:
            self._is_paused = True
            self._connection.pause_writing()

    def get_extra_info(self, name: str, default: object = None) -> object:
        return default

    def is_closing(self) -> bool:
        return False

    def abort(self) -> None:
        """The test ends."""
