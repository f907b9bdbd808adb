"""Threads for work that would block the event loop."""

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from gateway.errors import Code, InferenceError

LARGE_BYTES = 64 * 1024
"""Work on more bytes than that takes longer than the event loop may be blocked."""

MOST_REQUEST_THREADS = 4
"""Threads that decode share one interpreter lock with the event loop: more would delay it."""

T = TypeVar("T")


class Threads:
    """A bounded number of threads; the object that made them closes them.

    Each call is owned by the task that awaits it. A cancelled call that has not begun never runs.
    """

    def __init__(self, name: str, count: int) -> None:
        self._executor = ThreadPoolExecutor(count, name)
        self._is_closed = False

    def start(self, function: Callable[..., T], *args: object) -> asyncio.Future[T]:
        """Begin a call in a thread; the caller awaits or cancels the future.

        Raises InferenceError UNAVAILABLE once the threads are closed.
        """
        if self._is_closed:
            raise _closed()
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(self._executor, partial(function, *args))

    async def run(self, function: Callable[..., T], *args: object) -> T:
        """Call a function in a thread, and return its result; raises as `start`."""
        call = self.start(function, *args)
        try:
            return await call
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._is_closed and (task is None or not task.cancelling()):
                raise _closed() from None  # `close` has dropped the call
            raise

    def close(self) -> None:
        """Drop the calls that have not begun; threads end after their present call."""
        self._is_closed = True
        self._executor.shutdown(wait=False, cancel_futures=True)


def _closed() -> InferenceError:
    return InferenceError(Code.UNAVAILABLE, "Server exiting")


def request_threads() -> Threads:
    """The threads that decode and encode requests; model loads never take them."""
    return Threads("requests", max(2, min(MOST_REQUEST_THREADS, os.cpu_count() or 1)))


def load_threads(count: int) -> Threads:
    """The threads that read repositories and load models."""
    return Threads("loads", count)


async def apart(function: Callable[..., T], *args: object) -> T:
    """Call a function that may block for long in a thread of its own: it delays no other call."""
    executor = ThreadPoolExecutor(1, "apart")
    try:
        call = partial(function, *args)
        return await asyncio.get_running_loop().run_in_executor(executor, call)
    finally:
        executor.shutdown(wait=False)
