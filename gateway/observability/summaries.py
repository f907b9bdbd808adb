"""Summaries of latencies: quantiles of the durations of requests."""

import time
from collections import deque
from dataclasses import dataclass, field

from gateway.messages import Phases

WINDOW_SECS = 60
WINDOW_SIZE = 4096
"""Quantiles cover the observations of that time, and at most that many of them."""


class Summary:
    """Count and sum of all observations, and exact quantiles of the latest.

    The latest are those of the last WINDOW_SECS, and at most WINDOW_SIZE.
    """

    __slots__ = ("_latest", "count", "total")

    def __init__(self) -> None:
        self.count = 0
        self.total = 0
        self._latest: deque[tuple[float, int]] = deque(maxlen=WINDOW_SIZE)

    def observe(self, value: int, now: float) -> None:
        """Count one observation; `now` is in seconds of the monotonic clock."""
        self.count += 1
        self.total += value
        self._latest.append((now, value))

    def quantiles(self, wanted: tuple[float, ...], now: float | None = None) -> list[float]:
        """The value at each quantile; NaN if the window is empty."""
        since = (time.monotonic() if now is None else now) - WINDOW_SECS
        values = sorted(value for moment, value in self._latest if moment >= since)
        if not values:
            return [float("nan")] * len(wanted)
        last = len(values) - 1
        return [values[min(last, int(quantile * len(values)))] for quantile in wanted]


@dataclass(slots=True)
class Summaries:
    """Quantiles of the durations of requests, in microseconds."""

    request: Summary = field(default_factory=Summary)
    queue: Summary = field(default_factory=Summary)
    compute_input: Summary = field(default_factory=Summary)
    compute_infer: Summary = field(default_factory=Summary)
    compute_output: Summary = field(default_factory=Summary)
    cache_hit: Summary = field(default_factory=Summary)
    cache_miss: Summary = field(default_factory=Summary)

    def succeeded(self, request_ns: int, queue_ns: int, spent: Phases | int) -> None:
        """Count a request by its phases, or by the time of its look-up in the response cache."""
        now = time.monotonic()
        self.request.observe(request_ns // 1000, now)
        self.queue.observe(max(0, queue_ns) // 1000, now)
        if isinstance(spent, int):
            self.cache_hit.observe(spent // 1000, now)
            return
        self.compute_input.observe(spent.input_ns // 1000, now)
        self.compute_infer.observe(spent.infer_ns // 1000, now)
        self.compute_output.observe(spent.output_ns // 1000, now)

    def missed(self, lookup_and_insert_ns: int) -> None:
        """Count a request of which the response cache had no response, and now has it."""
        self.cache_miss.observe(lookup_and_insert_ns // 1000, time.monotonic())
