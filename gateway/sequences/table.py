"""Open sequences, their slots, and the backlog of those without a slot.

Triton's sequence batcher (`ModelSequenceBatching` of the model configuration): a sequence begins
in the free slot with the lowest number or at the end of the backlog, and keeps its slot until it
ends. A sequence without a request for too long loses its slot; sequences in the backlog are never
idle. Slots of busy instances are taken last; on Triton only the number counts. The time is an
argument.
"""

import asyncio
import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gateway.messages import InferRequest, SequenceKey, SequenceTag
from gateway.schedulers.queue import NS_PER_US, QueuedRequest
from gateway.tensor import Tensor

NO_STATES: Mapping[str, Tensor] = {}


@dataclass(slots=True, eq=False)
class SequenceSlot:
    """A place for one sequence at a time: row `number` in batches of the instance `owner`."""

    owner: Hashable
    number: int
    sequence: "OpenSequence | None" = None
    retired: bool = False


@dataclass(slots=True, eq=False)
class OpenSequence:
    """A sequence with requests that are not yet executed, or to come.

    `waiting` are its requests in order, except the one that is ready or executing while `busy` is
    set. `begun`: one was executed. `closed`: it takes no further requests. `states` are its
    implicit states, by names of inputs. `owner` is the instance of its slot, also of a former one.
    `rest_ns` is the time of its latest request, `deadline_ns` the end of its timeout in the
    backlog (0: none).
    """

    tag: SequenceTag
    waiting: deque[QueuedRequest] = field(default_factory=deque)
    states: Mapping[str, Tensor] = field(default_factory=lambda: NO_STATES)
    slot: SequenceSlot | None = None
    owner: Hashable = None
    busy: bool = False
    begun: bool = False
    closed: bool = False
    rest_ns: int = 0
    deadline_ns: int = 0


def _never_busy(owner: Hashable) -> bool:
    """The default of `busy`."""
    return False


