"""How observations are spread: histograms since the start, quantiles of lately."""

import time
from bisect import bisect_left
from collections import deque

WINDOW_SECS = 60
WINDOW_SIZE = 4096
"""A summary tells of what was observed within that time, and of at most so many of the latest."""


class Histogram:
    """Observations counted by bucket; the last bucket is everything above the largest bound."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one observation."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Summary:
    """Count and sum of all observations, and exact quantiles of those of lately.

    Lately is the last WINDOW_SECS, and never more than the last WINDOW_SIZE observations.
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
        """The value at each quantile, NaN if nothing was observed lately."""
        since = (time.monotonic() if now is None else now) - WINDOW_SECS
        values = sorted(value for moment, value in self._latest if moment >= since)
        if not values:
            return [float("nan")] * len(wanted)
        last = len(values) - 1
        return [values[min(last, int(quantile * len(values)))] for quantile in wanted]
