"""How much of a stream's answers is ready and not sent yet, and is there room for more?"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

MAX_ANSWERS = 1024
MAX_BYTES = 64 * 1024 * 1024
"""What is held, for an answer's turn or for a slow client, before no more requests are read."""


class HeldAnswers:
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


class Permits:
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
