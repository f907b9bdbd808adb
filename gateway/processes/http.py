"""HTTP requests of a frontend process: relayed there, answered in the server."""

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.errors import exiting
from gateway.frontends.http.connection_parts import has_late_body
from gateway.frontends.http.errors import plain_error
from gateway.frontends.http.request_scope import (
    JOINED_BYTES,
    SEND_PIECE,
    SEND_WHOLE,
    WATCH,
    Parts,
    RawHeaders,
    send_apart,
)
from gateway.processes.channel import Channel, ChannelCall, Frame, headed, read_headed
from gateway.processes.messages import (
    FrontendKind,
    byte_pairs,
    read_scope,
    text_pairs,
    written_scope,
)
from gateway.processes.relayed_call import (
    RelayCancelled,
    RelayedCall,
    RelayedCalls,
    ServerDisconnected,
    concurrently,
)

log = logging.getLogger("sluice.http")


class HttpCall(ChannelCall):
    """The server's end of a request: an ASGI connection on frames.

    As in uvicorn, data sent after a disconnect are dropped. It receives frames from its creation,
    and must be run.
    """

    def __init__(self, channel: Channel, call: int, payload: bytes) -> None:
        head, body = read_headed(payload)
        super().__init__(channel, call)
        self._pieces: deque[bytes] = deque((body,))
        self._is_whole: bool = head["whole"]
        self._is_wanted = False
        self._is_over = False
        self._on_disconnect: Callable[[], None] | None = None
        state = {
            WATCH: self._watch,
            SEND_WHOLE: self.send_whole,
            SEND_PIECE: self.send_piece,
        }
        self._scope: Scope = read_scope(head, state)
        channel.join(call, self)

    def _take(self, frame: Frame) -> None:
        if frame.kind == FrontendKind.DATA:
            self._pieces.append(frame.payload)
        elif frame.kind == FrontendKind.END:
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
        if self._on_disconnect is not None:
            self._on_disconnect()

    async def run(self, app: ASGIApp) -> None:
        """Call the application; if it fails, log the error and drop the client."""
        try:
            await app(self._scope, self.receive, self.send)
        except Exception:
            # Around one request in a frontend: the text of the error stays in the log.
            log.exception("request failed unexpectedly")
        finally:
            self._channel.leave(self._call)
            if not self._is_over:
                self._channel.send(FrontendKind.ABORT, self._call)

    async def receive(self) -> Message:
        """The next piece of the body, or `http.disconnect`."""
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
        """Send the head, or a piece of the body; return when the window has room."""
        if self._is_over:
            return
        if message["type"] == "http.response.start":
            head = {"status": message["status"], "headers": text_pairs(message["headers"])}
            self._channel.send(FrontendKind.HEAD, self._call, headed(head))
            return
        body = message.get("body", b"")
        if body and self._scope["method"] != "HEAD":
            await self.send_piece(bytes(body))
        if not message.get("more_body", False):
            self._answered(FrontendKind.END)

    async def send_piece(self, piece: bytes) -> None:
        """Send a piece of the body."""
        if self._is_over:
            return
        self._send_data(piece)
        if not self._window.has_room:
            await self._window.room()

    async def send_whole(self, headers: RawHeaders, parts: Parts) -> None:
        """Answer with status 200; a small answer is one frame."""
        if sum(map(len, parts)) <= JOINED_BYTES:
            self._answered(FrontendKind.WHOLE, headed(text_pairs(headers), b"".join(parts)))
        else:
            await send_apart(self.send, headers, parts)

    def _ask_for_more(self) -> None:
        """Request the body once, because the client may wait for `100 Continue`."""
        if not (self._is_whole or self._is_wanted):
            self._is_wanted = True
            self._channel.send(FrontendKind.WANTED, self._call)

    def _answered(self, kind: int, payload: bytes = b"") -> None:
        if not self._is_over:
            self._channel.send(kind, self._call, payload)
            self._is_over = True
            self._wake()

    def _watch(self, on_disconnect: Callable[[], None] | None) -> None:
        """As the listener's own WATCH: call `on_disconnect` when the client disconnects."""
        self._on_disconnect = on_disconnect
        if on_disconnect is not None and self._is_over:
            on_disconnect()


UNAVAILABLE = 503

EMPTY_PIECE: Message = {"type": "http.request", "body": b"", "more_body": True}


class HttpRelay:
    """The frontend's end of requests: an ASGI application that relays to the server."""

    def __init__(self, calls: RelayedCalls) -> None:
        self._calls = calls

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_early = has_late_body(dict(scope["headers"]))
        first = EMPTY_PIECE if is_early else await receive()
        if first["type"] != "http.request":
            return  # the client disconnected before the request body was complete
        with self._calls.new() as call:
            whole = not first.get("more_body", False)
            call.begin(FrontendKind.HTTP_CALL, written_scope(scope, whole=whole), first["body"])
            answer = _Answer(scope, send, call)
            if whole:
                await self._answer(scope, receive, answer)
                return
            async with concurrently(_send_body(receive, call, is_early=is_early)):
                await self._answer(scope, receive, answer)

    async def _answer(self, scope: Scope, receive: Receive, answer: "_Answer") -> None:
        scope["state"][WATCH](answer.call.cancel)
        try:
            await answer.send()
        except RelayCancelled:
            return
        except ServerDisconnected:
            if not answer.is_begun:
                await plain_error(UNAVAILABLE, exiting().message)(scope, receive, answer.put)
        finally:
            scope["state"][WATCH](None)


class _Answer:
    """The relaying of one answer to the client."""

    def __init__(self, scope: Scope, put: Send, call: RelayedCall) -> None:
        self._state: dict[str, Any] = scope["state"]
        self.put = put
        self.call = call
        self.is_begun = False

    async def send(self) -> None:
        """Send the answer; ServerDisconnected if it is incomplete."""
        while True:
            for frame in await self.call.frames():
                if await self._send(frame):
                    return

    async def _send(self, frame: Frame) -> bool:
        """Send one frame; whether it was the last."""
        if frame.kind == FrontendKind.DATA:
            await self._state[SEND_PIECE](frame.payload)
            self.call.passed_on(len(frame.payload))
            return False
        if frame.kind == FrontendKind.HEAD:
            head, _ = read_headed(frame.payload)
            await self.put(_start(head))
            self.is_begun = True
            return False
        if frame.kind == FrontendKind.WHOLE:
            headers, body = read_headed(frame.payload)
            await self._state[SEND_WHOLE](byte_pairs(headers), (body,))
        elif frame.kind == FrontendKind.END:
            await self.put({"type": "http.response.body", "body": b"", "more_body": False})
        # After ABORT the answer is incomplete, so the listener drops the client.
        return True


async def _send_body(receive: Receive, call: RelayedCall, *, is_early: bool) -> None:
    """Relay the rest of the body; reading it sends `100 Continue` to a waiting client."""
    if is_early:
        await call.body_wanted()
    while (message := await receive())["type"] == "http.request":
        if message["body"]:
            await call.send(message["body"])
        if not message.get("more_body", False):
            call.end()
            return
    call.cancel()


def _start(head: Any) -> Message:
    return {
        "type": "http.response.start",
        "status": head["status"],
        "headers": byte_pairs(head["headers"]),
    }
