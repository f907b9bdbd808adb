"""Busy polling of the event loop between requests in quick succession.

The system wakes a sleeping process 30 to 60 us late on many machines, mostly virtual ones, with
cold caches. Together that costs as much as a small inference.
"""

import asyncio
import time

from gateway import cpus
from gateway.cpus import processors


class BusyPoll:
    """Counts requests in flight; may keep the idle event loop from sleeping.

    It does so for at most `span_us` after a request that came within `span_us` of the request
    before it. It never does while a request is in flight, or on a machine or cgroup with one
    processor, which clients need.
    """

    def __init__(self, span_us: int = 0) -> None:
        self._span_ns = 1000 * span_us if _has_several_processors() else 0
        self._in_flight = 0
        self._free_since_ns = 0
        self._came_soon = False
        self._awake = False

    def began(self) -> None:
        """A request has begun."""
        if not self._in_flight and self._span_ns:
            self._came_soon = time.monotonic_ns() - self._free_since_ns < self._span_ns
        self._in_flight += 1

    def ended(self) -> None:
        """A request has ended. Called on the event loop."""
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
    quota = cpus.quota()
    return processors() > 1 and (quota is None or quota > 1)
