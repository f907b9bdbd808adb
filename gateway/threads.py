"""Threads for work that blocks."""

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from gateway.errors import exiting

LARGE_BYTES = 64 * 1024
"""Above this size, work on the bytes would block the event loop for too long."""

MOST_REQUEST_THREADS = 4
"""Decoding threads share the interpreter lock with the event loop; more of them would delay it."""

LISTINGS = 8
"""Listings of repositories at once, for polls and load requests."""

IMPORTING = threading.Lock()
"""Held while a runtime is imported.

Runtimes share packages with import cycles, and concurrent imports of these can return incomplete
modules.
"""

THREADS_SECS, LINE_SECS = 5.0, 1.0
"""Time for threads to end at the end of a process, and for the line about those that do not."""

T = TypeVar("T")

log = logging.getLogger("sluice.server")


class Threads:
    """A bounded pool of threads; its creator closes it.

    Each call is owned by the task that awaits it. A call that is cancelled before it begins never
    runs.
    """

    def __init__(self, name: str, count: int) -> None:
        self._executor = ThreadPoolExecutor(count, name)
        self._is_closed = False

    def start(self, function: Callable[..., T], *args: object) -> asyncio.Future[T]:
        """Start a call in a thread; the caller awaits or cancels the future.

        Raises InferenceError UNAVAILABLE once the threads are closed.
        """
        if self._is_closed:
            raise exiting()
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(self._executor, partial(function, *args))

    async def run(self, function: Callable[..., T], *args: object) -> T:
        """Call a function in a thread and return its result; raises as `start`."""
        call = self.start(function, *args)
        try:
            return await call
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._is_closed and (task is None or not task.cancelling()):
                raise exiting() from None  # `close` has dropped the call
            raise
        finally:
            # The traceback of its error refers to this frame: a cycle with all data of the call.
            del call

    def close(self) -> None:
        """Drop the calls that have not started; threads end after their present call."""
        self._is_closed = True
        self._executor.shutdown(wait=False, cancel_futures=True)


def request_threads() -> Threads:
    """The pool that decodes and encodes requests; loads never use it."""
    return Threads("requests", max(2, min(MOST_REQUEST_THREADS, os.cpu_count() or 1)))


def listing_threads() -> Threads:
    """The pool that lists repositories: a storage that stalls delays no load."""
    return Threads("listings", LISTINGS)


def load_threads(count: int) -> Threads:
    """The pool that reads files of repositories and loads models."""
    return Threads("loads", count)


async def apart(
    function: Callable[..., T], *args: object, discard: Callable[[T], object] | None = None
) -> T:
    """Call a function in a thread of its own, so that a long call delays no other.

    If the caller is cancelled, the call continues, and `discard` gets its result in that thread.
    """
    executor = ThreadPoolExecutor(1, "apart")
    try:
        call = executor.submit(function, *args)
        try:
            return await asyncio.wrap_future(call)
        except asyncio.CancelledError:
            if discard is not None:
                executor.submit(_discard, call, discard)
            raise
        finally:
            del call  # as in `Threads.run`
    finally:
        executor.shutdown(wait=False)


async def closed(close: Callable[[], None]) -> None:
    """Call a function that may block in a thread; here if the program exits: it has none then."""
    try:
        call = asyncio.get_running_loop().run_in_executor(None, close)
    except RuntimeError:
        close()
    else:
        await call


@contextmanager
def last_of_process(secs: float = THREADS_SECS) -> Iterator[None]:
    """The process ends within this time after the block, although threads block.

    The exit of a process waits for its threads, and one whose disk hangs would never end. The exit
    status is 1 if the block raises.
    """
    status = 1
    try:
        yield
        status = 0
    finally:
        timer = threading.Timer(secs, _end_process, [status])
        timer.daemon = True
        timer.start()


def _end_process(status: int) -> None:
    others = (each for each in threading.enumerate() if each is not threading.main_thread())
    about = {"threads": ",".join(sorted(each.name for each in others if not each.daemon))}
    # The log may be on the disk that does not answer.
    line = partial(log.warning, "threads abandoned", extra=about)
    logging_thread = threading.Thread(target=line, daemon=True)
    logging_thread.start()
    logging_thread.join(LINE_SECS)
    os._exit(status)


def _discard(call: Future[T], discard: Callable[[T], object]) -> None:
    if not call.cancelled() and call.exception() is None:
        discard(call.result())
