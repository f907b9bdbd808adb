"""Reading a request's body within its limits, and noticing that its client has gone."""

import asyncio
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import TypeVar

from starlette.requests import Request
from starlette.types import Receive, Scope

from gateway.errors import Code, InferenceError
from gateway.tensor import Buffer
from gateway.threads import LARGE_BYTES, Threads

T = TypeVar("T")

MAX_CHUNKS = 65536
"""Non-empty chunks of one body, as Triton limits them."""

WATCH = "watch"
"""Where a request's state has the function that is told whom to tell when the client has gone."""


async def read_body(request: Request, limit: int) -> bytes | bytearray:
    """The whole body, not copied if it is large.

    INVALID_ARG beyond `limit` bytes or MAX_CHUNKS chunks; CANCELLED if the client disconnects.
    """
    announced = request.headers.get("content-length", "")
    if announced.isdigit():
        check_json_size(limit, int(announced))
    body = await collect(request.receive, partial(check_json_size, limit))
    return body if len(body) > LARGE_BYTES else bytes(body)


async def decoded(threads: Threads, scope: Scope, decode: Callable[[Buffer], T], body: Buffer) -> T:
    """The result of `decode` for a body; one of more than LARGE_BYTES is decoded in a thread.

    CANCELLED if the client disconnects meanwhile.
    """
    if len(body) <= LARGE_BYTES:
        return decode(body)
    return await off_loop(threads, scope, decode, body)


async def off_loop(
    threads: Threads, scope: Scope, function: Callable[..., T], *arguments: object
) -> T:
    """Call a function of a request's body in a thread.

    CANCELLED if the client disconnects meanwhile; a call that has not begun is dropped then.
    """
    work = threads.start(function, *arguments)
    try:
        with OnDisconnect(scope, work.cancel):
            await asyncio.wait([work])
    finally:
        work.cancel()
    if work.cancelled():
        raise InferenceError(Code.CANCELLED, "the client disconnected while its body was decoded")
    return work.result()


async def collect(
    receive: Receive, check: Callable[[int], None], max_chunks: int | None = MAX_CHUNKS
) -> bytes | bytearray:
    """The whole body, held once; `check` raises for the size of a part that is too much already.

    INVALID_ARG beyond `max_chunks` chunks, CANCELLED if the client leaves before its end.
    """
    message = await receive()
    body = message.get("body", b"")
    if message["type"] == "http.request" and not message.get("more_body", False):
        check(len(body))
        return body  # type: ignore[no-any-return] # ASGI's messages are untyped
    found, chunks = bytearray(), 0
    while message["type"] == "http.request":
        body = message.get("body", b"")
        found += body
        chunks += bool(body)
        check(len(found))
        if max_chunks is not None and chunks > max_chunks:
            raise _too_many_chunks(max_chunks)
        if not message.get("more_body", False):
            return found
        message = await receive()
    raise InferenceError(Code.CANCELLED, "the client left before its request was whole")


def check_json_size(limit: int, size: int) -> None:
    """Raise INVALID_ARG if so many bytes of JSON are too much."""
    if size > limit:
        raise InferenceError(
            Code.INVALID_ARG,
            f"request JSON size of {size} bytes exceeds the maximum allowed input size of {limit} "
            "bytes. Use --http-max-input-size to increase the limit.",
        )


def _too_many_chunks(limit: int) -> InferenceError:
    return InferenceError(
        Code.INVALID_ARG,
        f"Chunked request body exceeds maximum of {limit} non-empty chunks. Send fewer or larger "
        "HTTP chunks.",
    )


class OnDisconnect:
    """Inside `with`, `leave` is called if the client goes away; the body must have been read.

    The connection itself tells (`WATCH` in the request's state), so that no task has to wait for
    it; where a request has come without a connection, nobody can leave.
    """

    __slots__ = ("_leave", "_watch")

    def __init__(self, scope: Scope, leave: Callable[[], object]) -> None:
        self._watch: Callable[[Callable[[], object] | None], None] | None = scope.get(
            "state", {}
        ).get(WATCH)
        self._leave = leave

    def __enter__(self) -> None:
        if self._watch is not None:
            self._watch(self._leave)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._watch is not None:
            self._watch(None)
