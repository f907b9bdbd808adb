"""The dynamic batcher: a queue of requests, and the tasks that execute its batches.

The rules for forming batches are in `batching.py`, by length in `length_batching.py`, and those of
the queue in `queue.py`.
"""

import asyncio
import time
from collections.abc import Awaitable, Iterable, Sequence
from functools import partial

from gateway.backend import Instance
from gateway.config import ModelConfig
from gateway.config.scheduling import DynamicBatching
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest
from gateway.observability.receipt_parts import NO_HOLD, Bound
from gateway.observability.statistics import QUEUE_TIMEOUT, ModelStatistics
from gateway.schedulers.batching import BatchWait, Decision, WaitHistory, most_rows
from gateway.schedulers.begun_executions import BegunExecutions, all_ended
from gateway.schedulers.execution import Entry, Execution
from gateway.schedulers.length_batching import BatchRules
from gateway.schedulers.queue import (
    QueueAdmission,
    QueuedRequest,
    QueueRules,
    RequestQueue,
    queue_full,
)
from gateway.schedulers.rate_limiter import Registration
from gateway.schedulers.response_order import ResponseOrder
from gateway.schedulers.scheduler import FreeInstances, Lease, Scheduler, Timer

MOST_WAITING = 8
"""Tasks of one model that wait for their next lease; each takes a few kilobytes."""
WAITING_NS = 20_000_000
"""A task that waits ends after this time, or twice as long."""
ALONE = 8
"""After that many batches of one request, the next one is not expected to have more."""

Batch = Sequence[QueuedRequest]
Task = asyncio.Task[None]


