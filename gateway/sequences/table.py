"""Which sequences are there, and which slot does each have? Times are passed in.

Triton's sequence batcher (`ModelSequenceBatching` of the model configuration): a sequence begins
in the free slot with the lowest number or at the end of the backlog, and keeps its slot until it
ends. One that has had no request for too long loses its slot; in the backlog nobody is idle.
Slots of busy instances are taken last. On Triton only the number counts.
"""

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from gateway.messages import SequenceTag
from gateway.schedulers.queue import NS_PER_US, QueuedRequest
from gateway.tensor import Tensor

NO_STATES: Mapping[str, Tensor] = {}


@dataclass(slots=True, eq=False)
class SequenceSlot:
    """A place for one sequence at a time; `owner` is whose place it is, its batch row `number`."""

    owner: Hashable
    number: int
    sequence: "OpenSequence | None" = None
    retired: bool = False


@dataclass(slots=True, eq=False)
class OpenSequence:
    """A sequence whose requests have not all been executed.

    `waiting` are its requests in their order, less the one that is `busy`: on its way into an
    execution, or executing. `begun` once one was. `closed`: it takes no more requests. `states`
    are handed from each request to the next, by the names of their inputs. `owner` is whose slot
    it has or had. `rest_ns` is since when it has had no new request, `deadline_ns` until when it
    may stay in the backlog (0: forever).
    """

    correlation_id: int | str
    waiting: deque[QueuedRequest] = field(default_factory=deque)
    states: Mapping[str, Tensor] = field(default_factory=lambda: NO_STATES)
    slot: SequenceSlot | None = None
    owner: Hashable = None
    busy: bool = False
    begun: bool = False
    closed: bool = False
    rest_ns: int = 0
    deadline_ns: int = 0


def _no_callback() -> None:
    """The default: nobody wants to hear of the last sequence."""


def _never_busy(owner: Hashable) -> bool:
    """The default: all slots are equal."""
    return False


