"""The things that clients of HTTP do, well-behaved or not."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import orjson

from loadtests.soak import asking
from loadtests.soak.asking import Question, Refused, Route, Wrong
from loadtests.soak.http_connection import Answer, Closed, Connection, post
from loadtests.soak.tally import Tally

LEAVE_SECS = 0.004
SILENCE_SECS = 1.0
SLOW_BYTES = 4096
AHEAD = 4
LAST_EVENT = "last-event-id"
GARBAGE = (b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00", b"POST /v2 \r\n\r\n", b"")


@dataclass(frozen=True, slots=True)
class HttpClients:
    """What every act of HTTP needs; an act returns once its client has left."""

    port: int
    tally: Tally
    random: random.Random
    frontends_end: bool = False

    async def whole(self, question: Question) -> None:
        """Ask, and read the whole answer."""
        route = self._route(question)
        async with Connection(self.port) as connection:
            await self._send(connection, question, route)
            await self._settle(connection, question, route)

    async def ahead(self, question: Question) -> None:
        """Ask several times on one connection before the first answer; leave after some."""
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
        """Send no more; the server answers or closes."""
        async with Connection(self.port) as connection:
            await self._send(connection, question, self._route(question))
            connection.half_close()
            await connection.drain()

    async def midway(self, question: Question) -> None:
        """Leave when the first bytes of the answer have come."""
        async with Connection(self.port) as connection:
            await self._send(connection, question, self._route(question))
            await connection.read()
            if self.random.random() < 0.5:
                connection.reset()

    async def slowly(self, question: Question) -> None:
        """Read the answer with pauses, and sometimes leave before its end."""
        async with Connection(self.port, SLOW_BYTES) as connection:
            self.tally.ask(question)
            await connection.send(self._bytes(question, self._route(question), "connection: close"))
            with suppress(Closed):
                for _ in range(self.random.randrange(4)):
                    await asyncio.sleep(self.random.random() * SILENCE_SECS / 4)
                    await connection.read()

    async def half_sent(self, question: Question) -> None:
        """Send a part of a request, say nothing for a while, and leave."""
        data = self._bytes(question, self._route(question))
        async with Connection(self.port) as connection:
            self.tally.ask(question)
            await connection.send(data[: self.random.randrange(len(data))])
            await asyncio.sleep(self.random.random() * SILENCE_SECS)
            if self.random.random() < 0.5:
                connection.reset()

    async def garbage(self, _: Question) -> None:
        """Send what is no request; the server closes the connection."""
        async with Connection(self.port) as connection:
            await connection.send(self.random.choice(GARBAGE) + self.random.randbytes(200))
            connection.half_close()
            await connection.drain()

    async def cancel(self, question: Question) -> None:
        """Ask with an id, and have another connection cancel it."""
        route = self._route(question)
        async with Connection(self.port) as connection:
            await self._send(connection, question, route)
            await self._soon()
            name = question.model.name
            await self._post(f"/v2/models/{name}/requests/{question.id}/cancel", b"{}")
            await self._settle(connection, question, route, stopped=True)

    async def resume(self, question: Question) -> None:
        """Ask for a stream that can be resumed, leave, and come back for the rest."""
        if self._route(question) is not Route.STREAM:
            return await self.whole(question)
        path = asking.path(question, Route.STREAM)
        asked = orjson.loads(asking.body(question, Route.STREAM)) | {"resumable": True}
        self.tally.ask(question)
        async with Connection(self.port) as connection:
            await connection.send(post(path, orjson.dumps(asked)))
            token = _token(await connection.read())
        if not token:
            return None
        answer = await self._post(path, b"", f"{LAST_EVENT}: {token}.0")
        return self._judge(answer, question, Route.STREAM)

    def _route(self, question: Question) -> Route:
        found = asking.routes(question.model)
        return found[question.number % len(found)]

    @staticmethod
    def _bytes(question: Question, route: Route, *headers: str) -> bytes:
        return post(asking.path(question, route), asking.body(question, route), *headers)

    async def _send(self, connection: Connection, question: Question, route: Route) -> None:
        self.tally.ask(question)
        await connection.send(self._bytes(question, route))

    async def _soon(self) -> None:
        await asyncio.sleep(self.random.random() * LEAVE_SECS)

    async def _post(self, path: str, body: bytes, *headers: str) -> Answer:
        async with Connection(self.port) as connection:
            await connection.send(post(path, body, *headers))
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
        asking.check_infer(question, answer.body)
    elif route is Route.STREAM:
        asking.check_generated(question, answer.events)
    elif route is Route.GENERATE:
        asking.check_generated(question, [orjson.loads(answer.body)])
    elif route is Route.EMBEDDINGS:
        asking.check_embeddings(question, answer.body)
    else:
        asking.check_openai(question, answer.events or [orjson.loads(answer.body)])


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
}
"""Each act with its weight."""

ENDED: tuple[type[Exception], ...] = (Closed, ConnectionError)
"""How an act ends whose connection the server closed."""
