"""A request of HTTP that has come to a frontend process, answered by the application here."""

import logging
from collections import deque
from collections.abc import Callable, MutableMapping
from typing import Any

from starlette.types import ASGIApp, Scope

from gateway.frontends.http.asgi_extensions import (
    JOINED_BYTES,
    SEND_PIECE,
    SEND_WHOLE,
    WATCH,
    Headers,
    Parts,
    send_apart,
)
from gateway.processes.call_end import CallEnd
from gateway.processes.channel import Channel
from gateway.processes.frames import Frame, headed, read_headed
from gateway.processes.kinds import Kind
from gateway.processes.messages import text_pairs
from gateway.processes.scope import read_scope

log = logging.getLogger("sluice.http")

Message = MutableMapping[str, Any]


class HttpCall(CallEnd):
    """One request: what an application of ASGI is called with, on frames.

    As in uvicorn, what is sent to a client that has gone is dropped. It hears what comes from the
    time it is made, and must be run.
    """

    def __init__(self, channel: Channel, call: int, payload: bytes) -> None:
        head, body = read_headed(payload)
        super().__init__(channel, call)
        self._pieces: deque[bytes] = deque((body,))
        self._is_whole: bool = head["whole"]
        self._is_wanted = False
        self._is_over = False
        self._leave: Callable[[], None] | None = None
        state = {
            WATCH: self._watch,
            SEND_WHOLE: self.send_whole,
            SEND_PIECE: self.send_piece,
        }
        self._scope: Scope = read_scope(head, state)
        channel.join(call, self)

    def _take(self, frame: Frame) -> None:
        if frame.kind == Kind.DATA:
            self._pieces.append(frame.payload)
        elif frame.kind == Kind.END:
            self._pieces.append(b"")
            self._is_whole = True
        else:
            self.lose()
        self._wake()

    def lose(self) -> None:
        if self._is_over:
            return
        self._is_over = True
        self._window.close()
        self._wake()
        if self._leave is not None:
            self._leave()

    async def run(self, app: ASGIApp) -> None:
        """Have the application answer; if it fails, that is logged, and the client dropped."""
        try:
            await app(self._scope, self.receive, self.send)
        except Exception:
            # Around one request in a frontend: the client learns nothing of what is in the log.
            log.exception("request failed unexpectedly")
        finally:
            self._channel.leave(self._call)
            if not self._is_over:
                self._channel.send(Kind.ABORT, self._call)

    async def receive(self) -> Message:
        """The next piece of the body, and in the end that the client has gone."""
        while not (self._pieces or self._is_over):
            self._ask_for_more()
            await self._news()
        if not self._pieces:
            return {"type": "http.disconnect"}
        piece = self._pieces.popleft()
        self._passed_on(len(piece))
        more = bool(self._pieces) or not self._is_whole
        return {"type": "http.request", "body": piece, "more_body": more}

    async def send(self, message: Message) -> None:
        """Send the head, or a piece of the body; returns when there is room for more."""
        if self._is_over:
            return
        if message["type"] == "http.response.start":
            head = {"status": message["status"], "headers": text_pairs(message["headers"])}
            self._channel.send(Kind.HEAD, self._call, headed(head))
            return
        body = message.get("body", b"")
        if body and self._scope["method"] != "HEAD":
            await self.send_piece(bytes(body))
        if not message.get("more_body", False):
            self._answered(Kind.END)

    async def send_piece(self, piece: bytes) -> None:
        """Send a piece of the body."""
        if self._is_over:
            return
        self._send_data(piece)
        if not self._window.has_room:
            await self._window.room()

    async def send_whole(self, headers: Headers, parts: Parts) -> None:
        """Answer with status 200; a small answer's head and body at once."""
        if sum(map(len, parts)) <= JOINED_BYTES:
            self._answered(Kind.WHOLE, headed(text_pairs(headers), b"".join(parts)))
        else:
            await send_apart(self.send, headers, parts)

    def _ask_for_more(self) -> None:
        """Say that the body is wanted: the client may wait for that."""
        if not (self._is_whole or self._is_wanted):
            self._is_wanted = True
            self._channel.send(Kind.WANTED, self._call)

    def _answered(self, kind: int, payload: bytes = b"") -> None:
        if not self._is_over:
            self._channel.send(kind, self._call, payload)
            self._is_over = True
            self._wake()

    def _watch(self, leave: Callable[[], None] | None) -> None:
        """As the connection's own: have `leave` called if the client goes away."""
        self._leave = leave
        if leave is not None and self._is_over:
            leave()
