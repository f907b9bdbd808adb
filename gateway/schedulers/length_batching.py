"""Which requests of different lengths execute together, padded to the longest of them?

Triton's batcher never rearranges its queue; this one does, for models that declare padded inputs.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter

from gateway.config import ModelConfig
from gateway.config.scheduling import DynamicBatching
from gateway.schedulers.batching import Decision, most_rows
from gateway.schedulers.queue import NS_PER_US, QueuedRequest

LOOK_AHEAD = 128
"""Requests that are considered for one batch; deciding takes less than a millisecond."""
DEFAULT_BUDGET = 512
BUDGET_PER_OVERHEAD = 16
"""Tokens of budget for each token of overhead, where nothing has been measured."""
LEAST_BUDGET = 256
LEAST_OVERHEAD = 8.0
"""Measured beside other work, times may mislead: less than these would cost more than it gains."""
NEARLY_BEST = 0.98
"""The smallest batch with this part of the best throughput is enough, and answers sooner."""


@dataclass(frozen=True, slots=True)
class BatchTime:
    """A batch with that many padded tokens took so long."""

    tokens: int
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class BatchCost:
    """What a batch costs: its padded tokens and `overhead`, which is counted in tokens too.

    `budget` is the most padded tokens that a batch of several requests has.
    """

    budget: int
    overhead: float

    @classmethod
    def assumed(cls, budget: int = DEFAULT_BUDGET) -> "BatchCost":
        """A budget about which nothing else is known."""
        return cls(budget, budget / BUDGET_PER_OVERHEAD)

    @classmethod
    def measured(cls, points: Sequence[BatchTime]) -> "BatchCost":
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


def _overhead(points: Sequence[BatchTime]) -> float:
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


class LengthBatching:
    """The cheapest way to cut the queue into batches; the one with the first request goes.

    The requests are cut by length, so that each batch has near lengths, at most `cost.budget`
    padded tokens and at most `max_batch_size` rows. Because the first always goes, a request is
    passed over at most once for each request that was before it, whatever comes after it.
    """

    def __init__(self, config: ModelConfig, batching: DynamicBatching, cost: BatchCost) -> None:
        self.delay_ns = batching.max_queue_delay_microseconds * NS_PER_US
        self.cost = cost
        self._max_rows = most_rows(config, batching)

    def decide(self, queue: Iterable[QueuedRequest], now_ns: int) -> Decision:
        alike = _like_the_first(queue)
        if not alike:
            return Decision()
        until_ns = alike[0].arrived_ns + self.delay_ns
        if self.delay_ns and now_ns < until_ns and not self._enough(alike):
            return Decision(until_ns=until_ns)
        batches = cheapest(alike, self._max_rows, self.cost)
        return Decision(next(batch for batch in batches if alike[0] in batch))

    def _enough(self, alike: Sequence[QueuedRequest]) -> bool:
        tokens = sum(waiting.length * waiting.rows for waiting in alike)
        rows = sum(waiting.rows for waiting in alike)
        return tokens >= self.cost.budget or rows >= self._max_rows or len(alike) == LOOK_AHEAD


def _like_the_first(queue: Iterable[QueuedRequest]) -> list[QueuedRequest]:
    """Those that may share a batch with the first; others of lower priority do not delay it."""
    alike: list[QueuedRequest] = []
    for waiting in islice(queue, LOOK_AHEAD):
        if not alike or (waiting.key == alike[0].key and waiting.level == alike[0].level):
            alike.append(waiting)
    return alike


def cheapest(
    requests: Iterable[QueuedRequest], max_rows: int, cost: BatchCost
) -> list[tuple[QueuedRequest, ...]]:
    """Cut requests, sorted by length, into batches that cost least in all.

    A batch costs its longest length times its rows, and the overhead. Each has at most `max_rows`
    rows and, unless it is a single request, at most `cost.budget` padded tokens.
    """
    ranked = sorted(requests, key=attrgetter("length"))
    starts = _starts(ranked, max_rows, cost)
    batches: list[tuple[QueuedRequest, ...]] = []
    end = len(ranked)
    while end:
        batches.append(tuple(ranked[starts[end - 1] : end]))
        end = starts[end - 1]
    return batches


def _starts(ranked: Sequence[QueuedRequest], max_rows: int, cost: BatchCost) -> list[int]:
    """For each request, where the batch starts that ends with it, in the cheapest cut up to it."""
    least = [0.0]  # the cost of the first n requests
    useful = [0]  # their tokens without padding, less than which they cannot cost
    starts: list[int] = []
    for end, last in enumerate(ranked):
        best, best_start, rows = float("inf"), end, 0
        for start in range(end, -1, -1):
            rows += ranked[start].rows
            tokens = last.length * rows
            if start < end and (rows > max_rows or tokens > cost.budget):
                break
            if useful[start] + cost.overhead + tokens >= best:
                break
            if least[start] + cost.overhead + tokens < best:
                best, best_start = least[start] + cost.overhead + tokens, start
        least.append(best)
        useful.append(useful[-1] + last.length * last.rows)
        starts.append(best_start)
    return starts
