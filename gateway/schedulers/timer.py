"""Timers with a resolution below a millisecond."""

import asyncio
import time
from collections.abc import Callable

NS_PER_MS = 1_000_000
MS_PER_SECOND = 1000


class Timer:
    """Calls back once, at the earliest time that was set.

    Event loops wait for whole milliseconds, but batches wait for tens of microseconds: below a
    millisecond the timer takes one turn of the loop after the other. Times are those of
    `time.monotonic_ns`.
    """

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback
        self._at_ns = 0
        self._handle: asyncio.Handle | None = None

    def set(self, at_ns: int) -> None:
        """Call back at that time, unless an earlier time is set."""
        if self._handle is not None:
            if self._at_ns <= at_ns:
                return
            self._handle.cancel()
        self._at_ns = at_ns
        self._wait()

    @property
    def is_set(self) -> bool:
        """Whether it will call back."""
        return self._handle is not None

    def clear(self) -> None:
        """Cancel the call."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _wait(self) -> None:
        loop = asyncio.get_running_loop()
        left_ms = (self._at_ns - time.monotonic_ns()) // NS_PER_MS
        if left_ms > 0:
            self._handle = loop.call_later(left_ms / MS_PER_SECOND, self._ring)
        else:
            self._handle = loop.call_soon(self._ring)

    def _ring(self) -> None:
        if time.monotonic_ns() < self._at_ns:
            self._wait()
            return
        self._handle = None
        self._callback()
