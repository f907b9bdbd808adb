"""The event loop: a watchdog of its blocks, busy polling between requests, batches of writes."""

import asyncio
import inspect
import logging
import sys
import threading
import time
from types import CodeType, FrameType, TracebackType
from typing import NamedTuple, Self

from gateway import process_limits
from gateway.process_limits import processors

log = logging.getLogger("sluice.loop")

BLOCKED_SECS = 0.1
"""A loop that runs a timer this late is blocked."""
TIMER_SECS = 0.05
"""Time between two timers: a block that exceeds the limit by this much is always found."""
IDLE_LOOK_SECS = 0.2
"""The same in an idle process, without timers."""
IDLE_SHARE = 0.01
"""A process is idle if it uses less than this share of a processor,"""
IDLE_AFTER_SECS = 1.0
"""and its loop has not been blocked, for this long."""
LOG_SECS = 10.0
"""Least time between two lines of the log: blocks within it are counted in the next line."""
JOIN_SECS = 5.0
DEEPEST = 30
"""Number of logged frames of a stack, from the innermost."""


class LoopReading(NamedTuple):
    """The blocks of an event loop since the start: `blocked_secs` are their time together.

    `longest_secs` is the longest delay of a timer, also of one that is no block.
    """

    blocks: int = 0
    blocked_secs: float = 0.0
    longest_secs: float = 0.0

    def with_delay(self, secs: float, *, is_block: bool) -> "LoopReading":
        """This reading and one more delay of a timer."""
        return self.with_other(LoopReading(is_block, secs if is_block else 0.0, secs))

    def with_other(self, other: "LoopReading") -> "LoopReading":
        """The blocks of both loops, and the longer delay."""
        blocked_secs = self.blocked_secs + other.blocked_secs
        longest_secs = max(self.longest_secs, other.longest_secs)
        return LoopReading(self.blocks + other.blocks, blocked_secs, longest_secs)


class LoopWatch:
    """Watches the running event loop inside `with`, by the lateness of timers.

    A thread reads the stack of a blocked loop. The thread sleeps until the next timer would be late
    and posts nothing, since each of its steps costs the loop its interpreter lock.

    The loop of an idle process has no timer: 20 wake-ups a second cost 0.3 % of a processor. The
    thread looks at it more rarely, and starts the timers if it is late itself, if the loop runs a
    callback, or if the process is no longer idle.

    A late timer is logged when it runs, and at most one line is logged in `log_secs`: the import of
    a runtime blocks the loop ten times. A line has the count of blocks since the line before it,
    and the milliseconds and the stack of the longest.

    `reading` has them all.
    """

    def __init__(self, blocked_secs: float = BLOCKED_SECS, log_secs: float = LOG_SECS) -> None:
        self._blocked_secs = blocked_secs
        self._log_secs = log_secs
        self._next_line_at = 0.0
        self._count = 0
        self._longest = (0.0, "")
        self.reading = LoopReading()
        self._ended = threading.Event()
        self._stack_at_due = (0.0, "")
        self._due: float | None = None

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._watched = threading.get_ident()
        self._waits_in = _runner_of_loop(sys._getframe(1))  # noqa: SLF001 - the only way
        self._idle_at = time.monotonic() + IDLE_AFTER_SECS
        self._expect()
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
        self._thread.join(JOIN_SECS)
        self._timer.cancel()
        if self._count:
            self._log()

    def _expect(self) -> None:
        """Set the next timer."""
        self._spent = time.process_time()
        self._due = time.monotonic() + TIMER_SECS
        self._timer: asyncio.Handle = self._loop.call_later(TIMER_SECS, self._ring)

    def _ring(self) -> None:
        now, expected = time.monotonic(), self._due
        if expected is None or self._ended.is_set():
            return
        secs = now - expected
        is_block = secs >= self._blocked_secs
        self.reading = self.reading.with_delay(secs, is_block=is_block)
        if is_block:
            due, stack = self._stack_at_due
            self._count += 1
            self._longest = max(self._longest, (secs, stack if due == expected else ""))
        if self._count and now >= self._next_line_at:
            self._next_line_at = now + self._log_secs
            self._log()
        if is_block or _is_busy(self._spent, TIMER_SECS):
            self._idle_at = now + IDLE_AFTER_SECS
        if now < self._idle_at:
            self._expect()
        else:
            self._due = None

    def _log(self) -> None:
        """Log the blocks since the last line."""
        secs, stack = self._longest
        fields = {"ms": round(secs * 1000), "count": self._count, "stack": stack}
        log.warning("event loop blocked", extra=fields)
        self._count, self._longest = 0, (0.0, "")

    def _watch(self) -> None:
        while not self._ended.is_set():
            due = self._due
            if due is None:
                self._look()
                continue
            left = due + self._blocked_secs - time.monotonic()
            if left <= 0 and self._stack_at_due[0] != due:
                self._stack_at_due = due, _stack_of(self._watched)
            self._ended.wait(left if left > 0 else TIMER_SECS)

    def _look(self) -> None:
        """Look at the loop of an idle process once; start the timers if they are needed."""
        due, spent = time.monotonic() + IDLE_LOOK_SECS, time.process_time()
        if self._ended.wait(IDLE_LOOK_SECS):
            return
        now = time.monotonic()
        if (
            now - due >= self._blocked_secs
            or (self._count and now >= self._next_line_at)
            or _is_busy(spent, IDLE_LOOK_SECS)
            or self._runs_a_callback()
        ):
            self._idle_at, self._due = now + IDLE_AFTER_SECS, due
            self._timer = self._loop.call_soon_threadsafe(self._ring)

    def _runs_a_callback(self) -> bool:
        frame = sys._current_frames().get(self._watched)  # noqa: SLF001 - the only way
        return frame is not None and frame.f_code is not self._waits_in


