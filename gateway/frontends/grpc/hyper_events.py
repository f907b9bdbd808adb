"""What makes httpunk's driver cheap for small RPCs: lean events and queues, and shorter ways.

Each RPC has three events and a queue of its own, most of which nobody ever waits on. Those of
asyncio are made for any number of waiters and cost more than all else that httpunk does for a small
RPC. The shorter ways use what httpunk does not promise to keep: its release is pinned, and tests
would notice.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from httpunk import HeaderMap
from httpunk._backend.asyncio import AsyncioBackend

HTTP_OK = 200


class HyperEvent:
    """An event that is set at any time, and waited for by one task."""

    __slots__ = ("_listener", "_loop", "_set", "_waiter")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._set = False
        self._waiter: asyncio.Future[None] | None = None
        self._listener: Callable[[], object] | None = None

    def is_set(self) -> bool:
        """Whether it has happened."""
        return self._set

    def set(self) -> None:
        """It happens."""
        if not self._set:
            self._set = True
            _wake(self._waiter)
            if self._listener is not None:
                self._listener()

    def clear(self) -> None:
        """It may happen again."""
        self._set = False

    async def wait(self) -> None:
        """Wait until it happens."""
        while not self._set:
            self._waiter = self._loop.create_future()
            await self._waiter

    def listen(self, listener: Callable[[], object]) -> None:
        """Have a function called when it happens; at once if it has."""
        self._listener = listener
        if self._set:
            listener()


class HyperQueue:
    """A queue without a bound of its own, read by one task; both ends in one, as httpunk asks."""

    __slots__ = ("_loop", "_waiter", "items")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.items: deque[Any] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def send(self, item: Any) -> None:
        """Put something in."""
        self.items.append(item)
        _wake(self._waiter)

    async def receive(self) -> Any:
        """Take the next one out."""
        while not self.items:
            self._waiter = self._loop.create_future()
            await self._waiter
        return self.items.popleft()


class HyperBackend(AsyncioBackend):
    """asyncio on one loop, with these instead of its own."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.event: Any = partial(HyperEvent, loop)
        self._loop = loop

    def queue(self) -> tuple[HyperQueue, HyperQueue]:
        mailbox = HyperQueue(self._loop)
        return mailbox, mailbox


def is_whole(request: Any) -> bool:
    """Whether a request is there with all of its body, in one piece."""
    items = request._stream.body_recv.items
    return len(items) == 2 and items[1] is None and type(items[0]) is tuple


def whole_body(request: Any) -> bytes | None:
    """The body of a request that is there already, in one piece; None for any other."""
    if not is_whole(request):
        return None
    chunk, is_budgeted = request._stream.body_recv.items.popleft()
    connection, stream_id, size = request._conn, request._stream.id, len(chunk)
    if is_budgeted:
        connection.release_data_frame(stream_id, size)
    connection._after(connection.release_capacity(stream_id, size))
    found: bytes = chunk
    return found


async def send_rest(answer: Any, body: Sequence[bytes], trailers: HeaderMap) -> None:
    """Send what follows the head of an answer; as the library, but waiting only where it must."""
    connection, stream = answer._conn, answer._stream
    for piece in body:
        sent = connection._try_send_data(stream, piece, 0, False)
        if sent is not None:
            await connection._send_data(stream, piece, False, sent)
    answer._done = True
    connection._send_trailers(stream, trailers)


def is_reset(request: Any) -> bool:
    """Whether its client has abandoned a request already."""
    found: bool = request._stream.reset_evt.is_set()
    return found


def on_reset(request: Any, left: Callable[[], object]) -> None:
    """Have a function called when a request's client abandons it."""
    request._stream.reset_evt.listen(left)


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
