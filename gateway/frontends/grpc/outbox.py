"""Outgoing messages of one ModelStreamInfer: sending, order, limits of unsent responses."""

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

MAX_ANSWERS = 1024
MAX_BYTES = 64 * 1024 * 1024
"""Limits of unsent responses; at either one, reading requests blocks."""


class Outbox:
    """Sends one batch of messages at a time, in the order of the calls of `put`.

    One timer per RPC, instead of one per batch, enforces the send timeout.
    """

    def __init__(self, send: Send, timeout_secs: float) -> None:
        self._send = send
        self._timeout_secs = timeout_secs
        self._time = asyncio.get_running_loop().time
        self._sending = asyncio.Lock()
        self._started = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._timeout: asyncio.Timeout | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a batch is being sent."""
        return self._sending.locked()

    async def put(self, messages: Sequence[bytes]) -> None:
        """Send messages after all earlier ones; raises the errors of sending."""
        async with self._sending:
            self._started = self._time()
            if self._timer is None:
                self._check_in(self._timeout_secs)
            try:
                await self._send(messages)
            finally:
                self._started = 0.0

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Inside `async with`, sending a batch for longer than the timeout raises TimeoutError."""
        try:
            async with asyncio.timeout(None) as self._timeout:
                yield
        finally:
            self._timeout = None
            if self._timer is not None:
                self._timer.cancel()

    def _check_in(self, after_secs: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(after_secs, self._check)

    def _check(self) -> None:
        self._timer = None
        if not self._started or self._timeout is None:
            return
        left = self._started + self._timeout_secs - self._time()
        if left > 0:
            self._check_in(left)
        else:
            self._timeout.reschedule(0)
            self._timeout = None


class OrderPosition:
    """One position in an order; exiting its `with` block releases the next position."""

    __slots__ = ("_before", "_key", "_order", "released")

    def __init__(self, order: "StreamOrder", key: Hashable, before: asyncio.Event | None) -> None:
        self.released = asyncio.Event()
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
        self.released.set()
        self._order.forget(self._key, self)

    async def reached(self) -> None:
        """Wait until all earlier positions are released."""
        if self._before is not None:
            await self._before.wait()


class StreamOrder:
    """FIFO order of the requests of an RPC, separate for each key."""

    def __init__(self) -> None:
        self._last: dict[Hashable, OrderPosition] = {}

    def position(self, key: Hashable) -> OrderPosition:
        """The next position in the order of a key."""
        last = self._last.get(key)
        before = last.released if last is not None else None
        position = self._last[key] = OrderPosition(self, key, before)
        return position

    def forget(self, key: Hashable, position: OrderPosition) -> None:
        """Remove the entry of a key whose last position is released."""
        if self._last.get(key) is position:
            del self._last[key]


class UnsentResponses:
    """Number and bytes of the finished responses of one RPC that are not sent."""

    def __init__(self) -> None:
        self._answers = 0
        self._bytes = 0
        self._released = asyncio.Event()

    @property
    def full(self) -> bool:
        """Whether a limit is reached."""
        return self._answers >= MAX_ANSWERS or self._bytes >= MAX_BYTES

    @contextmanager
    def counted(self, messages: Sequence[bytes]) -> Iterator[None]:
        """Count messages as unsent inside `with`; an empty sequence (an error) counts as one."""
        count, size = max(len(messages), 1), sum(map(len, messages))
        self._answers += count
        self._bytes += size
        try:
            yield
        finally:
            self._answers -= count
            self._bytes -= size
            self._released.set()

    async def wait_for_room(self) -> None:
        """Wait until no limit is reached."""
        while self.full:
            self._released.clear()
            await self._released.wait()


class TaskLimit:
    """Limit of the running tasks of one kind."""

    def __init__(self, count: int) -> None:
        self._free = asyncio.Semaphore(count)

    async def start(
        self, tasks: asyncio.TaskGroup, work: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        """Wait until the limit allows one more task, and start it."""
        await self._free.acquire()
        try:
            task = tasks.create_task(work())
        except BaseException:
            self._free.release()
            raise
        task.add_done_callback(self._release)

    def _release(self, task: "asyncio.Task[None]") -> None:
        self._free.release()
