"""The sequences of one instance, and the tasks that execute their requests."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from gateway.backend import Instance
from gateway.errors import InferenceError
from gateway.observability.statistics import ModelStatistics
from gateway.schedulers.execution import Entry, Execution
from gateway.schedulers.rate_limiter import Registration
from gateway.schedulers.response_order import ResponseOrder
from gateway.schedulers.scheduler import FreeInstances, Lease, Timer
from gateway.sequences.inputs import ExecutionInputs
from gateway.sequences.ready_requests import ReadyRequests, Row
from gateway.sequences.table import OpenSequence, SequenceSlot

Task = asyncio.Task[None]


@dataclass(frozen=True, slots=True)
class SequenceEvents:
    """Callbacks for sequences that no longer need their slots, and for executed rows.

    `rescheduled` is called before `executed`, with a row whose request is to be executed again;
    None if the model is not iterative.
    """

    slot_unneeded: Callable[[OpenSequence], None]
    executed: Callable[[Sequence[Row]], None]
    rescheduled: Callable[[Row], None] | None = None


class InstanceSequences:
    """Executes the ready requests of its sequences on one instance.

    As in the dynamic batcher, a task starts when the instance is free and a batch is due, forms
    its batch when it runs, and continues while batches are due. `tasks` owns the tasks.
    """

    def __init__(
        self,
        instance: Instance,
        slots: Sequence[SequenceSlot],
        ready: ReadyRequests,
        events: SequenceEvents,
        statistics: ModelStatistics,
        order: ResponseOrder | None,
    ) -> None:
        self.slots = slots
        self.tasks: asyncio.TaskGroup | None = None
        self._instance = instance
        self._ready = ready
        self._events = events
        self._statistics = statistics
        self._order = order
        self._inputs: ExecutionInputs | None = None
        self._free = FreeInstances(self.consider)
        self._delay = Timer(self.consider)
        self._starting: Task | None = None
        self._running: dict[Task, tuple[Execution, Sequence[Row]]] = {}
        self._held: dict[Task, Sequence[Row]] = {}
        self._emptied: asyncio.Future[None] | None = None

    def open(self, filling: ExecutionInputs, registration: Registration | None) -> None:
        """Start using the instance."""
        self._inputs = filling
        self._free.add(self._instance, registration)

    def offer(self, sequence: OpenSequence) -> bool:
        """Make the next request of a sequence ready, which is not busy.

        True if the sequence no longer needs its slot.
        """
        if self._order is not None:
            self._order.arrived(sequence.waiting[0].entry.stream)
        return self._ready.offer(sequence)

    def drop(self, sequence: OpenSequence) -> list[Entry]:
        """Remove the ready request of a sequence; return it unless it is in `waiting`."""
        waiting = self._ready.drop(sequence)
        if not self._ready:
            self._free.rest()
        if waiting is None:
            return []
        waiting.queued = False
        if self._order is not None:
            self._order.left(waiting.entry.stream)
        return [waiting.entry]

    def drop_unbegun(self) -> list[OpenSequence]:
        """Remove and return the sequences without any execution, with all of their requests."""
        found = self._ready.drop_unbegun()
        if self._order is not None:
            for sequence in found:
                self._order.left(sequence.waiting[0].entry.stream)
        return found

    @property
    def busy(self) -> bool:
        """Whether the instance cannot take an execution now."""
        return not self._free.instances

    @property
    def executions(self) -> list[Execution]:
        """The executions that have not ended."""
        return [execution for execution, _ in self._running.values()]

    @property
    def sequences(self) -> list[OpenSequence]:
        """All sequences that have a slot or a ready request."""
        inside = [slot.sequence for slot in self.slots if slot.sequence is not None]
        return list(dict.fromkeys([*inside, *self._ready.sequences]))

    def consider(self) -> None:
        """Start a task if the instance is free and a batch is due; else set the timer."""
        if self.tasks is None or self._starting is not None or not self._ready:
            return
        if not self._free.instances or self._blocked or not self._is_due():
            return
        lease = self._free.take()
        if lease is None:
            return
        task = self.tasks.create_task(self._serve(lease))
        task.add_done_callback(partial(self._finished, lease))
        self._starting = task

    def fail(self, error: InferenceError) -> None:
        """Stop using a dead instance: the requests that it was executing get the error."""
        self._free.remove(self._instance)
        self._delay.clear()
        for execution, rows in tuple(self._running.values()):
            for row in rows:
                row.waiting.entry.stream.abandon(error)
            execution.stop()

    def emptied(self) -> asyncio.Future[None]:
        """Stop using the instance once no slot has a sequence and nothing executes, at the end.

        Its slots are retired.
        """
        if self._emptied is None:
            self._emptied = asyncio.get_running_loop().create_future()
        self.notice_empty()
        return self._emptied

    def notice_empty(self) -> None:
        """End `emptied` if that is due: a slot may have become free."""
        if self._emptied is None or self._emptied.done() or self._running or self._ready:
            return
        if all(not each.sequence for each in self.slots):
            self._free.remove(self._instance)
            self._emptied.set_result(None)

    def rest(self) -> None:
        """Start no further tasks: the scheduler ends."""
        self.tasks = None
        self._delay.clear()

    @property
    def _blocked(self) -> bool:
        return self._order is not None and self._order.blocked

    def _is_due(self) -> bool:
        if not self._ready.delays:
            return True
        decision = self._ready.decide(time.monotonic_ns())
        if decision.until_ns:
            self._delay.set(decision.until_ns)
        return bool(decision.rows)

    # Tasks.

    async def _serve(self, lease: Lease) -> None:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - a coroutine runs in a task
        while (execution := self._take(task, lease)) is not None:
            try:
                await execution.run()
            finally:
                self._ended(task)
            if lease.ended or self._free.limited:  # the next execution needs another turn
                return

    def _execution(self, task: Task, lease: Lease, rows: Sequence[Row | None]) -> Execution:
        assert self._inputs is not None  # noqa: S101 - no task is started before `open`
        entries, call = self._inputs.prepare(self._instance, rows)
        make = partial(
            Execution,
            *(self._instance, entries, self._statistics),
            freed=partial(self._freed, lease, task),
            call=call,
        )
        if self._events.rescheduled is None:
            return make()
        by_stream: dict[object, Row] = {row.waiting.entry.stream: row for row in rows if row}
        return make(rescheduled=partial(self._reschedule, by_stream))

    def _take(self, task: Task, lease: Lease) -> Execution | None:
        """The execution that is due on the instance, if any."""
        if self._starting is task:
            self._starting = None
        if not self._ready or self._blocked or not self._free.knows(self._instance):
            return None
        rows = self._ready.decide(time.monotonic_ns()).rows
        execution: Execution | None = None
        if rows:
            self._delay.clear()
            execution = self._execution(task, lease, rows)
            self._begin(task, execution, rows)
        self.consider()
        return execution

    def _begin(self, task: Task, execution: Execution, rows: Sequence[Row | None]) -> None:
        present = [row for row in rows if row is not None]
        self._running[task] = (execution, present)
        self._held[task] = present
        for row in present:
            row.waiting.queued = False
            row.sequence.begun = True
        if self._order is not None:
            self._order.started(row.waiting.entry.stream for row in present)
        for sequence in self._ready.take(rows):
            self._events.slot_unneeded(sequence)

    def _reschedule(self, rows: dict[object, Row], entry: Entry) -> None:
        assert self._events.rescheduled is not None  # noqa: S101 - else it is not called
        self._events.rescheduled(rows[entry.stream])

    def _freed(self, lease: Lease, task: Task) -> None:
        """The instance takes another execution: the sequences of these rows may continue."""
        self._events.executed(self._held.pop(task, ()))
        lease.release()

    def _ended(self, task: Task) -> None:
        _, rows = self._running.pop(task)
        if self._order is not None:
            self._order.ended(row.waiting.entry.stream for row in rows)
        self._events.executed(self._held.pop(task, ()))
        self.notice_empty()

    def _finished(self, lease: Lease, task: Task) -> None:
        if self._starting is task:
            self._starting = None
        lease.release()