class SequenceTable:
    """The sequences of one model, their slots and their backlog.

    `idle_us` is the longest time without a request; 0 is unlimited. `busy` says whether an owner
    cannot execute now. Implements `OpenSequences`.
    """

    def __init__(self, idle_us: int, busy: Callable[[Hashable], bool] = _never_busy) -> None:
        self._idle_ns = idle_us * NS_PER_US
        self._busy = busy
        self._none_open = asyncio.Event()
        self._open: dict[SequenceKey, OpenSequence] = {}
        self._resting: OrderedDict[OpenSequence, None] = OrderedDict()
        self._backlog: OrderedDict[OpenSequence, None] = OrderedDict()
        self._free: dict[Hashable, list[tuple[int, SequenceSlot]]] = {}

    def knows(self, key: SequenceKey) -> bool:
        """Whether a sequence with that key is open."""
        return key in self._open

    def continues(self, request: InferRequest) -> bool:
        """Whether the request continues an open sequence."""
        tag = request.sequence
        return tag is not None and not tag.start and self.knows(tag.key)

    @property
    def are_open(self) -> bool:
        """Whether any sequence is open."""
        return bool(self._open)

    async def ended(self) -> None:
        """Wait until no sequence is open."""
        while self._open:
            self._none_open.clear()
            await self._none_open.wait()

    @property
    def idle_ns(self) -> int:
        """The next time at which a sequence may be idle; 0 if none has a slot."""
        oldest = next(iter(self._resting), None)
        return oldest.rest_ns + self._idle_ns if oldest else 0

    @property
    def deadline_ns(self) -> int:
        """The next time at which a timeout in the backlog ends; 0 if there is none."""
        return min((each.deadline_ns for each in self._backlog if each.deadline_ns), default=0)

    def push(
        self, waiting: QueuedRequest, tag: SequenceTag, timeout_us: int, now_ns: int
    ) -> OpenSequence:
        """Append a request to its sequence; an unknown sequence begins with it."""
        sequence = self._open.get(tag.key) or self._begin(tag, now_ns)
        sequence.waiting.append(waiting)
        waiting.queued = True
        self._rest(sequence, now_ns)
        if sequence.slot is None and timeout_us:
            deadline_ns = (waiting.entry.arrived_ns or now_ns) + timeout_us * NS_PER_US
            sequence.deadline_ns = min(sequence.deadline_ns or deadline_ns, deadline_ns)
        if tag.end:
            self.close(sequence)
        return sequence

    def close(self, sequence: OpenSequence) -> None:
        """Close a sequence: it takes no further requests; queued ones are still executed."""
        if not sequence.closed:
            sequence.closed = True
            del self._open[sequence.tag.key]
            self._resting.pop(sequence, None)
            if not self._open:
                self._none_open.set()

    def drop(self, sequence: OpenSequence) -> list[QueuedRequest]:
        """Close a sequence and return its queued requests; the caller releases its slot."""
        self.close(sequence)
        self._backlog.pop(sequence, None)
        waiting = list(sequence.waiting)
        sequence.waiting.clear()
        for each in waiting:
            each.queued = False
        return waiting

    def cut(self, sequence: OpenSequence, waiting: QueuedRequest) -> list[QueuedRequest]:
        """Close a sequence and return a queued request and all later ones."""
        self.close(sequence)
        tail = list(sequence.waiting)[sequence.waiting.index(waiting) :]
        for each in tail:
            sequence.waiting.pop()
            each.queued = False
        return tail

    # Times.

    def close_idle(self, now_ns: int) -> list[OpenSequence]:
        """Close and return idle sequences."""
        found: list[OpenSequence] = []
        for sequence in tuple(self._resting):
            if sequence.rest_ns + self._idle_ns > now_ns:
                break
            self.close(sequence)
            found.append(sequence)
        return found

    def expire(self, now_ns: int) -> list[QueuedRequest]:
        """Drop the sequences whose timeout in the backlog ended; return their requests."""
        late = [each for each in self._backlog if 0 < each.deadline_ns <= now_ns]
        return [waiting for each in late for waiting in self.drop(each)]

    # Slots.

    def add(self, owner: Hashable, count: int) -> tuple[SequenceSlot, ...]:
        """Add free slots of a new owner; call `fill` to give them to the backlog."""
        slots = tuple([SequenceSlot(owner, number) for number in range(count)])
        self._free[owner] = [(slot.number, slot) for slot in slots]
        return slots

    def retire(self, slots: Sequence[SequenceSlot]) -> None:
        """Retire slots: their sequences keep them, no other sequence gets them."""
        self._free.pop(slots[0].owner, None)
        for slot in slots:
            slot.retired = True

    def fill(self, now_ns: int) -> OpenSequence | None:
        """Give a free slot to the first sequence of the backlog; None if one is missing."""
        slot = self._take_free() if self._backlog else None
        if slot is None:
            return None
        sequence, _ = self._backlog.popitem(last=False)
        self._place(sequence, slot, now_ns)
        return sequence

    def release(self, sequence: OpenSequence, now_ns: int) -> OpenSequence | None:
        """Release a sequence's slot; return the sequence of the backlog that gets it, if any."""
        slot = self._vacate(sequence)
        if slot is None or slot.retired:
            return None
        if not self._backlog:
            self._set_free(slot)
            return None
        following, _ = self._backlog.popitem(last=False)
        self._place(following, slot, now_ns)
        return following

    def send_back(self, sequences: Iterable[OpenSequence]) -> None:
        """Move sequences that have not begun to the front of the backlog, in this order."""
        for sequence in reversed(tuple(sequences)):
            slot = self._vacate(sequence)
            self._resting.pop(sequence, None)
            self._backlog[sequence] = None
            self._backlog.move_to_end(sequence, last=False)
            if slot is not None and not slot.retired:
                self._set_free(slot)

    def _begin(self, tag: SequenceTag, now_ns: int) -> OpenSequence:
        sequence = self._open[tag.key] = OpenSequence(tag)
        slot = self._take_free()
        if slot is not None:
            self._place(sequence, slot, now_ns)
        else:
            self._backlog[sequence] = None
        return sequence

    def _take_free(self) -> SequenceSlot | None:
        owners = [owner for owner, slots in self._free.items() if slots]
        if not owners:
            return None
        owner = min(owners, key=lambda each: (self._busy(each), self._free[each][0][0]))
        return heapq.heappop(self._free[owner])[1]

    def _place(self, sequence: OpenSequence, slot: SequenceSlot, now_ns: int) -> None:
        sequence.slot, slot.sequence, sequence.owner = slot, sequence, slot.owner
        sequence.deadline_ns = 0
        self._rest(sequence, now_ns)

    def _vacate(self, sequence: OpenSequence) -> SequenceSlot | None:
        slot, sequence.slot = sequence.slot, None
        if slot is not None:
            slot.sequence = None
        return slot

    def _rest(self, sequence: OpenSequence, now_ns: int) -> None:
        sequence.rest_ns = now_ns
        if self._idle_ns and sequence.slot is not None and not sequence.closed:
            self._resting[sequence] = None
            self._resting.move_to_end(sequence)

    def _set_free(self, slot: SequenceSlot) -> None:
        heapq.heappush(self._free[slot.owner], (slot.number, slot))
