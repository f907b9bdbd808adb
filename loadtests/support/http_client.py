"""Clients of HTTP/1.1: event streams in little processor time, and requests in turn."""

import asyncio
import http.client
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast
from urllib.request import Request, urlopen

import orjson

from loadtests.support.servers import LoadTestFailed

HEAD_END = b"\r\n\r\n"
OK = b"HTTP/1.1 200 "
EVENT = b"data: "
LAST_CHUNK = b"\r\n0\r\n\r\n"
DONE = b"[DONE]"

Reader = TypeVar("Reader", bound=asyncio.Protocol)


class StreamFailed(LoadTestFailed):
    """A stream was refused, or ended early; the text has the server's reason."""


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a server."""

    port: int
    host: str = "127.0.0.1"

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def post(path: str, address: Address, body: bytes) -> bytes:
    """The bytes of a POST of JSON."""
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n"
        f"Accept: text/event-stream\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def with_headers(request: bytes, headers: Mapping[str, str]) -> bytes:
    """The bytes of a request with more headers."""
    head, end, body = request.partition(HEAD_END)
    lines = "".join(f"\r\n{name}: {value}" for name, value in headers.items())
    return head + lines.encode() + end + body


@dataclass(frozen=True, slots=True)
class Count:
    """The responses of one stream, and the time of the last one."""

    responses: int
    ended_at: float


class EventCounter(asyncio.Protocol):
    """Counts the events of one response without storing them; `done` is set at its end."""

    def __init__(self, request: bytes) -> None:
        self.done: asyncio.Future[Count] = asyncio.get_running_loop().create_future()
        self._request = request
        self._found = 0
        self._ended_at = 0.0
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.WriteTransport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        if not self._tail and not data.startswith(OK):
            self._fail(f"the server answered: {data.decode(errors='replace')}")
        if found := data.count(EVENT) + self._across(data, EVENT).count(EVENT):
            self._found += found
            self._ended_at = time.perf_counter()
        ended = LAST_CHUNK in data or LAST_CHUNK in self._across(data, LAST_CHUNK)
        if ended and not self.done.done():
            self.done.set_result(Count(self._found, self._ended_at))
        self._tail = (self._tail + data[-len(LAST_CHUNK) :])[-len(LAST_CHUNK) :]

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(f"the connection was closed after {self._found} events")

    def _across(self, data: bytes, marker: bytes) -> bytes:
        """The bytes around the border of two reads, which may cut a marker in two."""
        return self._tail[1 - len(marker) :] + data[: len(marker) - 1]

    def _fail(self, reason: str) -> None:
        if not self.done.done():
            self.done.set_exception(StreamFailed(reason))


@dataclass(slots=True)
class Timing:
    """The times of one request and of each of its events, in seconds of one clock."""

    sent: float
    arrivals: list[float] = field(default_factory=list)

    @property
    def first(self) -> float:
        """Seconds from the request to its first event."""
        return self.arrivals[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        """Seconds between one event and the next."""
        return [
            later - earlier
            for earlier, later in zip(self.arrivals, self.arrivals[1:], strict=False)
        ]


class EventTimer(asyncio.Protocol):
    """Records the time of each event of one response; `done` is set when the body has ended."""

    def __init__(self, request: bytes) -> None:
        self.done: asyncio.Future[Timing] = asyncio.get_running_loop().create_future()
        self._request = request
        self._timing = Timing(0.0)
        self._body = Chunks()
        self._head = b""
        self._in_head = True
        self._line = b""
        self._error = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._timing.sent = time.perf_counter()
        cast(asyncio.WriteTransport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self._in_head:
            self._head += data
            if HEAD_END not in self._head:
                return
            self._head, _, data = self._head.partition(HEAD_END)
            self._in_head = False
        if not self._head.startswith(OK):
            self._fail(f"the server answered: {(self._head + HEAD_END + data).decode()}")
            return
        *lines, self._line = (self._line + self._body.feed(data)).split(b"\n")
        for line in lines:
            self._take(line, now)
        if self._body.ended:
            self._finish()

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(f"the connection was closed early, after: {self._head[:200]!r}")

    @property
    def arrivals(self) -> list[float]:
        """The times of the events so far."""
        return self._timing.arrivals

    def _take(self, line: bytes, now: float) -> None:
        if not line.startswith(EVENT) or line[len(EVENT) :] == DONE:
            return
        self._timing.arrivals.append(now)
        if line.startswith(b'data: {"error"'):
            self._error = line

    def _finish(self) -> None:
        if self._error or not self._timing.arrivals:
            self._fail(f"the stream ended badly: {self._error.decode() or 'it has no events'}")
        elif not self.done.done():
            self.done.set_result(self._timing)

    def _fail(self, reason: str) -> None:
        if not self.done.done():
            self.done.set_exception(StreamFailed(reason))


class Chunks:
    """Removes the chunked transfer coding of a body that arrives in pieces."""

    def __init__(self) -> None:
        self.ended = False
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        """The content of the chunks that `data` completes."""
        rest, content = self._rest + data, []
        while not self.ended and (line_end := rest.find(b"\r\n")) >= 0:
            start = line_end + 2
            end = start + int(rest[:line_end], 16)
            if len(rest) < end + 2:
                break
            content.append(rest[start:end])
            self.ended = start == end
            rest = rest[end + 2 :]
        self._rest = rest
        return b"".join(content)

    @property
    def rest(self) -> bytes:
        """The bytes after the last complete chunk."""
        return self._rest


async def connect(
    address: Address, protocol: Callable[[], Reader]
) -> tuple[asyncio.Transport, Reader]:
    """A connection, and the protocol that reads it."""
    loop = asyncio.get_running_loop()
    return await loop.create_connection(protocol, address.host, address.port)


TIMEOUT_SECS = 60.0
CALL_SECS = 600.0
"""The time of a call, which may be a load."""
ADD_SUB_PATH = "/v2/models/add_sub/infer"
ADD_SUB_BODY = orjson.dumps(
    {
        "inputs": [
            {"name": name, "datatype": "FP32", "shape": [1, 16], "data": [0.5] * 16}
            for name in ("INPUT0", "INPUT1")
        ]
    }
)
"""One request to add_sub, 16 floats for each input, as JSON."""


@contextmanager
def posting(address: Address, path: str, body: bytes) -> Iterator[Callable[[], None]]:
    """A function that sends one request and reads its response; LoadTestFailed unless it is 200."""
    connection = http.client.HTTPConnection(address.host, address.port, timeout=TIMEOUT_SECS)

    def send() -> None:
        connection.request("POST", path, body)
        response = connection.getresponse()
        content = response.read()
        if response.status != http.client.OK:
            raise LoadTestFailed(f"{path} returned {response.status}: {content.decode()}")

    try:
        yield send
    finally:
        connection.close()


def call(port: int, path: str, body: Mapping[str, Any] | None = None) -> Any:
    """The JSON of an answer: to a GET, or to a POST of the body; HTTPError unless it is 200."""
    content = None if body is None else orjson.dumps(body)
    with urlopen(Request(f"http://127.0.0.1:{port}{path}", content), timeout=CALL_SECS) as answer:
        return orjson.loads(answer.read() or b"null")


def latencies_us(port: int, path: str, body: bytes, requests: int) -> list[float]:
    """The time of each request of one client, one after the other; LoadTestFailed as `posting`."""
    took_us = []
    with posting(Address(port), path, body) as send:
        for _ in range(requests):
            asked = time.perf_counter()
            send()
            took_us.append((time.perf_counter() - asked) * 1e6)
    return took_us
