"""Rules for forming batches of padded inputs, by the costs of their lengths.

Triton's batcher never reorders its queue; this one does, for models that declare padded inputs.
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
"""Number of requests considered for one batch; a decision takes less than a millisecond."""
DEFAULT_BUDGET = 512
BUDGET_PER_OVERHEAD = 16
"""Budget divided by overhead, without a measurement."""
LEAST_BUDGET = 256
LEAST_OVERHEAD = 8.0
"""Lower limits of measured values, which other load may distort."""
NEARLY_BEST = 0.98
"""The budget is the smallest batch with this fraction of the best throughput."""


@dataclass(frozen=True, slots=True)
class BatchTime:
    """The measured time of a batch with that many padded tokens."""

    tokens: int
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class BatchCost:
    """The cost of a batch: its padded tokens plus `overhead`, also in tokens.

    `budget` is the most padded tokens of a batch of several requests.
    """

    budget: int
    overhead: float

    @classmethod
    def assumed(cls, budget: int = DEFAULT_BUDGET) -> "BatchCost":
        """The cost for a configured budget, without a measurement."""
        return cls(budget, budget / BUDGET_PER_OVERHEAD)

    @classmethod
    def measured(cls, points: Sequence[BatchTime]) -> "BatchCost":
        """The budget with the best throughput, and the overhead that fits the times up to it.

        `points` are in the order of their tokens. Fewer than two yield the default.
        """
        if len(points) < 2:
            return cls.assumed()
        enough = NEARLY_BEST * max(point.rate for point in points)
        budget = next(point.tokens for point in points if point.rate >= enough)
        useful = [point for point in points if point.tokens <= budget]
        overhead = _overhead(useful if len(useful) > 1 else points[:2])
        return cls(max(budget, LEAST_BUDGET), max(overhead, LEAST_OVERHEAD))


def _overhead(points: Sequence[BatchTime]) -> float:
    """The time of a batch without tokens, in tokens.

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
    """Cuts the queue into the cheapest batches; the batch with the first request executes.

    The requests are cut by length, so that a batch has similar lengths, at most `cost.budget`
    padded tokens and at most `max_batch_size` rows. Since the first request always executes, a
    request is overtaken at most once per request that was ahead of it.
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
    """The requests of the same key and priority as the first."""
    alike: list[QueuedRequest] = []
    for waiting in islice(queue, LOOK_AHEAD):
        if not alike or (waiting.key == alike[0].key and waiting.level == alike[0].level):
            alike.append(waiting)
    return alike


def cheapest(
    requests: Iterable[QueuedRequest], max_rows: int, cost: BatchCost
) -> list[tuple[QueuedRequest, ...]]:
    """Cut requests, sorted by length, into batches of the least total cost.

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
    """For each request the start of the batch that ends with it, in the cheapest cut up to it."""
    least = [0.0]  # costs of the first n requests
    useful = [0]  # their tokens without padding: a lower bound of the cost
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