class DynamicScheduler(Scheduler):
    """Batches by the rules of `dynamic_batching`, and by length where inputs are padded.

    A task starts, or one that waits continues, when an instance is free and a batch is due. It
    forms its batch when it runs, so that requests of the same turn of the loop are in it; where
    that pays, it waits for some more turns (`WaitHistory`). It executes while batches are due, and
    waits then for WAITING_NS: the start and the end of a task cost a tenth of a small inference.

    A request that comes alone, as ALONE before it, is executed without a task if its instance can,
    and without being queued if the queue is empty.

    Implements `LimitedQueue`. Raises InferenceError INVALID_ARG if the config's padding is invalid.
    """

    def __init__(
        self, config: ModelConfig, batching: DynamicBatching, statistics: ModelStatistics
    ) -> None:
        self._statistics = statistics
        self.preparation = self._batch_rules = BatchRules(config, batching)
        self._rules = QueueRules(batching)
        self._admission = QueueAdmission(config, self._rules, self._batch_rules.padding)
        self._queue = RequestQueue(self._rules)
        self.limited = self if self._rules.limited else None
        self.order = ResponseOrder() if batching.preserve_ordering else None
        self._free = FreeInstances(self._consider)
        self._tasks: asyncio.TaskGroup | None = None
        self._starting: tuple[Task, Lease] | None = None
        self._waiting: list[tuple[Task, asyncio.Future[Lease | None]]] = []
        self._fewest_waiting = 0
        self._expiry = Timer(self._expire, late=True)
        self._running: dict[Task, tuple[Execution, Batch, Lease]] = {}
        self._begun = BegunExecutions()
        self._alone = 0
        self._delay = Timer(self._consider)
        self._timeout = Timer(self._timed_out)
        self._enough_rows = 0
        self._waits = WaitHistory()
        self._most_rows = most_rows(config, batching)
        self._delays = bool(batching.max_queue_delay_microseconds)
        self._may_gather = self._most_rows > 1 and not self._delays
        self._allows_singles = self.order is None and not self._delays

    def check(self, request: InferRequest) -> None:
        """See `LimitedQueue`."""
        self._admission.check(request)

    def admit(self, request: InferRequest) -> None:
        if self._admission.padded:
            self.check(request)
        if not self._rules.limited:
            return
        level = self._rules.level(request.priority)
        if not self._queue.full(level):
            return
        self._take_for_starting()
        if self._queue.full(level):
            raise queue_full(request)

    def queued(self, level: int) -> Iterable[Entry]:
        """See `LimitedQueue`."""
        self._take_for_starting()
        return [each.entry for each in self._queue.of(level)]

    def submit(self, entry: Entry) -> None:
        now_ns = time.monotonic_ns()
        if self._alone >= ALONE and not self._queue.rows and self._begin_unqueued(entry, now_ns):
            return
        waiting = self._admission.waiting(entry, now_ns)
        self._queue.push(waiting)
        entry.stream.on_cancel(partial(self._cancelled, waiting))
        if self.order is not None:
            self.order.arrived(entry.stream)
        if waiting.deadline_ns:
            self._timeout.set(waiting.deadline_ns)
        if self._starting is None and not (self._delays and self._batch_incomplete()):
            self._consider()

    def add(self, instance: Instance, registration: Registration | None = None) -> None:
        self._free.add(instance, registration)
        self._consider()

    def remove(self, instance: Instance, error: InferenceError | None = None) -> Awaitable[object]:
        self._free.remove(instance)
        self._batch_rules.forget(instance)
        running = {
            task: each for task, (each, *_) in self._running.items() if each.instance is instance
        }
        return all_ended(running | self._begun.of(instance), error)

    @property
    def executions(self) -> Iterable[Execution]:
        return [*(execution for execution, *_ in self._running.values()), *self._begun]

    async def run(self) -> None:
        async with self._begun, asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            try:
                self._consider()
                await asyncio.Event().wait()
            finally:
                self._tasks = None
                self._begun.cancel()
                self._waiting.clear()
                for timer in (self._expiry, self._delay, self._timeout):
                    timer.clear()

    # Starting tasks.

    def _batch_incomplete(self) -> bool:
        """Whether one more request cannot complete the batch that is waiting."""
        incomplete = self._queue.rows < self._enough_rows
        return incomplete and self._delay.is_set and self._admission.uniform

    def _consider(self) -> None:
        """Start a task if an instance is free and a batch is due; else look again when one is."""
        if self._tasks is None or self._starting is not None:
            return
        if not self._queue.rows or not self._free.instances:
            return
        if self.order is not None and self.order.blocked:
            return
        if self._delays and not self._batch_is_due(self._free.first):
            self._free.hold = self._free.hold.also(Bound.DELAY)
            return
        lease = self._free.take()
        if lease is None:
            return
        only = self._queue.only if self._alone >= ALONE and not self._queue.deadlines else None
        if only is not None and self._takes_single(only.entry, lease.instance):
            self._queue.remove((only,))
            self._begin_single(only.entry, only.arrived_ns, lease)
            return
        if self._waiting:
            task, waiter = self._waiting.pop()
            self._fewest_waiting = min(self._fewest_waiting, len(self._waiting))
            waiter.set_result(lease)
        else:
            task = self._tasks.create_task(self._serve(lease))
            task.add_done_callback(self._ended_early)
        self._starting = (task, lease)

    def _batch_is_due(self, instance: Instance) -> bool:
        now_ns = time.monotonic_ns()
        self._reject_expired(now_ns)
        decision = self._decision(instance, now_ns)
        if decision.until_ns:
            self._enough_rows = decision.enough_rows
            self._delay.set(decision.until_ns)
        return bool(decision.batch)

    def _decision(self, instance: Instance, now_ns: int) -> Decision:
        rules = self._batch_rules
        return rules.measured.get(instance, rules.usual).decide(self._queue, now_ns)

    # Executions without a task.

    def _begin_unqueued(self, entry: Entry, arrived_ns: int) -> bool:
        """Begin a request that is not queued; False if it has to be."""
        if self._tasks is None or self._starting is not None or self._free.limited:
            return False
        instance = self._free.instances[0] if self._free.instances else None
        if instance is None or not instance.alive or not self._takes_single(entry, instance):
            return False
        lease = self._free.take()
        assert lease is not None  # noqa: S101 - of the first instance
        self._begin_single(entry, arrived_ns, lease)
        return True

    def _takes_single(self, entry: Entry, instance: Instance) -> bool:
        """Whether a request without others needs no task; counts as a batch taken at once."""
        if not self._allows_singles or self._running or self._begun.ends:
            return False
        singles = instance.singles
        if singles is None or not singles.accepts(entry.request):
            return False
        return not self._may_gather or self._waits.passes()

    def _begin_single(self, entry: Entry, arrived_ns: int, lease: Lease) -> None:
        singles = lease.instance.singles
        assert singles is not None  # noqa: S101 - it has accepted the request
        execution = Execution(lease.instance, [entry], self._statistics, freed=lease.release)
        execution.hold, self._free.hold = self._free.hold, NO_HOLD
        ended = partial(self._begun_ended, execution, arrived_ns, lease)
        self._begun.begin(singles, execution, ended)

    def _begun_ended(self, execution: Execution, arrived_ns: int, lease: Lease) -> None:
        if self._queue.rows > 1 and len(self._queue) > 1:
            self._alone = 0  # several clients: their requests of one turn are a batch
        if execution.unsent:
            self._put_back([self._admission.waiting(execution.entries[0], arrived_ns)])
        lease.release()

    # Tasks.

    async def _serve(self, lease: Lease | None) -> None:
        """Execute with one lease after the other."""
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - a coroutine runs in a task
        while lease is not None:
            try:
                await self._execute(task, lease)
            finally:
                self._release(task, lease)
            if len(self._waiting) == MOST_WAITING or not self._free.knows(lease.instance):
                return  # `remove` waits for this end
            lease = None  # a task that waits keeps no instance
            waiter: asyncio.Future[Lease | None] = asyncio.get_running_loop().create_future()
            self._waiting.append((task, waiter))
            self._expiry.set(time.monotonic_ns() + WAITING_NS)
            lease = await waiter

    def _expire(self) -> None:
        """End the tasks that have waited since the last call: those at the front of the list."""
        for _, waiter in self._waiting[: self._fewest_waiting]:
            waiter.set_result(None)
        del self._waiting[: self._fewest_waiting]
        self._fewest_waiting = len(self._waiting)
        if self._waiting:
            self._expiry.set(time.monotonic_ns() + WAITING_NS)

    async def _execute(self, task: Task, lease: Lease) -> None:
        """Execute while batches are due; a task that waits keeps none of its requests."""
        if self._may_gather and self._waits.worthwhile:
            await self._let_more_arrive()
        taken = self._running.get(task)
        execution = taken[0] if taken is not None else self._take(task, lease)
        while execution is not None:
            try:
                await execution.attempt()
            finally:
                _, batch, _ = self._running.pop(task)
                if execution.unsent or self.order is not None:
                    self._ended(execution, batch)
            if not self._queue.rows or lease.ended or self._free.limited:
                return  # with a limit, the next execution needs another turn
            execution = self._take(task, lease)

    async def _let_more_arrive(self) -> None:
        self._free.hold = self._free.hold.also(Bound.DELAY)
        before, clock = self._queue.rows, time.monotonic_ns
        enough = self._waits.enough(self._most_rows)
        wait = BatchWait(before, clock())
        while not wait.over(self._queue.rows, enough, clock()):  # noqa: ASYNC110 - turns
            await asyncio.sleep(0)
        self._waits.waited(before, self._queue.rows, enough)

    def _take(self, task: Task, lease: Lease) -> Execution | None:
        """The execution that is due on the instance, if any."""
        instance = lease.instance
        if self._starting == (task, lease):
            self._starting = None
        now_ns = time.monotonic_ns()
        if self._queue.deadlines:
            self._reject_expired(now_ns)
        if not self._queue.rows or not self._free.knows(instance):
            return None
        if self.order is not None and self.order.blocked:
            return None
        batch = self._decision(instance, now_ns).batch
        execution: Execution | None = None
        if batch:
            self._alone = self._alone + 1 if len(batch) == 1 else 0
            if self._delays:
                self._delay.clear()
            entries = self._queue.remove(batch)
            execution = Execution(instance, entries, self._statistics, freed=lease.release)
            execution.hold, self._free.hold = self._free.hold, NO_HOLD
            self._running[task] = (execution, batch, lease)
            if self.order is not None:
                self.order.started(each.stream for each in entries)
        if self._queue.rows:
            self._consider()
        return execution

    def _take_for_starting(self) -> None:
        """Form the batches of tasks that are about to start, to make room in the queue."""
        while self._starting is not None:
            self._take(*self._starting)

    def _ended(self, execution: Execution, batch: Batch) -> None:
        if execution.unsent:
            self._put_back(batch)
        elif self.order is not None:
            self.order.ended(each.entry.stream for each in batch)

    def _put_back(self, batch: Batch) -> None:
        """Queue requests that their instance did not receive, at their places in the order."""
        for waiting in batch:
            stream = waiting.entry.stream
            if stream.done:
                if self.order is not None:
                    self.order.ended((stream,))
                continue
            self._queue.put_back(waiting)
            stream.on_cancel(partial(self._cancelled, waiting))
            if self.order is not None:
                self.order.returned(stream)
            if waiting.deadline_ns:
                self._timeout.set(waiting.deadline_ns)
        self._consider()

    def _release(self, task: Task, lease: Lease) -> None:
        if self._starting == (task, lease):
            self._starting = None
        lease.release()

    def _ended_early(self, task: Task) -> None:
        """Release the lease of a task that was cancelled before it could execute with it."""
        if self._starting is not None and self._starting[0] is task:
            self._release(*self._starting)
        if taken := self._running.pop(task, None):
            taken[2].release()

    # Requests that leave the queue without an execution.

    def _cancelled(self, waiting: QueuedRequest) -> None:
        if waiting.queued:
            self._queue.remove((waiting,))
            self._dropped(waiting)

    def _timed_out(self) -> None:
        self._reject_expired(time.monotonic_ns())
        if next_ns := self._queue.nearest_deadline_ns:
            self._timeout.set(next_ns)
        self._consider()

    def _reject_expired(self, now_ns: int) -> None:
        for waiting in self._queue.expire(now_ns):
            self._dropped(waiting)
            waiting.entry.stream.fail(InferenceError(Code.UNAVAILABLE, QUEUE_TIMEOUT))

    def _dropped(self, waiting: QueuedRequest) -> None:
        if not self._queue:
            self._free.rest()
        if self.order is not None:
            self.order.left(waiting.entry.stream)
