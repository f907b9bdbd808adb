"""The thread of a tensor instance, and the choice between it and the event loop."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Generic, TypeVar

T = TypeVar("T")
LIMIT_NS = 200_000
"""The longest execution on the event loop."""
TRIALS = 8
TOLERATED = 3
FIRST_PAUSE = 256
LAST_PAUSE = 1 << 20


class OwnThread:
    """A thread for blocking calls, one after the other; its owner calls `stop`.

    A queue and the wake-up of the loop take three quarters of the time of `run_in_executor`. The
    thread does not delay the exit of the process.
    """

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[_Call[Any] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """A future of the function's result or exception; calls are in order.

        A call is dropped if its future is cancelled before it begins; a running call continues,
        and its result is dropped.
        """
        loop = asyncio.get_running_loop()
        call = _Call(function, loop, loop.create_future())
        self._calls.put(call)
        return call.future

    def stop(self) -> None:
        """End the thread after the queued calls; no call may follow."""
        self._calls.put(None)

    def _run(self) -> None:
        while self._made_next():
            pass

    def _made_next(self) -> bool:
        # A separate function, so that no call is referenced during the wait for the next one.
        call = self._calls.get()
        if call is not None and not call.future.cancelled():
            call.make()
        return call is not None


class _Call(Generic[T]):
    """One call and its future; as a context it catches the exception of its block."""

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
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(settle, self.future, outcome)


def _set_result(future: asyncio.Future[Any], result: object) -> None:
    if not future.done():
        future.set_result(result)


def _set_exception(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)


class ShortExecutions:
    """Decides which executions run on the event loop, by numbers of rows.

    A switch to a thread costs about 25 us on an idle machine, and 90 us of processor time per
    request in a server with one client. Numbers of rows form classes of powers of two. A class
    runs on the thread first, and on the loop if its fastest trial was short. It returns to the
    thread if executions on the loop are longer, immediately if one takes five times the limit; each
    time it then stays on the thread for twice as many executions.
    """

    def __init__(self) -> None:
        self._classes: dict[int, _Class] = {}

    def on_loop(self, rows: int) -> bool:
        """Whether an execution of that many rows runs on the loop."""
        known = self._classes.get(rows.bit_length())
        return known is not None and known.on_loop

    def ran_on_thread(self, rows: int, wall_ns: int) -> None:
        """Record the wall-clock time of an execution on the thread."""
        self._classes.setdefault(rows.bit_length(), _Class()).tried(wall_ns)

    def ran_on_loop(self, rows: int, processor_ns: int) -> None:
        """Record the processor time of an execution on the loop."""
        self._classes[rows.bit_length()].held_up(processor_ns)


@dataclass(slots=True)
class _Class:
    on_loop: bool = False
    fastest_ns: int = 0
    trials: int = 0
    slow: int = 0
    pause: int = 0
    next_pause: int = FIRST_PAUSE

    def tried(self, wall_ns: int) -> None:
        if self.pause:
            self.pause -= 1
            return
        self.fastest_ns = min(self.fastest_ns, wall_ns) if self.trials else wall_ns
        self.trials += 1
        if self.trials < TRIALS:
            return
        self.trials = 0
        self.on_loop = self.fastest_ns <= LIMIT_NS
        if not self.on_loop:
            self._rest()

    def held_up(self, processor_ns: int) -> None:
        self.slow = self.slow + 1 if processor_ns > LIMIT_NS else max(0, self.slow - 1)
        if self.slow == TOLERATED or processor_ns > 5 * LIMIT_NS:
            self.on_loop = False
            self.slow = 0
            self._rest()

    def _rest(self) -> None:
        self.pause = self.next_pause
        self.next_pause = min(2 * self.next_pause, LAST_PAUSE)
