"""Fast events, queues and shortcuts for httpunk, which make small RPCs cheap.

httpunk creates three events and a queue per RPC, most of which have no waiter. asyncio's allow any
number of waiters, and cost more than the rest of httpunk for a small RPC. The shortcuts use private
names of httpunk: its release is pinned, and tests fail if they change.
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
    """An event with at most one waiting task and one listener."""

    __slots__ = ("_listener", "_loop", "_set", "_waiter")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._set = False
        self._waiter: asyncio.Future[None] | None = None
        self._listener: Callable[[], object] | None = None

    def is_set(self) -> bool:
        """Whether the event is set."""
        return self._set

    def set(self) -> None:
        """Set the event, wake the waiter and call the listener."""
        if not self._set:
            self._set = True
            _wake(self._waiter)
            if self._listener is not None:
                self._listener()

    def clear(self) -> None:
        """Reset the event."""
        self._set = False

    async def wait(self) -> None:
        """Wait until the event is set."""
        while not self._set:
            self._waiter = self._loop.create_future()
            await self._waiter

    def listen(self, listener: Callable[[], object]) -> None:
        """Call a function when the event is set; immediately if it is."""
        self._listener = listener
        if self._set:
            listener()


class HyperQueue:
    """An unbounded queue with one reader; both ends in one object, as httpunk requires."""

    __slots__ = ("_loop", "_waiter", "items")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.items: deque[Any] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def send(self, item: Any) -> None:
        """Append an item."""
        self.items.append(item)
        _wake(self._waiter)

    async def receive(self) -> Any:
        """Remove and return the first item; wait for one."""
        while not self.items:
            self._waiter = self._loop.create_future()
            await self._waiter
        return self.items.popleft()


class HyperBackend(AsyncioBackend):
    """httpunk's backend for asyncio, with these events and queues."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.event: Any = partial(HyperEvent, loop)
        self._loop = loop

    def queue(self) -> tuple[HyperQueue, HyperQueue]:
        mailbox = HyperQueue(self._loop)
        return mailbox, mailbox


def is_whole(request: Any) -> bool:
    """Whether the whole body of a request has been received, in one piece."""
    items = request._stream.body_recv.items
    return len(items) == 2 and items[1] is None and type(items[0]) is tuple


def whole_body(request: Any) -> bytes | None:
    """The body of a request, if `is_whole`; else None."""
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
    """Send the body and the trailers of an answer; waits only for flow control."""
    connection, stream = answer._conn, answer._stream
    for piece in body:
        sent = connection._try_send_data(stream, piece, 0, False)
        if sent is not None:
            await connection._send_data(stream, piece, False, sent)
    answer._done = True
    connection._send_trailers(stream, trailers)


def is_reset(request: Any) -> bool:
    """Whether the client has reset a request."""
    found: bool = request._stream.reset_evt.is_set()
    return found


def on_reset(request: Any, reset: Callable[[], object]) -> None:
    """Call a function when the client resets a request."""
    request._stream.reset_evt.listen(reset)


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
