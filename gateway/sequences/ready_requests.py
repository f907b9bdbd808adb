"""Ready requests of an instance's sequences, and rules for forming batches of them.

A row is a sequence and its next request. The time is an argument.
"""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from gateway.config import ModelConfig
from gateway.config.scheduling import DynamicBatching, StrategyDirect, StrategyOldest
from gateway.schedulers.batching import FirstComeBatching
from gateway.schedulers.queue import NS_PER_US, QueuedRequest
from gateway.sequences.table import OpenSequence


class Row(NamedTuple):
    """A request of a sequence, as one row of an execution."""

    sequence: OpenSequence
    waiting: QueuedRequest


class RowDecision(NamedTuple):
    """Rows to execute now, None for an empty slot; if there are none, wait.

    `until_ns` is the time of the next decision (0: at the next request).
    """

    rows: Sequence[Row | None] = ()
    until_ns: int = 0


class ReadyRequests(ABC):
    """The requests of one instance's sequences that may execute: at most one per sequence."""

    delays: bool
    """Whether ready requests may wait for others."""

    @abstractmethod
    def __bool__(self) -> bool: ...

    @abstractmethod
    def offer(self, sequence: OpenSequence) -> bool:
        """Add the next request of a sequence that is not busy; idempotent.

        True if the sequence no longer needs its slot.
        """

    @abstractmethod
    def drop(self, sequence: OpenSequence) -> QueuedRequest | None:
        """Remove a sequence; return its request that is no longer in its `waiting`, if any."""

    @abstractmethod
    def drop_unbegun(self) -> list[OpenSequence]:
        """Remove and return the sequences without any execution, with all of their requests."""

    @property
    @abstractmethod
    def sequences(self) -> list[OpenSequence]:
        """The sequences that have a ready request."""

    @abstractmethod
    def decide(self, now_ns: int) -> RowDecision:
        """The decision for a free instance; at least one request is ready."""

    @abstractmethod
    def take(self, rows: Sequence[Row | None]) -> list[OpenSequence]:
        """Remove rows that execute; return the sequences that no longer need their slots."""


def _is_last(row: Row) -> bool:
    tag = row.waiting.entry.request.sequence
    return tag is not None and tag.end


class ReadySlots(ReadyRequests):
    """The direct strategy: a batch has one row for each slot, up to the last that is ready."""

    def __init__(self, config: ModelConfig, strategy: StrategyDirect) -> None:
        self._delay_ns = strategy.max_queue_delay_microseconds * NS_PER_US
        self._enough = strategy.minimum_slot_utilization * max(1, config.max_batch_size)
        self.delays = bool(self._delay_ns and self._enough)
        self._rows: dict[int, Row] = {}

    def __bool__(self) -> bool:
        return bool(self._rows)

    def offer(self, sequence: OpenSequence) -> bool:
        assert sequence.slot is not None  # noqa: S101 - only sequences with a slot are offered
        self._rows[sequence.slot.number] = Row(sequence, sequence.waiting[0])
        return False

    def drop(self, sequence: OpenSequence) -> None:
        if sequence.slot is not None:
            self._rows.pop(sequence.slot.number, None)

    def drop_unbegun(self) -> list[OpenSequence]:
        found = [each for each in self.sequences if not each.begun]
        for sequence in found:
            self.drop(sequence)
        return found

    @property
    def sequences(self) -> list[OpenSequence]:
        return [row.sequence for row in self._rows.values()]

    def decide(self, now_ns: int) -> RowDecision:
        """All rows that are compatible with the longest ready request; the others are padding.

        Triton takes the lowest slot instead of the longest ready request. There a sequence with
        many queued requests blocks sequences of other shapes in higher slots.
        """
        if until_ns := self._wait_until(now_ns):
            return RowDecision(until_ns=until_ns)
        key = next(iter(self._rows.values())).waiting.key
        found = [self._rows.get(number) for number in range(max(self._rows) + 1)]
        return RowDecision([row if row and row.waiting.key == key else None for row in found])

    def take(self, rows: Sequence[Row | None]) -> list[OpenSequence]:
        ended: list[OpenSequence] = []
        for number, row in enumerate(rows):
            if row is None:
                continue
            del self._rows[number]
            row.sequence.waiting.popleft()
            row.sequence.busy = True
            if _is_last(row):
                ended.append(row.sequence)
        return ended

    def _wait_until(self, now_ns: int) -> int:
        """The time until which to wait for more slots; 0 to execute now."""
        if not self.delays or len(self._rows) >= self._enough:
            return 0
        oldest_ns = min(row.waiting.arrived_ns for row in self._rows.values())
        until_ns = oldest_ns + self._delay_ns
        return until_ns if now_ns < until_ns else 0


class ReadyCandidates(ReadyRequests):
    """The oldest strategy: the next requests of all sequences form batches in order of arrival."""

    def __init__(self, config: ModelConfig, strategy: StrategyOldest) -> None:
        self._batching = FirstComeBatching(
            config,
            DynamicBatching(
                preferred_batch_size=strategy.preferred_batch_size,
                max_queue_delay_microseconds=strategy.max_queue_delay_microseconds,
                preserve_ordering=strategy.preserve_ordering,
            ),
        )
        self.delays = bool(self._batching.delay_ns)
        self._candidates: OrderedDict[QueuedRequest, OpenSequence] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._candidates)

    def offer(self, sequence: OpenSequence) -> bool:
        row = Row(sequence, sequence.waiting.popleft())
        sequence.busy = True
        self._candidates[row.waiting] = sequence
        return _is_last(row)

    def drop(self, sequence: OpenSequence) -> QueuedRequest | None:
        for waiting, candidate in self._candidates.items():
            if candidate is sequence:
                del self._candidates[waiting]
                sequence.busy = False
                return waiting
        return None

    def drop_unbegun(self) -> list[OpenSequence]:
        found = [each for each in self.sequences if not each.begun]
        for sequence in found:
            if (waiting := self.drop(sequence)) is not None:
                sequence.waiting.appendleft(waiting)
        return found

    @property
    def sequences(self) -> list[OpenSequence]:
        return list(self._candidates.values())

    def decide(self, now_ns: int) -> RowDecision:
        decision = self._batching.decide(self._candidates, now_ns)
        rows = [Row(self._candidates[each], each) for each in decision.batch]
        return RowDecision(rows, decision.until_ns)

    def take(self, rows: Sequence[Row | None]) -> list[OpenSequence]:
        for row in rows:
            if row is not None:
                del self._candidates[row.waiting]
        return []
