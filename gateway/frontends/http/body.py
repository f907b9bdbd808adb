"""Reading a request's body within its limits, and noticing that its client has gone."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from starlette.requests import ClientDisconnect, Request

from gateway.errors import Code, InferenceError

MAX_CHUNKS = 65536
"""Non-empty chunks of one body, as Triton limits them."""


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body; InferenceError INVALID_ARG beyond `limit` bytes or MAX_CHUNKS chunks.

    CANCELLED if the client leaves before its end.
    """
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > limit:
        raise _too_large(int(announced), limit)
    try:
        return await _joined(request, limit)
    except ClientDisconnect:
        raise InferenceError(
            Code.CANCELLED, "the client left before its request was whole"
        ) from None


async def _joined(request: Request, limit: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        if not chunk:
            continue
        chunks.append(chunk)
        size += len(chunk)
        if size > limit:
            raise _too_large(size, limit)
        if len(chunks) > MAX_CHUNKS:
            raise InferenceError(
                Code.INVALID_ARG,
                f"Chunked request body exceeds maximum of {MAX_CHUNKS} non-empty chunks. Send "
                "fewer or larger HTTP chunks.",
            )
    return b"".join(chunks)


def _too_large(size: int, limit: int) -> InferenceError:
    return InferenceError(
        Code.INVALID_ARG,
        f"request JSON size of {size} bytes exceeds the maximum allowed input size of {limit} "
        "bytes. Use --http-max-input-size to increase the limit.",
    )


@asynccontextmanager
async def on_disconnect(request: Request, leave: Callable[[], None]) -> AsyncIterator[None]:
    """Call `leave` if the client goes away inside the block; the body must have been read."""
    watch = asyncio.ensure_future(request.receive())
    watch.add_done_callback(lambda done: None if done.cancelled() else leave())
    try:
        yield
    finally:
        watch.cancel()
        await asyncio.wait([watch])
