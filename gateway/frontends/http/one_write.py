"""An answer's head and body, sent in one write.

As two messages of ASGI, which uvicorn looks through header by header and writes apart, they cost a
small request as much as its way through the scheduler.
"""

from collections.abc import Awaitable, Callable, Iterable

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

Headers = Iterable[tuple[bytes, bytes]]
SendWhole = Callable[[Headers, bytes], Awaitable[None]]

SEND_WHOLE = "sluice.send_whole"
"""Where a request's state has the `SendWhole` for its answer."""

OK = 200
JOINED_BYTES = 64 * 1024
"""Up to so many bytes of body a copy is cheaper than a write of two buffers."""


async def send_whole(cycle: RequestResponseCycle, headers: Headers, body: bytes) -> None:
    """Answer that request with status 200: all that ASGI's two messages do, and as they do it.

    `headers` are ours, and not checked; one of them is the body's length.
    """
    if cycle.flow.write_paused and not cycle.disconnected:
        await cycle.flow.drain()
    if cycle.disconnected:
        return
    cycle.response_started = cycle.response_complete = True
    lines = [b"%b: %b\r\n" % header for header in headers]
    close = b"" if cycle.keep_alive else b"connection: close\r\n"
    head = b"".join((STATUS_LINE[OK], *lines, close, b"\r\n"))
    if len(body) <= JOINED_BYTES:
        cycle.transport.write(head + body)
    else:
        cycle.transport.writelines((head, body))
    cycle.message_event.set()
    if not cycle.keep_alive:
        cycle.transport.close()
    cycle.on_response()
