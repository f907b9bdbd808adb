"""The event loop: a watchdog of its blocks, and busy polling between requests."""

import asyncio
import logging
import sys
import threading
import time
from types import FrameType, TracebackType
from typing import Self

from gateway import process_limits
from gateway.process_limits import processors

log = logging.getLogger("sluice.loop")

BLOCKED_SECS = 0.1
"""Time without a callback after which a loop is blocked."""
BUSY_SECS, IDLE_SECS = 0.05, 0.25
"""Seconds between two checks, while the process computes and while it is idle."""
BUSY_SHARE = 0.05
"""Least CPU time per time of a process that computes."""
JOIN_SECS = 5.0
DEEPEST = 30
"""Number of logged frames of a stack, from the innermost."""


class LoopWatch:
    """Watches the running event loop inside `with`, by a thread that posts a callback periodically.

    Requests cost nothing. A late callback is logged once, when it runs.
    """

    def __init__(self, blocked_secs: float = BLOCKED_SECS) -> None:
        self._blocked_secs = blocked_secs
        self._ended = threading.Event()
        self._answered = threading.Event()
        self._answered_at = 0.0

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._watched = threading.get_ident()
        self._thread = threading.Thread(target=self._watch, name="loop-watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._answered.set()
        self._thread.join(JOIN_SECS)

    def _watch(self) -> None:
        pause, used = BUSY_SECS, time.process_time()
        while not self._ended.wait(pause):
            self._ask()
            before, used = used, time.process_time()
            pause = BUSY_SECS if used - before > BUSY_SHARE * pause else IDLE_SECS

    def _ask(self) -> None:
        self._answered.clear()
        if self._ended.is_set():
            return
        asked_at = time.monotonic()
        try:
            self._loop.call_soon_threadsafe(self._answer)
        except RuntimeError:
            return  # the loop is closed
        if self._answered.wait(self._blocked_secs):
            self._log(self._answered_at - asked_at, "")
            return
        stack = _one_word(sys._current_frames().get(self._watched))  # noqa: SLF001 - the only way
        self._answered.wait()
        self._log(self._answered_at - asked_at, stack)

    def _answer(self) -> None:
        self._answered_at = time.monotonic()
        self._answered.set()

    def _log(self, secs: float, stack: str) -> None:
        if secs >= self._blocked_secs and not self._ended.is_set():
            log.warning("event loop blocked", extra={"ms": round(secs * 1000), "stack": stack})


def _one_word(frame: FrameType | None) -> str:
    """A stack as one word, the innermost function first."""

    found: list[str] = []
    while frame is not None and len(found) < DEEPEST:
        code = frame.f_code
        found.append(f"{code.co_filename.rpartition('/')[2]}:{frame.f_lineno}:{code.co_name}")
        frame = frame.f_back
    return "<".join(found)


def busy_poll(span_us: int) -> "BusyPoll | None":
    """Busy polling for that span; None if it is 0, or on a machine or cgroup with one processor.

    Clients need the only processor.
    """
    return BusyPoll(span_us) if span_us and _has_several_processors() else None


class BusyPoll:
    """Counts requests in flight; may keep the idle event loop from sleeping.

    The system wakes a sleeping process 30 to 60 us late on many machines, mostly virtual ones, with
    cold caches. Together that costs as much as a small inference. The loop stays awake for at most
    `span_us` after a request that came within `span_us` of the request before it, and never while a
    request is in flight.
    """

    def __init__(self, span_us: int) -> None:
        self._span_ns = 1000 * span_us
        self._in_flight = 0
        self._free_since_ns = 0
        self._came_soon = False
        self._awake = False

    def began(self) -> None:
        """A request has begun."""
        if not self._in_flight:
            self._came_soon = time.monotonic_ns() - self._free_since_ns < self._span_ns
        self._in_flight += 1

    def ended(self) -> None:
        """A request has ended. Called on the event loop."""
        self._in_flight -= 1
        if self._in_flight:
            return
        self._free_since_ns = time.monotonic_ns()
        if self._came_soon and not self._awake:
            self._awake = True
            asyncio.get_running_loop().call_soon(self._stay)

    def _stay(self) -> None:
        spent_ns = time.monotonic_ns() - self._free_since_ns
        self._awake = not self._in_flight and spent_ns < self._span_ns
        if self._awake:
            asyncio.get_running_loop().call_soon(self._stay)


def _has_several_processors() -> bool:
    quota = process_limits.quota()
    return processors() > 1 and (quota is None or quota > 1)
