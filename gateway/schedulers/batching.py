"""Which requests of the queue execute together now, or until when do they wait for others?

Triton's dynamic batcher (`ModelDynamicBatching` of the model configuration). A batch is chosen
when an instance is free, so what Triton adds to a batch that still waits for an instance is in the
queue here, and comes into the same batch.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from gateway.config import ModelConfig
from gateway.config.scheduling import DynamicBatching
from gateway.schedulers.queue import NS_PER_US, QueuedRequest

LIMIT_NS = 2_000_000
"""The longest wait: turns take longer where the loop has much else to do."""
PATIENCE = 24
"""So many turns in a row that bring nothing end the wait."""
TRY_EVERY = 64
"""One in so many batches waits although the last wait brought nothing."""
CREDIT = 16
"""So many waits in a row must bring nothing before the next batches are taken at once."""
LOOK_AGAIN = 16
"""After so many waits that ended with as many rows as expected one is not cut short, to see whether
more would come."""


class Decision(NamedTuple):
    """What to do now: execute `batch`, or if it is empty wait for more.

    Then `until_ns` is when to decide again (0: only once more requests come); requests like the
    ones that wait change nothing before `enough_rows` wait.
    """

    batch: Sequence[QueuedRequest] = ()
    until_ns: int = 0
    enough_rows: int = 0


class Batching(Protocol):
    """A way to form batches. `delay_ns` is the longest time a request waits for others."""

    delay_ns: int

    def decide(self, queue: Iterable[QueuedRequest], now_ns: int) -> Decision:
        """What to do for a free instance; `queue` is in the order of execution."""


class FirstComeBatching:
    """Batches from the head of the queue, never past a request that does not fit."""

    def __init__(self, config: ModelConfig, batching: DynamicBatching) -> None:
        self.delay_ns = batching.max_queue_delay_microseconds * NS_PER_US
        self._max_rows = most_rows(config, batching)
        self._preferred = frozenset(batching.preferred_batch_size or (self._max_rows,))
        self._largest_preferred = max(self._preferred)

    def decide(self, queue: Iterable[QueuedRequest], now_ns: int) -> Decision:
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

    def _scan(self, queue: Iterable[QueuedRequest]) -> tuple[list[QueuedRequest], int, bool]:
        """Who fits into one batch, how many of them are the best preferred one, and whether
        nobody else can join them."""
        pending: list[QueuedRequest] = []
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


@dataclass(slots=True)
class WaitHistory:
    """What the waits before the latest batches have brought.

    `expected` are the rows with which the last wait ended that was not cut short: clients that wait
    for their answers come in the same number again, and all the turns after the last are lost.
    """

    taken_at_once: int = 0
    credit: int = 0
    expected: int = 0
    cut_short: int = 0

    @property
    def worthwhile(self) -> bool:
        """Whether the next batch should wait."""
        if self.credit:
            return True
        self.taken_at_once += 1
        return self.taken_at_once >= TRY_EVERY

    def enough(self, most: int) -> int:
        """With how many rows the next wait ends at once; `most` is what a batch may have."""
        known = self.credit and self.expected > 1 and self.cut_short < LOOK_AGAIN
        return min(self.expected, most) if known else most

    def waited(self, before: int, rows: int, enough: int) -> None:
        """A batch has waited: so many rows were there before and after, and so many enough."""
        self.taken_at_once = 0
        is_cut_short = rows >= enough == self.expected
        self.cut_short = self.cut_short + 1 if is_cut_short else 0
        self.expected = rows
        if rows > before:
            self.credit = CREDIT
        elif not is_cut_short:
            self.credit = max(0, self.credit - 1)


@dataclass(slots=True)
class BatchWait:
    """One wait, begun at `began_ns` with so many rows: for how many more turns?"""

    rows: int
    began_ns: int
    quiet: int = -1

    def over(self, rows: int, enough: int, now_ns: int) -> bool:
        """Whether to wait no more, now that so many rows are there and so many are enough."""
        self.quiet = self.quiet + 1 if rows == self.rows else 0
        self.rows = rows
        late = now_ns - self.began_ns >= LIMIT_NS
        return rows >= enough or self.quiet >= PATIENCE or late