class SequenceTable:
    """The sequences of one model, their slots and their backlog.

    `idle_us` is the longest time without a request; 0 is forever. `on_last` is called when the last
    one that took more requests takes no more. `busy` says whether an owner can execute nothing now.
    """

    def __init__(
        self,
        idle_us: int,
        on_last: Callable[[], None] = _no_callback,
        busy: Callable[[Hashable], bool] = _never_busy,
    ) -> None:
        self._idle_ns = idle_us * NS_PER_US
        self._on_last = on_last
        self._busy = busy
        self._open: dict[int | str, OpenSequence] = {}
        self._resting: OrderedDict[OpenSequence, None] = OrderedDict()
        self._backlog: OrderedDict[OpenSequence, None] = OrderedDict()
        self._free: dict[Hashable, list[tuple[int, SequenceSlot]]] = {}

    def knows(self, correlation_id: int | str) -> bool:
        """Whether a request with that id may go on with its sequence."""
        return correlation_id in self._open

    @property
    def any_open(self) -> bool:
        """Whether any sequence takes more requests."""
        return bool(self._open)

    @property
    def idle_ns(self) -> int:
        """When to ask next for sequences that are idle; 0 if none has a slot."""
        oldest = next(iter(self._resting), None)
        return oldest.rest_ns + self._idle_ns if oldest else 0

    @property
    def deadline_ns(self) -> int:
        """When to ask next for sequences that waited too long; 0 if none may."""
        return min((each.deadline_ns for each in self._backlog if each.deadline_ns), default=0)

    def push(
        self, waiting: QueuedRequest, tag: SequenceTag, timeout_us: int, now_ns: int
    ) -> OpenSequence:
        """Take a request, the last of its sequence so far; an unknown sequence begins with it."""
        sequence = self._open.get(tag.correlation_id) or self._begin(tag.correlation_id, now_ns)
        sequence.waiting.append(waiting)
        waiting.queued = True
        self._rest(sequence, now_ns)
        if sequence.slot is None and timeout_us:
            deadline_ns = now_ns + timeout_us * NS_PER_US
            sequence.deadline_ns = min(sequence.deadline_ns or deadline_ns, deadline_ns)
        if tag.end:
            self.close(sequence)
        return sequence

    def close(self, sequence: OpenSequence) -> None:
        """Let a sequence take no more requests; what waits of it is still to be executed."""
        if not sequence.closed:
            sequence.closed = True
            del self._open[sequence.correlation_id]
            self._resting.pop(sequence, None)
            if not self._open:
                self._on_last()

    def give_up(self, sequence: OpenSequence) -> list[QueuedRequest]:
        """Close a sequence, and return what waited of it; its slot is to be released."""
        self.close(sequence)
        self._backlog.pop(sequence, None)
        waiting = list(sequence.waiting)
        sequence.waiting.clear()
        for each in waiting:
            each.queued = False
        return waiting

    def cut(self, sequence: OpenSequence, waiting: QueuedRequest) -> list[QueuedRequest]:
        """Close a sequence, and return what waited of it from a request on."""
        self.close(sequence)
        tail = list(sequence.waiting)[sequence.waiting.index(waiting) :]
        for each in tail:
            sequence.waiting.pop()
            each.queued = False
        return tail

    # Times.

    def close_idle(self, now_ns: int) -> list[OpenSequence]:
        """Close and return the sequences that have had no request for too long."""
        found: list[OpenSequence] = []
        for sequence in tuple(self._resting):
            if sequence.rest_ns + self._idle_ns > now_ns:
                break
            self.close(sequence)
            found.append(sequence)
        return found

    def expire(self, now_ns: int) -> list[QueuedRequest]:
        """Give up the sequences that waited too long for a slot, and return their requests."""
        late = [each for each in self._backlog if 0 < each.deadline_ns <= now_ns]
        return [waiting for each in late for waiting in self.give_up(each)]

    # Slots.

    def add(self, owner: Hashable, count: int) -> tuple[SequenceSlot, ...]:
        """Free slots of somebody new; the backlog has them once `fill` is called."""
        slots = tuple([SequenceSlot(owner, number) for number in range(count)])
        self._free[owner] = [(slot.number, slot) for slot in slots]
        return slots

    def retire(self, slots: Sequence[SequenceSlot]) -> None:
        """Let no further sequence into these; those inside keep them."""
        self._free.pop(slots[0].owner, None)
        for slot in slots:
            slot.retired = True

    def fill(self, now_ns: int) -> OpenSequence | None:
        """Give a free slot to the head of the backlog; who has got it, None if there is nothing."""
        slot = self._take_free() if self._backlog else None
        if slot is None:
            return None
        sequence, _ = self._backlog.popitem(last=False)
        self._place(sequence, slot, now_ns)
        return sequence

    def release(self, sequence: OpenSequence, now_ns: int) -> OpenSequence | None:
        """Take its slot from a sequence; who has got it from the backlog, if anybody has."""
        slot = self._leave(sequence)
        if slot is None or slot.retired:
            return None
        if not self._backlog:
            self._set_free(slot)
            return None
        following, _ = self._backlog.popitem(last=False)
        self._place(following, slot, now_ns)
        return following

    def send_back(self, sequences: Iterable[OpenSequence]) -> None:
        """Put sequences that have not begun to the front of the backlog, in this order."""
        for sequence in reversed(tuple(sequences)):
            slot = self._leave(sequence)
            self._resting.pop(sequence, None)
            self._backlog[sequence] = None
            self._backlog.move_to_end(sequence, last=False)
            if slot is not None and not slot.retired:
                self._set_free(slot)

    def _begin(self, correlation_id: int | str, now_ns: int) -> OpenSequence:
        sequence = self._open[correlation_id] = OpenSequence(correlation_id)
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

    def _leave(self, sequence: OpenSequence) -> SequenceSlot | None:
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