def _is_busy(spent: float, secs: float) -> bool:
    """Whether the process, which had used `spent` that long ago, has not been idle since."""
    return time.process_time() - spent >= secs * IDLE_SHARE


def _runner_of_loop(frame: FrameType | None) -> CodeType | None:
    """The function that runs the loop: the first of the stack that is no coroutine.

    It is the innermost function while a loop written in C waits for events. One written in Python
    waits deeper, so that each look starts the timers.
    """
    while frame is not None and frame.f_code.co_flags & inspect.CO_COROUTINE:
        frame = frame.f_back
    return None if frame is None else frame.f_code


def _stack_of(thread: int) -> str:
    """The stack of a thread as one word, the innermost function first.

    No frame outlives the call: a frame keeps its variables alive, such as the body of a request.
    """
    frame: FrameType | None = sys._current_frames().get(thread)  # noqa: SLF001 - the only way
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

    def ended(self, *, polls: bool = True) -> None:
        """A request has ended. Called on the event loop, which polls only if `polls`."""
        self._in_flight -= 1
        if self._in_flight:
            return
        self._free_since_ns = time.monotonic_ns()
        if polls and self._came_soon and not self._awake:
            self._awake = True
            asyncio.get_running_loop().call_soon(self._stay)

    def _stay(self) -> None:
        spent_ns = time.monotonic_ns() - self._free_since_ns
        self._awake = not self._in_flight and spent_ns < self._span_ns
        if self._awake:
            asyncio.get_running_loop().call_soon(self._stay)


class WriteBatch(threading.local):
    """Inside `with`, writes of connections are collected; its end makes them one after another.

    Each write wakes a client, which may take the processor at once, and its caches. A step of an
    engine makes one token for each of many streams: with 64 of them a token takes a fifth less
    processor time than with a write behind each. The code inside never waits. A thread has one
    loop, and so one batch: of nested ones the outermost writes.

    A connection adds its transport and its bytes to `collected`, which is None outside of a batch:
    then it writes at once. It does so without a call, since each token passes here.
    """

    def __init__(self) -> None:
        self.collected: list[tuple[asyncio.WriteTransport, bytes]] | None = None
        self._depth = 0

    def __enter__(self) -> None:
        if not self._depth:
            self.collected = []
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth:
            return
        collected, self.collected = self.collected or (), None
        for transport, data in collected:
            if transport.is_closing():
                continue
            try:
                transport.write(data)
            except Exception:
                # Around one connection: the others of the step get their texts.
                log.exception("write failed")
                transport.abort()


WRITES = WriteBatch()
"""The writes of the running event loop."""


def _has_several_processors() -> bool:
    quota = process_limits.quota()
    return processors() > 1 and (quota is None or quota > 1)
