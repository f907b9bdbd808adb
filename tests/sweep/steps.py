"""An event loop that counts its steps, and calls a function before the step of a given number."""

import asyncio
import selectors
import traceback
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

T = TypeVar("T")

LIMIT_SECS = 10.0
"""The longest wait of a sweep; a longer one is a hang."""

BEAT_SECS = 0.002


class Hang(AssertionError):
    """A wait that did not end within its limit; the message has the stacks of all tasks."""


class SteppedLoop(asyncio.SelectorEventLoop):
    """A step is one callback (of a task, timer, descriptor or thread), or the wait for the next.

    No code of the server runs between two steps, so a call there is an interleaving that the
    server may meet. `trouble` collects exceptions that no task retrieved.
    """

    def __init__(self) -> None:
        super().__init__(_CountedWaits(self._count))
        self.step = 0
        self.trouble: list[str] = []
        self._at = -1
        self._event: Callable[[], None] = _nothing
        self._ready = _CountedCallbacks(self._count)
        self.set_exception_handler(self._note)

    def arm(self, at: int = -1, event: Callable[[], None] | None = None) -> None:
        """Count from 0, and call `event` once, before the step of that number."""
        self.step, self._at, self._event = 0, at, event or _nothing

    def beat(self) -> None:
        """Take steps until the event has been called, even if the server waits for nothing."""
        if self._at >= 0:
            self.call_later(BEAT_SECS, self.beat)

    def disarm(self) -> bool:
        """Forget the event; returns whether it has been called."""
        fired, self._at = self._at < 0, -1
        return fired

    def _count(self) -> bool:
        """Count a step; returns whether the event has been called before it."""
        self.step += 1
        if self.step - 1 != self._at:
            return False
        self._at = -1
        self._event()
        return True

    def _note(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        lines = traceback.format_exception(error) if error is not None else []
        self.trouble.append("".join([context["message"], "\n", *lines]))


class _CountedCallbacks(deque[Any]):
    """The callbacks that are due; asyncio takes each of them with `popleft`."""

    def __init__(self, count: Callable[[], bool]) -> None:
        super().__init__()
        self._count = count

    def popleft(self) -> Any:
        self._count()
        return super().popleft()


class _CountedWaits(selectors.DefaultSelector):
    """The descriptors of the loop; a wait for them is a step, a look at them is none."""

    def __init__(self, count: Callable[[], bool]) -> None:
        super().__init__()
        self._count = count

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if (timeout is None or timeout > 0) and self._count():
            timeout = 0  # the event may have scheduled callbacks
        return super().select(timeout)


async def soon(wait: Awaitable[T], what: str, within: float = LIMIT_SECS) -> T:
    """Await a result that is expected at once; Hang if it does not come."""
    task = asyncio.ensure_future(wait)
    done, _ = await asyncio.wait([task], timeout=within)
    if not done:
        report = stacks()
        task.cancel()
        raise Hang(f"not within {within:g} s: {what}\n{report}")
    return task.result()


async def until(
    condition: Callable[[], bool], what: Callable[[], str], within: float = LIMIT_SECS
) -> None:
    """Wait for a condition that no event announces; Hang says `what` does not hold in time."""
    time = asyncio.get_running_loop().time
    ends_at, pause = time() + within, 0.0
    while not condition():
        if time() > ends_at:
            raise Hang(f"not within {within:g} s: {what()}\n{stacks()}")
        await asyncio.sleep(pause)
        pause = min(0.01, pause + 0.0002)


def stacks() -> str:
    """The places at which tasks of the running loop wait: coroutines, the innermost last."""
    return "\n".join(sorted(_stack(task) for task in asyncio.all_tasks()))


def _stack(task: "asyncio.Task[Any]") -> str:
    found: list[str] = []
    waits: Any = task.get_coro()
    while waits is not None:
        frame = getattr(waits, "cr_frame", None) or getattr(waits, "ag_frame", None)
        if frame is not None:
            found.append(f"{waits.__qualname__} ({frame.f_code.co_filename}:{frame.f_lineno})")
        waits = getattr(waits, "cr_await", None) or getattr(waits, "ag_await", None)
    return "\n    ".join([f"  {task.get_name()}", *found])


def _nothing() -> None:
    """No event."""
