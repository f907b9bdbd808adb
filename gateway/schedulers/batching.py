"""Which requests of the queue execute together now, or until when do they wait for others?

Triton's dynamic batcher (`ModelDynamicBatching` of the model configuration). A batch is chosen
when an instance is free, so what Triton adds to a batch that still waits for an instance is in the
queue here, and comes into the same batch.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from gateway.config import ModelConfig
from gateway.config.scheduling import DynamicBatching
from gateway.schedulers.queue import NS_PER_US, Waiting


class Decision(NamedTuple):
    """What to do now: execute `batch`, or if it is empty wait for more.

    Then `until_ns` is when to decide again (0: only once more requests come); requests like the
    ones that wait change nothing before `enough_rows` wait.
    """

    batch: Sequence[Waiting] = ()
    until_ns: int = 0
    enough_rows: int = 0


class Batching(Protocol):
    """A way to form batches. `delay_ns` is the longest time a request waits for others."""

    delay_ns: int

    def decide(self, queue: Iterable[Waiting], now_ns: int) -> Decision:
        """What to do for a free instance; `queue` is in the order of execution."""


class FirstComeBatching:
    """Batches from the head of the queue, never past a request that does not fit."""

    def __init__(self, config: ModelConfig, batching: DynamicBatching) -> None:
        self.delay_ns = batching.max_queue_delay_microseconds * NS_PER_US
        self._max_rows = most_rows(config, batching)
        self._preferred = frozenset(batching.preferred_batch_size or (self._max_rows,))
        self._largest_preferred = max(self._preferred)

    def decide(self, queue: Iterable[Waiting], now_ns: int) -> Decision:
        pending, marked, complete = self._scan(queue)
        if not pending:
            return Decision()
        oldest_ns = min(waiting.arrived_ns for waiting in pending) if self.delay_ns else 0
        overdue = bool(self.delay_ns) and now_ns - oldest_ns >= self.delay_ns
        if marked and not overdue:
            return Decision(pending[:marked])
        if complete or overdue or not self.delay_ns:
            return Decision(pending)
        rows = sum(waiting.rows for waiting in pending)
        if rows >= self._largest_preferred:
            return Decision(pending)
        enough = min(size for size in self._preferred if size > rows)
        return Decision(until_ns=oldest_ns + self.delay_ns, enough_rows=enough)

    def _scan(self, queue: Iterable[Waiting]) -> tuple[list[Waiting], int, bool]:
        """Who fits into one batch, how many of them are the best preferred one, and whether
        nobody else can join them."""
        pending: list[Waiting] = []
        rows, marked = 0, 0
        for waiting in queue:
            if pending:
                if not marked and rows + waiting.rows > self._largest_preferred:
                    marked = len(pending)
                if rows + waiting.rows > self._max_rows or waiting.key != pending[0].key:
                    return pending, marked, True
            pending.append(waiting)
            rows += waiting.rows
            if rows in self._preferred:
                marked = len(pending)
        return pending, marked, False


def most_rows(config: ModelConfig, batching: DynamicBatching) -> int:
    """The most rows of a batch.

    Responses kept in order have to wait for each other, and a decoupled model may give any number
    of them: its requests are executed one by one, so that no execution waits for itself.
    """
    if batching.preserve_ordering and config.decoupled:
        return 1
    return max(1, config.max_batch_size)
