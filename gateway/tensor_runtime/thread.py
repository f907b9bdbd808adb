"""Blocking calls one after the other on one thread, awaited by an event loop."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class OwnThread:
    """One thread and its calls; whoever makes it must end it with `stop`.

    The way there and back is a queue and the loop's own wake-up, which takes three quarters of
    the time of `run_in_executor`. It does not hold up the end of the process.
    """

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[_Call[Any] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """What the function returns or raises, after all calls before it.

        A call whose future is cancelled before it begins is never made; one under way goes on,
        and nobody learns how it ends.
        """
        loop = asyncio.get_running_loop()
        call = _Call(function, loop, loop.create_future())
        self._calls.put(call)
        return call.future

    def stop(self) -> None:
        """Let the thread end after the calls it has; none may follow."""
        self._calls.put(None)

    def _run(self) -> None:
        while self._made_next():
            pass

    def _made_next(self) -> bool:
        # A function of its own, so that no call is held on to while waiting for the next one.
        call = self._calls.get()
        if call is not None and not call.future.cancelled():
            call.make()
        return call is not None


class _Call(Generic[T]):
    """One call and the future of its outcome; as a context it takes what its block raises."""

    __slots__ = ("_function", "_loop", "future")

    def __init__(
        self,
        function: Callable[[], T],
        loop: asyncio.AbstractEventLoop,
        future: asyncio.Future[T],
    ) -> None:
        self._function = function
        self._loop = loop
        self.future = future

    def make(self) -> None:
        with self:
            self._deliver(_set_result, self._function())

    def __enter__(self) -> None:
        """The block is the call."""

    def __exit__(
        self, kind: object, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if error is not None:
            self._deliver(_set_exception, error)
        return True

    def _deliver(self, settle: Callable[[asyncio.Future[Any], Any], None], outcome: object) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(settle, self.future, outcome)


def _set_result(future: asyncio.Future[Any], result: object) -> None:
    if not future.done():
        future.set_result(result)


def _set_exception(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
