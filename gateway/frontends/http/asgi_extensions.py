"""Extensions of ASGI that a connection offers the application in `scope["state"]`.

They cost less than ASGI's messages: uvicorn checks those header by header and writes them one by
one, and each passes every layer of the application.
"""

from collections.abc import Awaitable, Callable, Iterable, Sequence
from types import TracebackType
from typing import Final, TypedDict

from starlette.types import Scope, Send

from gateway.tensor import Buffer

Headers = Iterable[tuple[bytes, bytes]]
Parts = Sequence[Buffer]

Watch = Callable[[Callable[[], object] | None], None]
"""Registers the function to call when the client disconnects; at once if it has. None ends that."""
SendWhole = Callable[[Headers, Parts], Awaitable[None]]
"""Sends a whole response with status 200; one of the headers is the length of all parts."""
SendPiece = Callable[[bytes], Awaitable[None]]
"""Sends a piece of a body whose head ASGI has sent; returns when there is room for more."""

WATCH: Final = "watch"
SEND_WHOLE: Final = "send_whole"
SEND_PIECE: Final = "send_piece"
HEADER_NAMES: Final = "header_names"


class RequestState(TypedDict, total=False):
    """`scope["state"]` of a request. Connections of ours offer all of it, other servers nothing.

    `header_names` are the names of the request's headers as the client wrote them, in order.
    """

    watch: Watch
    send_whole: SendWhole
    send_piece: SendPiece
    header_names: Sequence[bytes]


NO_STATE: RequestState = {}
"""The state of a request without a connection of ours."""

OK = 200
JOINED_BYTES = 64 * 1024
"""Bodies up to this size are copied into one buffer, which is cheaper than two writes."""


class OnDisconnect:
    """Inside `with`, `callback` is called if the client disconnects; the body must have been read.

    The connection calls it, so that no task has to wait. Without a connection it is never called.
    """

    __slots__ = ("_callback", "_watch")

    def __init__(self, scope: Scope, callback: Callable[[], object]) -> None:
        state: RequestState = scope.get("state", NO_STATE)
        self._watch = state.get(WATCH)
        self._callback = callback

    def __enter__(self) -> None:
        if self._watch is not None:
            self._watch(self._callback)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._watch is not None:
            self._watch(None)


def piece_sender(scope: Scope, send: Send) -> SendPiece:
    """The connection's own `SendPiece`, or one that sends messages of ASGI."""
    state: RequestState = scope.get("state", NO_STATE)
    direct = state.get(SEND_PIECE)
    if direct is not None:
        return direct

    async def send_piece(piece: bytes) -> None:
        await send({"type": "http.response.body", "body": piece, "more_body": True})

    return send_piece


async def send_apart(send: Send, headers: Headers, parts: Parts) -> None:
    """Send a response with status 200 by messages of ASGI: one for the head, one for each part."""
    await send({"type": "http.response.start", "status": OK, "headers": headers})
    for part in parts[:-1]:
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": parts[-1]})
