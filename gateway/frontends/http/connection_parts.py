"""Parts of a connection, as uvicorn's, that allocate nothing before they are needed.

Each event and each deque of the standard library takes 760 bytes, also without a waiter or item.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl


class Signal:
    """An event, as `asyncio.Event`; its list of waiters exists while a task waits."""

    __slots__ = ("_is_set", "_waiters")

    def __init__(self) -> None:
        self._is_set = False
        self._waiters: list[asyncio.Future[None]] | None = None

    def set(self) -> None:
        """Set the event and wake all waiting tasks."""
        self._is_set = True
        waiters, self._waiters = self._waiters, None
        for waiter in waiters or ():
            if not waiter.done():
                waiter.set_result(None)

    def clear(self) -> None:
        """Reset the event."""
        self._is_set = False

    async def wait(self) -> None:
        """Wait until the event is set."""
        if self._is_set:
            return
        waiter = asyncio.get_running_loop().create_future()
        if self._waiters is None:
            self._waiters = []
        self._waiters.append(waiter)
        try:
            await waiter
        finally:
            if waiter.cancelled() and self._waiters is not None:
                self._waiters.remove(waiter)


class Flow(FlowControl):
    """Flow control with a small event, which is only awaited while writing is paused."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.read_paused = False
        self.write_paused = False
        self._is_writable_event = Signal()  # type: ignore[assignment]
        self._is_writable_event.set()


class Pipeline(list[Any]):
    """The requests of a connection that wait for an earlier one; the last of the list is next."""

    __slots__ = ()

    def appendleft(self, item: Any) -> None:
        """Add a request behind all others."""
        self.insert(0, item)
