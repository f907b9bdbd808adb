"""A port in front of another one, which counts the bytes that pass it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

CHUNK_BYTES = 1 << 16


class Relay:
    """Passes connections on to a port; `up` and `down` are bytes to it and from it."""

    def __init__(self, port: int) -> None:
        self.up = 0
        self.down = 0
        self.target = ""
        self._port = port

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass one connection on, until either side ends it."""
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._port)
        await asyncio.gather(
            self._pass(reader, there_writer, "up"), self._pass(there_reader, writer, "down")
        )

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: str
    ) -> None:
        try:
            while chunk := await reader.read(CHUNK_BYTES):
                setattr(self, way, getattr(self, way) + len(chunk))
                writer.write(chunk)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()


@asynccontextmanager
async def relayed(port: int) -> AsyncIterator[Relay]:
    """A relay to a port, whose connections have ended after the block."""
    found = Relay(port)
    connections: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.add(asyncio.create_task(found.serve(reader, writer)))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    found.target = f"{host}:{port}"
    try:
        yield found
    finally:
        server.close()
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
