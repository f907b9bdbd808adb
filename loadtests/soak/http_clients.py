"""Actions of HTTP clients, well-behaved or not."""

import asyncio
import random
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import orjson

from loadtests.soak import requests
from loadtests.soak.keys import Keys
from loadtests.soak.requests import Question, Refused, Route, Tally, Wrong
from loadtests.support.http_client import HEAD_END, Chunks

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
    """A socket that is read by calls only; the end of the block closes it."""

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
        """Reset the connection."""
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
    lines = (f"POST {path} HTTP/1.1", "host: localhost", *described, *headers)
    return "\r\n".join((*lines, "", "")).encode() + body


def header(credential: str) -> str:
    """The header with a credential."""
    return f"authorization: {credential}"


LEAVE_SECS = 0.004
BURST = 24
FEW_AT_ONCE = ("large", "py_large")
UNAUTHORIZED = (400, 401)
SILENCE_SECS = 1.0
SLOW_BYTES = 4096
AHEAD = 4
LAST_EVENT = "last-event-id"
GARBAGE = (b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00", b"POST /v2 \r\n\r\n", b"")


@dataclass(frozen=True, slots=True)
class HttpClients:
    """Acts of HTTP; an act returns once its client has disconnected.

    Their requests have the key of the tenant of the `client`.
    """

    port: int
    tally: Tally
    random: random.Random
    keys: Keys
    client: int

    async def whole(self, question: Question) -> None:
        """Send a request, and read the whole answer."""
        route = self._route(question)
        async with Connection(self.port) as connection:
            await self._send(connection, question, route)
            await self._settle(connection, question, route)

    async def ahead(self, question: Question) -> None:
        """Send several requests ahead on one connection; disconnect after some answers."""
        if question.model.name == "large":  # neither end would read before it has sent all
            return await self.whole(question)
        route = self._route(question)
        async with Connection(self.port) as connection:
            for _ in range(AHEAD):
                await self._send(connection, question, route)
            for _ in range(self.random.randrange(AHEAD + 1)):
                await self._settle(connection, question, route)
        return None

    async def leave(self, question: Question) -> None:
        """Close the connection within four milliseconds."""
        async with Connection(self.port) as connection:
            await self._send(connection, question, self._route(question))
            await self._soon()

    async def reset(self, question: Question) -> None:
        """Reset the connection within four milliseconds."""
        async with Connection(self.port) as connection:
            await self._send(connection, question, self._route(question))
            await self._soon()
            connection.reset()

    async def half_close(self, question: Question) -> None:
        """Half-close; the server answers or closes."""
        async with Connection(self.port) as connection:
            await self._send(connection, question, self._route(question))
            connection.half_close()
            await connection.drain()

    async def midway(self, question: Question) -> None:
        """Disconnect after the first bytes of the answer."""
        async with Connection(self.port) as connection:
            await self._send(connection, question, self._route(question))
            await connection.read()
            if self.random.random() < 0.5:
                connection.reset()

    async def slowly(self, question: Question) -> None:
        """Read the answer with pauses, and sometimes disconnect before its end."""
        async with Connection(self.port, SLOW_BYTES) as connection:
            self.tally.ask(question)
            await connection.send(self._bytes(question, self._route(question), "connection: close"))
            with suppress(Closed):
                for _ in range(self.random.randrange(4)):
                    await asyncio.sleep(self.random.random() * SILENCE_SECS / 4)
                    await connection.read()

    async def half_sent(self, question: Question) -> None:
        """Send a part of a request, pause, and disconnect."""
        data = self._bytes(question, self._route(question))
        async with Connection(self.port) as connection:
            self.tally.ask(question)
            await connection.send(data[: self.random.randrange(len(data))])
            await asyncio.sleep(self.random.random() * SILENCE_SECS)
            if self.random.random() < 0.5:
                connection.reset()

    async def garbage(self, _: Question) -> None:
        """Send invalid bytes; the server closes the connection."""
        async with Connection(self.port) as connection:
            await connection.send(self.random.choice(GARBAGE) + self.random.randbytes(200))
            connection.half_close()
            await connection.drain()

    async def cancel(self, question: Question) -> None:
        """Send a request with an id, and cancel it on another connection."""
        route = self._route(question)
        async with Connection(self.port) as connection:
            await self._send(connection, question, route)
            await self._soon()
            name = question.model.name
            await self._post(f"/v2/models/{name}/requests/{question.id}/cancel", b"{}")
            await self._settle(connection, question, route, stopped=True)

    async def resume(self, question: Question) -> None:
        """Request a resumable stream, disconnect, and resume it."""
        if self._route(question) is not Route.STREAM:
            return await self.whole(question)
        path = requests.path(question, Route.STREAM)
        asked = orjson.loads(requests.body(question, Route.STREAM)) | {"resumable": True}
        self.tally.ask(question)
        async with Connection(self.port) as connection:
            await connection.send(post(path, orjson.dumps(asked), self._key))
            token = _token(await connection.read())
        if not token:
            return None
        answer = await self._post(path, b"", f"{LAST_EVENT}: {token}.0")
        return self._judge(answer, question, Route.STREAM)

    async def burst(self, question: Question) -> None:
        """Send a request many times at once, each on a connection of its own."""
        if question.parameters or question.model.name in FEW_AT_ONCE:
            return await self.whole(question)
        found = await asyncio.gather(
            *(self.whole(question) for _ in range(BURST)), return_exceptions=True
        )
        for error in filter(None, found):
            raise error
        return None

    async def wrong_key(self, question: Question) -> None:
        """Send a request with a credential that is none."""
        path = requests.path(question, self._route(question))
        async with Connection(self.port) as connection:
            await connection.send(post(path, b"{}", header(self.keys.wrong(self.random))))
            answer = await connection.answer()
        if answer.status not in UNAUTHORIZED:
            self.tally.surprise(f"a wrong key: {answer.status} {answer.body[:120]!r}")

    async def guest(self, question: Question) -> None:
        """Send a request with the key of a guest, which may be revoked meanwhile."""
        if question.parameters:
            return await self.wrong_key(question)
        found = requests.path(question, self._route(question))
        self.tally.ask(question)
        async with Connection(self.port) as connection:
            data = requests.body(question, self._route(question))
            with suppress(Closed):
                await connection.send(post(found, data, header(self.keys.guest)))
                await connection.answer()
        return None

    def _route(self, question: Question) -> Route:
        found = requests.routes(question.model)
        return found[question.number % len(found)]

    @property
    def _key(self) -> str:
        return header(self.keys.of(self.client))

    def _bytes(self, question: Question, route: Route, *headers: str) -> bytes:
        found = requests.path(question, route), requests.body(question, route)
        return post(*found, self._key, *headers)

    async def _send(self, connection: Connection, question: Question, route: Route) -> None:
        self.tally.ask(question)
        await connection.send(self._bytes(question, route))

    async def _soon(self) -> None:
        await asyncio.sleep(self.random.random() * LEAVE_SECS)

    async def _post(self, path: str, body: bytes, *headers: str) -> Answer:
        async with Connection(self.port) as connection:
            await connection.send(post(path, body, self._key, *headers))
            return await connection.answer()

    async def _settle(
        self, connection: Connection, question: Question, route: Route, *, stopped: bool = False
    ) -> None:
        """Read an answer, check it and count it."""
        self._judge(await connection.answer(), question, route, stopped=stopped)

    def _judge(
        self, answer: Answer, question: Question, route: Route, *, stopped: bool = False
    ) -> None:
        try:
            found = _refusal(answer)
            if found is not None:
                self.tally.refuse(question, found, stopped=stopped)
            elif not (stopped and _was_cancelled(answer)):
                _check(answer, question, route)
                self.tally.answer(question)
        except (Wrong, KeyError, IndexError, ValueError) as error:
            shown = answer.body[:120]
            name = question.model.name
            self.tally.surprise(f"{name}, {route.value}: {error!r}: {answer.status} {shown!r}")


def _refusal(answer: Answer) -> Refused | None:
    if answer.status != 200:
        return Refused(str(answer.status), answer.body.decode(errors="replace"))
    last = answer.events[-1] if answer.events else {}
    if "error" in last:
        return Refused("event", str(last["error"]))
    return None


def _was_cancelled(answer: Answer) -> bool:
    return b'"cancelled":true' in answer.body


def _check(answer: Answer, question: Question, route: Route) -> None:
    if route is Route.INFER:
        requests.check_infer(question, answer.body)
    elif route is Route.STREAM:
        requests.check_generated(question, answer.events)
    elif route is Route.GENERATE:
        requests.check_generated(question, [orjson.loads(answer.body)])
    elif route is Route.EMBEDDINGS:
        requests.check_embeddings(question, answer.body)
    else:
        requests.check_openai(question, answer.events or [orjson.loads(answer.body)])


def _token(data: bytes) -> str:
    lines = data.decode("latin-1").split("\r\n")
    found = [line.split(":", 1)[1] for line in lines if line.lower().startswith("sluice-stream:")]
    return found[0].strip() if found else ""


Act = Callable[[HttpClients, Question], Awaitable[None]]
ACTS: Mapping[str, tuple[float, Act]] = {
    "HTTP whole": (4, HttpClients.whole),
    "HTTP leave": (6, HttpClients.leave),
    "HTTP reset": (4, HttpClients.reset),
    "HTTP half-close": (1, HttpClients.half_close),
    "HTTP leave midway": (2, HttpClients.midway),
    "HTTP slow reader": (1, HttpClients.slowly),
    "HTTP half-sent": (0.5, HttpClients.half_sent),
    "HTTP garbage": (0.5, HttpClients.garbage),
    "HTTP cancel by id": (2, HttpClients.cancel),
    "HTTP several ahead": (1, HttpClients.ahead),
    "HTTP resume": (1, HttpClients.resume),
    "HTTP burst": (0.3, HttpClients.burst),
    "HTTP wrong key": (1, HttpClients.wrong_key),
    "HTTP guest": (1, HttpClients.guest),
}
"""Each act with its weight."""

ENDED: tuple[type[Exception], ...] = (Closed, ConnectionError)
"""The errors of an act whose connection the server closed."""
