"""The application of a frontend process: every request is answered by the server."""

from typing import Any

from starlette.types import Message, Receive, Scope, Send

from gateway.frontends.http.asgi_extensions import SEND_PIECE, SEND_WHOLE, WATCH
from gateway.frontends.http.errors import plain_error
from gateway.processes.frames import Frame, read_headed
from gateway.processes.kinds import Kind
from gateway.processes.messages import byte_pairs
from gateway.processes.relayed_call import (
    Calls,
    ClientLeft,
    RelayedCall,
    ServerGone,
    beside,
)
from gateway.processes.scope import written_scope

UNAVAILABLE = 503
GONE = "Server exiting"

EARLY_BYTES = 64 << 10
"""Of a request whose body is said to be larger the server hears before any of that has come."""

NOTHING_YET: Message = {"type": "http.request", "body": b"", "more_body": True}


class HttpRelay:
    """An application of ASGI behind a listener of ours."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_early = _waits_or_announces_much(scope)
        first = NOTHING_YET if is_early else await receive()
        if first["type"] != "http.request":
            return  # the client left before its request was whole
        with self._calls.new() as call:
            whole = not first.get("more_body", False)
            call.begin(Kind.HTTP_CALL, written_scope(scope, whole=whole), first["body"])
            answer = _Answer(scope, send, call)
            if whole:
                await self._answer(scope, receive, answer)
                return
            async with beside(_send_body(receive, call, is_early=is_early)):
                await self._answer(scope, receive, answer)

    async def _answer(self, scope: Scope, receive: Receive, answer: "_Answer") -> None:
        scope["state"][WATCH](answer.call.leave)
        try:
            await answer.send()
        except ClientLeft:
            return
        except ServerGone:
            if not answer.is_begun:
                await plain_error(UNAVAILABLE, GONE)(scope, receive, answer.put)
        finally:
            scope["state"][WATCH](None)


class _Answer:
    """What comes for one request, on its way to the client."""

    def __init__(self, scope: Scope, put: Send, call: RelayedCall) -> None:
        self._state: dict[str, Any] = scope["state"]
        self.put = put
        self.call = call
        self.is_begun = False

    async def send(self) -> None:
        """Send it all; ServerGone if there is no more of it, and it is not whole."""
        while True:
            for frame in await self.call.frames():
                if await self._send(frame):
                    return

    async def _send(self, frame: Frame) -> bool:
        """Send one frame; whether it is the last."""
        if frame.kind == Kind.DATA:
            await self._state[SEND_PIECE](frame.payload)
            self.call.passed_on(len(frame.payload))
            return False
        if frame.kind == Kind.HEAD:
            head, _ = read_headed(frame.payload)
            await self.put(_start(head))
            self.is_begun = True
            return False
        if frame.kind == Kind.WHOLE:
            headers, body = read_headed(frame.payload)
            await self._state[SEND_WHOLE](byte_pairs(headers), (body,))
        elif frame.kind == Kind.END:
            await self.put({"type": "http.response.body", "body": b"", "more_body": False})
        # What is aborted has not been ended, and so the listener drops its client.
        return True


def _waits_or_announces_much(scope: Scope) -> bool:
    """Whether the server should decide before anything of the body is read."""
    headers = dict(scope["headers"])
    length: bytes = headers.get(b"content-length", b"0")
    return b"expect" in headers or (length.isdigit() and int(length) > EARLY_BYTES)


async def _send_body(receive: Receive, call: RelayedCall, *, is_early: bool) -> None:
    """Send the rest of the request as it comes; reading it tells a client that waits to go on."""
    if is_early:
        await call.wanted()
    while (message := await receive())["type"] == "http.request":
        if message["body"]:
            await call.send(message["body"])
        if not message.get("more_body", False):
            call.end()
            return
    call.leave()


def _start(head: Any) -> Message:
    return {
        "type": "http.response.start",
        "status": head["status"],
        "headers": byte_pairs(head["headers"]),
    }
