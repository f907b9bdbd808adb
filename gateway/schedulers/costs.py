"""What does a batch cost by its padded tokens, and how many tokens should it have at most?"""

from collections.abc import Sequence
from dataclasses import dataclass

DEFAULT_BUDGET = 512
BUDGET_PER_OVERHEAD = 16
"""Tokens of budget for each token of overhead, where nothing has been measured."""
LEAST_BUDGET = 256
LEAST_OVERHEAD = 8.0
"""Measured beside other work, times may mislead: less than these would cost more than it gains."""
NEARLY_BEST = 0.98
"""The smallest batch with this part of the best throughput is enough, and answers sooner."""


@dataclass(frozen=True, slots=True)
class Point:
    """A batch with that many padded tokens took so long."""

    tokens: int
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Cost:
    """What a batch costs: its padded tokens and `overhead`, which is counted in tokens too.

    `budget` is the most padded tokens that a batch of several requests has.
    """

    budget: int
    overhead: float

    @classmethod
    def assumed(cls, budget: int = DEFAULT_BUDGET) -> "Cost":
        """A budget about which nothing else is known."""
        return cls(budget, budget / BUDGET_PER_OVERHEAD)

    @classmethod
    def measured(cls, points: Sequence[Point]) -> "Cost":
        """The budget with the best throughput, and the overhead that fits the times up to it.

        `points` come in the order of their tokens; from fewer than two nothing can be learnt.
        """
        if len(points) < 2:
            return cls.assumed()
        enough = NEARLY_BEST * max(point.rate for point in points)
        budget = next(point.tokens for point in points if point.rate >= enough)
        useful = [point for point in points if point.tokens <= budget]
        overhead = _overhead(useful if len(useful) > 1 else points[:2])
        return cls(max(budget, LEAST_BUDGET), max(overhead, LEAST_OVERHEAD))


def _overhead(points: Sequence[Point]) -> float:
    """Tokens' worth of the time that a batch of no tokens would take.

    A straight line through the times, by least squares of the relative errors.
    """
    weights = [1 / point.seconds**2 for point in points]
    total = sum(weights)
    tokens = sum(w * p.tokens for w, p in zip(weights, points, strict=True)) / total
    seconds = sum(w * p.seconds for w, p in zip(weights, points, strict=True)) / total
    spread = sum(w * (p.tokens - tokens) ** 2 for w, p in zip(weights, points, strict=True))
    shared = sum(
        w * (p.tokens - tokens) * (p.seconds - seconds)
        for w, p in zip(weights, points, strict=True)
    )
    slope = shared / spread
    most = float(points[-1].tokens)
    if slope <= 0:
        return most
    return min(max(seconds / slope - tokens, 0.0), most)
