"""One HTTP connection of a client that may treat the server badly."""

import asyncio
import socket
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import orjson

from loadtests.sse import HEAD_END, Chunks

READ_BYTES = 2**16
EVENT, DONE = b"data: ", b"[DONE]"


class Closed(Exception):
    """The server closed the connection before its answer was complete."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A response; `body` is without the transfer coding."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def events(self) -> Sequence[Mapping[str, Any]]:
        """The JSON of each event of a stream."""
        lines = (line for line in self.body.split(b"\n") if line.startswith(EVENT))
        found = (line.removeprefix(EVENT).strip() for line in lines)
        return [orjson.loads(each) for each in found if each != DONE]


class Connection:
    """A socket that reads only when it is asked to; leaving the block closes it."""

    def __init__(self, port: int, receive_buffer: int = 0) -> None:
        self._port = port
        self._rest = b""
        self.socket = socket.socket()
        self.socket.setblocking(False)
        if receive_buffer:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)

    async def __aenter__(self) -> Self:
        try:
            await asyncio.get_running_loop().sock_connect(self.socket, ("127.0.0.1", self._port))
        except BaseException:
            self.socket.close()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.socket.close()

    async def send(self, data: bytes) -> None:
        """Send all of it."""
        await asyncio.get_running_loop().sock_sendall(self.socket, data)

    async def read(self) -> bytes:
        """Some bytes; Closed at the end of the connection."""
        data = await asyncio.get_running_loop().sock_recv(self.socket, READ_BYTES)
        if not data:
            raise Closed
        return data

    async def answer(self) -> Answer:
        """A whole response."""
        head, rest = await self._head()
        status, headers = _parse(head)
        if headers.get("transfer-encoding") == "chunked":
            return Answer(status, headers, await self._chunked(rest))
        size = int(headers.get("content-length", "0"))
        while len(rest) < size:
            rest += await self.read()
        self._rest = rest[size:]
        return Answer(status, headers, rest[:size])

    async def drain(self) -> None:
        """Read until the server closes the connection."""
        try:
            while True:
                await self.read()
        except (Closed, OSError):
            return

    def reset(self) -> None:
        """Leave without a goodbye: the server reads a connection reset."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def half_close(self) -> None:
        """Send nothing more; the server may have closed the connection before."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)

    async def _head(self) -> tuple[bytes, bytes]:
        data, self._rest = self._rest, b""
        while HEAD_END not in data:
            data += await self.read()
        head, _, rest = data.partition(HEAD_END)
        return head, rest

    async def _chunked(self, rest: bytes) -> bytes:
        chunks = Chunks()
        found = [chunks.feed(rest)]
        while not chunks.ended:
            found.append(chunks.feed(await self.read()))
        self._rest = chunks.rest
        return b"".join(found)


def _parse(head: bytes) -> tuple[int, Mapping[str, str]]:
    status, *lines = head.decode("latin-1").split("\r\n")
    pairs = (line.partition(":") for line in lines)
    return int(status.split()[1]), {name.lower(): value.strip() for name, _, value in pairs}


def post(path: str, body: bytes, *headers: str) -> bytes:
    """A POST of JSON."""
    described = ("content-type: application/json", f"content-length: {len(body)}")
    lines = (f"POST {path} HTTP/1.1", "host: soak", *described, *headers)
    return "\r\n".join((*lines, "", "")).encode() + body
