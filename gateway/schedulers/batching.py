"""Rules for forming batches of a queue, and for waiting until more requests arrive.

Triton's dynamic batcher (`ModelDynamicBatching` of the model configuration). A batch is formed
when an instance is free. Triton forms it earlier, and adds requests while it waits for an instance.
All decisions are functions of the queue and the time.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from gateway.config import ModelConfig
from gateway.config.scheduling import DynamicBatching
from gateway.schedulers.queue import NS_PER_US, QueuedRequest

LIMIT_NS = 2_000_000
"""The longest wait; turns of a busy loop are long."""
PATIENCE = 24
"""Number of consecutive turns without a new request that end a wait."""
TRY_EVERY = 64
"""Number of batches after which one waits although the last wait was useless."""
CREDIT = 16
"""Number of consecutive useless waits after which batches no longer wait."""
LOOK_AGAIN = 16
"""Number of waits that ended at the expected rows, after which one wait is not cut short."""


class Decision(NamedTuple):
    """A batch to execute now; if it is empty, wait.

    `until_ns` is the time of the next decision (0: at the next request). Further compatible
    requests do not change the decision before `enough_rows` rows are queued.
    """

    batch: Sequence[QueuedRequest] = ()
    until_ns: int = 0
    enough_rows: int = 0


NOTHING = Decision()
"""The decision for an empty queue."""


class Batching(Protocol):
    """Rules for forming batches; `delay_ns` is the longest time a request waits for others."""

    delay_ns: int

    def decide(self, queue: Iterable[QueuedRequest], now_ns: int) -> Decision:
        """The decision for a free instance; `queue` is in the order of execution."""


class FirstComeBatching:
    """Batches of requests at the head of the queue, up to the first that does not fit."""

    def __init__(self, config: ModelConfig, batching: DynamicBatching) -> None:
        self.delay_ns = batching.max_queue_delay_microseconds * NS_PER_US
        self._max_rows = most_rows(config, batching)
        self._preferred = frozenset(batching.preferred_batch_size or (self._max_rows,))
        self._largest_preferred = max(self._preferred)

    def decide(self, queue: Iterable[QueuedRequest], now_ns: int) -> Decision:
        pending: list[QueuedRequest] = []
        rows = marked = 0
        complete = False
        for waiting in queue:
            if pending:
                if not marked and rows + waiting.rows > self._largest_preferred:
                    marked = len(pending)
                if rows + waiting.rows > self._max_rows or waiting.key != pending[0].key:
                    complete = True  # no further request can join
                    break
            pending.append(waiting)
            rows += waiting.rows
            if rows in self._preferred:
                marked = len(pending)  # these form the largest preferred batch so far
        if not pending:
            return NOTHING
        if not self.delay_ns:
            return Decision(pending[:marked] if marked else pending)
        return self._after_delay(pending, marked, now_ns, complete=complete)

    def _after_delay(
        self, pending: Sequence[QueuedRequest], marked: int, now_ns: int, *, complete: bool
    ) -> Decision:
        """The decision where requests may wait for others."""
        oldest_ns = min(waiting.arrived_ns for waiting in pending)
        overdue = now_ns - oldest_ns >= self.delay_ns
        if marked and not overdue:
            return Decision(pending[:marked])
        if complete or overdue:
            return Decision(pending)
        rows = sum(waiting.rows for waiting in pending)
        if rows >= self._largest_preferred:
            return Decision(pending)
        enough = min(size for size in self._preferred if size > rows)
        return Decision(until_ns=oldest_ns + self.delay_ns, enough_rows=enough)


def most_rows(config: ModelConfig, batching: DynamicBatching) -> int:
    """The most rows of a batch.

    With `preserve_ordering` responses wait for earlier requests. A decoupled model may give any
    number of responses: its requests execute one by one, so that no execution waits for itself.
    """
    if batching.preserve_ordering and config.decoupled:
        return 1
    return max(1, config.max_batch_size)


@dataclass(slots=True)
class WaitHistory:
    """The results of earlier waits, which decide whether and how long the next batch waits.

    Requests of several clients arrive in consecutive turns of the event loop, so a batch that is
    taken immediately often has a single request. With one client a wait is useless: a wait is
    tried now and then, and repeated while it pays. `expected` are the rows of the last wait that
    was not cut short: clients that wait for answers send about as many requests again.
    """

    taken_at_once: int = 0
    credit: int = 0
    expected: int = 0
    cut_short: int = 0

    @property
    def worthwhile(self) -> bool:
        """Whether the next batch waits."""
        if self.credit:
            return True
        self.taken_at_once += 1
        return self.taken_at_once >= TRY_EVERY

    def passes(self) -> bool:
        """Whether the next batch is taken at once, which is counted; False if it is to wait."""
        if self.credit or self.taken_at_once + 1 >= TRY_EVERY:
            return False
        self.taken_at_once += 1
        return True

    def enough(self, most: int) -> int:
        """The number of rows that ends the next wait; `most` is the largest batch."""
        known = self.credit and self.expected > 1 and self.cut_short < LOOK_AGAIN
        return min(self.expected, most) if known else most

    def waited(self, before: int, rows: int, enough: int) -> None:
        """Record a wait: the rows before and after it, and the rows that would have ended it."""
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
    """One wait of a batch, started at `began_ns` with `rows` queued rows."""

    rows: int
    began_ns: int
    quiet: int = -1

    def over(self, rows: int, enough: int, now_ns: int) -> bool:
        """Whether the wait ends, with `rows` queued rows of which `enough` end it."""
        self.quiet = self.quiet + 1 if rows == self.rows else 0
        self.rows = rows
        late = now_ns - self.began_ns >= LIMIT_NS
        return rows >= enough or self.quiet >= PATIENCE or late
