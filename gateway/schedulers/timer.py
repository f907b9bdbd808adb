"""Call back when a time has come, to less than a millisecond."""

import asyncio
import time
from collections.abc import Callable

NS_PER_MS = 1_000_000
MS_PER_SECOND = 1000


class Timer:
    """Calls back once, at the earliest of the times it was set for.

    Event loops wait for whole milliseconds, while batches wait for tens of microseconds: what
    remains below a millisecond is waited for turn by turn of the loop, which serves others
    meanwhile. Times are those of `time.monotonic_ns`.
    """

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback
        self._at_ns = 0
        self._handle: asyncio.Handle | None = None

    def set(self, at_ns: int) -> None:
        """Call back at that time, unless an earlier one is set."""
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
        """Do not call back."""
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
