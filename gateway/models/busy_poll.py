"""Is it worth staying awake until the next request comes?

A process that sleeps is woken 30 to 60 us late on many machines, virtual ones above all, and finds
its caches cold: together that is as much as a small inference takes.
"""

import asyncio
import time

from gateway import cgroups
from gateway.processors import processors


class BusyPoll:
    """Counts requests in flight; while there are none it may keep the event loop from sleeping.

    It does so for `span_us` at most, and only if the latest request came within as much of the end
    of those before it: whoever asks again and again is answered sooner, and a server that has
    little to do, or waits for an engine, sleeps as ever. So does one that may use no more than one
    processor: its clients need that.
    """

    def __init__(self, span_us: int = 0) -> None:
        self._span_ns = 1000 * span_us if _has_several_processors() else 0
        self._in_flight = 0
        self._free_since_ns = 0
        self._came_soon = False
        self._awake = False

    def began(self) -> None:
        """A request has come."""
        if not self._in_flight and self._span_ns:
            self._came_soon = time.monotonic_ns() - self._free_since_ns < self._span_ns
        self._in_flight += 1

    def ended(self) -> None:
        """A request is over. Called on the event loop."""
        self._in_flight -= 1
        if self._in_flight or not self._span_ns:
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
    quota = cgroups.cpus()
    return processors() > 1 and (quota is None or quota > 1)
