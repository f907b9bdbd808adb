"""Clients and applications of HTTP on both ends of a channel."""

import asyncio
from collections.abc import Callable, Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.frontends.http.request_scope import (
    HEADER_NAMES,
    SEND_PIECE,
    SEND_WHOLE,
    WATCH,
    Parts,
    RawHeaders,
)
from tests.builders import soon
from tests.gateway.processes.links import TEXT


def request_scope(method: str = "POST", headers: RawHeaders = ()) -> Scope:
    return {
        "type": "http",
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": "/caf\xe9",
        "raw_path": b"/caf%C3%A9",
        "query_string": b"a=1",
        "root_path": "",
        "headers": list(headers),
        "client": ("127.0.0.1", 1),
        "server": None,
        "state": {HEADER_NAMES: [name.title() for name, _ in headers]},
    }


class Client:
    """A client of HTTP and its listener: the pieces are its body, whole unless `more` follows."""

    def __init__(
        self,
        app: ASGIApp,
        *pieces: bytes,
        more: bool = False,
        method: str = "POST",
        headers: RawHeaders = (),
    ) -> None:
        self.takes = asyncio.Event()
        self.takes.set()
        self.offered = asyncio.Event()
        self.heads: list[tuple[int, Sequence[tuple[bytes, bytes]]]] = []
        self.is_answered = False
        self._has_left = False
        self.given = 0
        self._pieces: asyncio.Queue[bytes] = asyncio.Queue()
        self._body: asyncio.Queue[Message] = asyncio.Queue()
        self._leave: Callable[[], None] | None = None
        for index, piece in enumerate(pieces, 1):
            self.upload(piece, more=more or index < len(pieces))
        scope = request_scope(method, headers)
        scope["state"] |= {WATCH: self._watch, SEND_PIECE: self._take, SEND_WHOLE: self._take_whole}
        self._task = asyncio.ensure_future(app(scope, self._receive, self._put))

    def upload(self, piece: bytes, *, more: bool = True) -> None:
        """Send a piece of the body."""
        self._body.put_nowait({"type": "http.request", "body": piece, "more_body": more})

    def leave(self) -> None:
        """Close the connection."""
        self._has_left = True
        self._body.put_nowait({"type": "http.disconnect"})
        if self._leave is not None:
            self._leave()

    def cancel(self) -> None:
        """Have the listener give up the request."""
        self._task.cancel()

    async def piece(self) -> bytes:
        """The next piece of the answer."""
        return await soon(self._pieces.get())

    async def ended(self) -> None:
        """Wait until the frontend process is done with the request."""
        await soon(asyncio.wait([self._task]))
        self._task.result()

    async def answer(self) -> bytes:
        """The body of the answer, which is whole."""
        await self.ended()
        assert self.is_answered
        return self._taken()

    async def dropped(self) -> bytes:
        """The body received before the client was dropped."""
        await self.ended()
        assert not self.is_answered
        return self._taken()

    def _taken(self) -> bytes:
        return b"".join(self._pieces.get_nowait() for _ in range(self._pieces.qsize()))

    def _watch(self, leave: Callable[[], None] | None) -> None:
        self._leave = leave
        if leave is not None and self._has_left:
            leave()

    async def _receive(self) -> Message:
        message = await self._body.get()
        self.given += 1
        return message

    async def _put(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.heads.append((message["status"], message["headers"]))
            return
        assert self.heads
        assert not self.is_answered
        await self._take(message["body"])
        self.is_answered = not message.get("more_body", False)

    async def _take(self, piece: bytes) -> None:
        self.offered.set()
        await self.takes.wait()
        self._pieces.put_nowait(piece)

    async def _take_whole(self, headers: RawHeaders, parts: Parts) -> None:
        self.heads.append((200, list(headers)))
        await self._take(b"".join(parts))
        self.is_answered = True


async def begin(send: Send, status: int = 200) -> None:
    await send({"type": "http.response.start", "status": status, "headers": TEXT})


async def finish(send: Send, body: bytes = b"") -> None:
    await send({"type": "http.response.body", "body": body})


async def body_of(receive: Receive) -> bytes:
    """The body to its end."""
    pieces, more = [], True
    while more:
        message = await receive()
        assert message["type"] == "http.request"
        pieces.append(message["body"])
        more = message["more_body"]
    return b"".join(pieces)


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    body = await body_of(receive)
    await begin(send)
    await finish(send, body)
