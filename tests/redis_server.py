"""A Redis server on loopback, and a relay before it that a test stops, cuts, and restarts."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

from fakeredis import TcpFakeServer

HOST = "127.0.0.1"


@contextmanager
def redis_server() -> Iterator[int]:
    """The port of a server that lives as long as the block."""
    server = TcpFakeServer((HOST, 0))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Relay:
    """Passes bytes on between clients and a server; `accepted` counts the clients."""

    def __init__(self, target: int) -> None:
        self.accepted = 0
        self.port = 0
        self.flowing = asyncio.Event()
        self.flowing.set()
        self._target = target
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._clients: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen, on the same port as before if there was one."""
        self._server = await asyncio.start_server(self._serve, HOST, self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def cut(self) -> None:
        """Close every connection, and take no more."""
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.close()
        self.flowing.set()
        if self._clients:
            await asyncio.wait(self._clients)
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        task = asyncio.current_task()
        assert task is not None
        self._clients.add(task)
        there, back = await asyncio.open_connection(HOST, self._target)
        self._writers |= {writer, back}
        with suppress(ConnectionError, ExceptionGroup):
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._pass(reader, back))
                tasks.create_task(self._pass(there, writer))
        self._writers -= {writer, back}
        self._clients.discard(task)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                await self.flowing.wait()
                writer.write(data)
                await writer.drain()
        finally:
            writer.close()


@asynccontextmanager
async def relay(target: int) -> AsyncIterator[Relay]:
    """A relay to a server on that port."""
    found = Relay(target)
    await found.start()
    try:
        yield found
    finally:
        await found.cut()
