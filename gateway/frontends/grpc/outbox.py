"""The messages of one RPC on their way to its client, who may be slow, or take nothing at all."""

import asyncio
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Hashable,
    Iterator,
    Sequence,
)
from contextlib import asynccontextmanager, contextmanager
from types import TracebackType
from typing import Any, Self

Send = Callable[[Sequence[bytes]], Awaitable[None]]


class Outbox:
    """Sends one batch of messages at a time, in the order in which they are put.

    A timer per RPC, and not one per batch, sees to it that the client takes something.
    """

    def __init__(self, send: Send, timeout_secs: float) -> None:
        self._send = send
        self._timeout_secs = timeout_secs
        self._time = asyncio.get_running_loop().time
        self._turn = asyncio.Lock()
        self._began = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._patience: asyncio.Timeout | None = None

    @property
    def is_busy(self) -> bool:
        """Whether something is being sent."""
        return self._turn.locked()

    async def put(self, messages: Sequence[bytes]) -> None:
        """Send messages after all that were put before; what sending them raises."""
        async with self._turn:
            self._began = self._time()
            if self._timer is None:
                self._look_again(self._timeout_secs)
            try:
                await self._send(messages)
            finally:
                self._began = 0.0

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Inside `async with`, TimeoutError ends the block when one batch takes too long."""
        try:
            async with asyncio.timeout(None) as self._patience:
                yield
        finally:
            self._patience = None
            if self._timer is not None:
                self._timer.cancel()

    def _look_again(self, after_secs: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(after_secs, self._look)

    def _look(self) -> None:
        self._timer = None
        if not self._began or self._patience is None:
            return
        left = self._began + self._timeout_secs - self._time()
        if left > 0:
            self._look_again(left)
        else:
            self._patience.reschedule(0)
            self._patience = None


class OrderPosition:
    """One place in an order; leaving the `with` block ends it, and the next place comes."""

    __slots__ = ("_before", "_key", "_order", "over")

    def __init__(self, order: "StreamOrder", key: Hashable, before: asyncio.Event | None) -> None:
        self.over = asyncio.Event()
        self._order = order
        self._key = key
        self._before = before

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.over.set()
        self._order.forget(self._key, self)

    async def come(self) -> None:
        """Wait until the place before this one is over, and so every earlier one."""
        if self._before is not None:
            await self._before.wait()


class StreamOrder:
    """The places of an RPC: one row for each key, first come, first served."""

    def __init__(self) -> None:
        self._last: dict[Hashable, OrderPosition] = {}

    def turn(self, key: Hashable) -> OrderPosition:
        """The next place in the row of a key."""
        last = self._last.get(key)
        turn = self._last[key] = OrderPosition(self, key, last.over if last is not None else None)
        return turn

    def forget(self, key: Hashable, turn: OrderPosition) -> None:
        """Drop a row whose last place is over."""
        if self._last.get(key) is turn:
            del self._last[key]


MAX_ANSWERS = 1024
MAX_BYTES = 64 * 1024 * 1024
"""What is held, for an answer's turn or for a slow client, before no more requests are read."""


class UnsentResponses:
    """Counts the answers of one RPC that wait to be sent; the models have done with them."""

    def __init__(self) -> None:
        self._answers = 0
        self._bytes = 0
        self._released = asyncio.Event()

    @property
    def full(self) -> bool:
        """No more requests should be read."""
        return self._answers >= MAX_ANSWERS or self._bytes >= MAX_BYTES

    @contextmanager
    def holding(self, messages: Sequence[bytes]) -> Iterator[None]:
        """These wait to be sent, inside `with`; without messages it is an error."""
        count, size = max(len(messages), 1), sum(map(len, messages))
        self._answers += count
        self._bytes += size
        try:
            yield
        finally:
            self._answers -= count
            self._bytes -= size
            self._released.set()

    async def room(self) -> None:
        """Wait until it is not full."""
        while self.full:
            self._released.clear()
            await self._released.wait()


class TaskLimit:
    """A bound on the tasks of one kind. A task holds its permit from its start to its end."""

    def __init__(self, count: int) -> None:
        self._free = asyncio.Semaphore(count)

    async def start(
        self, tasks: asyncio.TaskGroup, work: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        """Start the task once a permit is free. The permit returns however the task ends."""
        await self._free.acquire()
        try:
            task = tasks.create_task(work())
        except BaseException:
            self._free.release()
            raise
        task.add_done_callback(self._return)

    def _return(self, task: "asyncio.Task[None]") -> None:
        self._free.release()
