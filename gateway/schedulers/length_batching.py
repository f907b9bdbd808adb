"""Which requests of different lengths execute together, padded to the longest of them?

Triton's batcher never rearranges its queue; this one does, for models that declare padded inputs.
"""

from collections.abc import Iterable, Sequence
from itertools import islice
from operator import attrgetter

from gateway.config import ModelConfig
from gateway.config.scheduling import DynamicBatching
from gateway.schedulers.batching import Decision, most_rows
from gateway.schedulers.costs import Cost
from gateway.schedulers.queue import NS_PER_US, Waiting

LOOK_AHEAD = 128
"""Requests that are considered for one batch; deciding takes less than a millisecond."""


class LengthBatching:
    """The cheapest way to cut the queue into batches; the one with the first request goes.

    The requests are cut by length, so that each batch has near lengths, at most `cost.budget`
    padded tokens and at most `max_batch_size` rows. Because the first always goes, a request is
    passed over at most once for each request that was before it, whatever comes after it.
    """

    def __init__(self, config: ModelConfig, batching: DynamicBatching, cost: Cost) -> None:
        self.delay_ns = batching.max_queue_delay_microseconds * NS_PER_US
        self.cost = cost
        self._max_rows = most_rows(config, batching)

    def decide(self, queue: Iterable[Waiting], now_ns: int) -> Decision:
        alike = _like_the_first(queue)
        if not alike:
            return Decision()
        until_ns = alike[0].arrived_ns + self.delay_ns
        if self.delay_ns and now_ns < until_ns and not self._enough(alike):
            return Decision(until_ns=until_ns)
        batches = cheapest(alike, self._max_rows, self.cost)
        return Decision(next(batch for batch in batches if alike[0] in batch))

    def _enough(self, alike: Sequence[Waiting]) -> bool:
        tokens = sum(waiting.length * waiting.rows for waiting in alike)
        rows = sum(waiting.rows for waiting in alike)
        return tokens >= self.cost.budget or rows >= self._max_rows or len(alike) == LOOK_AHEAD


def _like_the_first(queue: Iterable[Waiting]) -> list[Waiting]:
    """Those that may share a batch with the first; others of lower priority do not delay it."""
    alike: list[Waiting] = []
    for waiting in islice(queue, LOOK_AHEAD):
        if not alike or (waiting.key == alike[0].key and waiting.level == alike[0].level):
            alike.append(waiting)
    return alike


def cheapest(requests: Iterable[Waiting], max_rows: int, cost: Cost) -> list[tuple[Waiting, ...]]:
    """Cut requests, sorted by length, into batches that cost least in all.

    A batch costs its longest length times its rows, and the overhead. Each has at most `max_rows`
    rows and, unless it is a single request, at most `cost.budget` padded tokens.
    """
    ranked = sorted(requests, key=attrgetter("length"))
    starts = _starts(ranked, max_rows, cost)
    batches: list[tuple[Waiting, ...]] = []
    end = len(ranked)
    while end:
        batches.append(tuple(ranked[starts[end - 1] : end]))
        end = starts[end - 1]
    return batches


def _starts(ranked: Sequence[Waiting], max_rows: int, cost: Cost) -> list[int]:
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
