"""Writing to a connection past ASGI: an answer's head and body at once, and the pieces of a stream.

As two messages of ASGI, which uvicorn looks through header by header and writes apart, head and
body cost a small request as much as its way through the scheduler; and each piece of a stream goes
through every layer of the application.
"""

from collections.abc import Awaitable, Callable, Iterable, Sequence

from starlette.types import Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from gateway.tensor import Buffer

Headers = Iterable[tuple[bytes, bytes]]
Parts = Sequence[Buffer]
SendWhole = Callable[[Headers, Parts], Awaitable[None]]

SEND_WHOLE = "sluice.send_whole"
"""Where a request's state has the `SendWhole` for its answer."""

SEND_PIECE = "sluice.send_piece"
"""Where it has the function that sends a piece of a body whose head has been sent by ASGI."""

OK = 200
JOINED_BYTES = 64 * 1024
"""Up to so many bytes of body a copy is cheaper than a write of two buffers."""


async def send_whole(cycle: RequestResponseCycle, headers: Headers, parts: Parts) -> None:
    """Answer that request with status 200: all that ASGI's two messages do, and as they do it.

    `headers` are ours, and not checked; one of them is the length of the body, which `parts` are.
    """
    if cycle.flow.write_paused and not cycle.disconnected:
        await cycle.flow.drain()
    if cycle.disconnected:
        return
    cycle.response_started = cycle.response_complete = True
    lines = [b"%b: %b\r\n" % header for header in headers]
    close = b"" if cycle.keep_alive else b"connection: close\r\n"
    head = b"".join((STATUS_LINE[OK], *lines, close, b"\r\n"))
    if sum(map(len, parts)) <= JOINED_BYTES:
        cycle.transport.write(b"".join((head, *parts)))
    else:
        cycle.transport.writelines((head, *parts))
    cycle.message_event.set()
    if not cycle.keep_alive:
        cycle.transport.close()
    cycle.on_response()


async def send_apart(send: Send, headers: Headers, parts: Parts) -> None:
    """Answer with status 200 by ASGI's own messages: one for the head, one for each part."""
    await send({"type": "http.response.start", "status": OK, "headers": headers})
    for part in parts[:-1]:
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": parts[-1]})


async def send_piece(cycle: RequestResponseCycle, piece: bytes) -> None:
    """Send a piece of that request's answer, as ASGI's message would; there is room then."""
    if cycle.flow.write_paused and not cycle.disconnected:
        await cycle.flow.drain()
    if cycle.disconnected:
        return
    if cycle.chunked_encoding:
        piece = b"%x\r\n%b\r\n" % (len(piece), piece)
    else:
        cycle.expected_content_length -= len(piece)
    cycle.transport.write(piece)
