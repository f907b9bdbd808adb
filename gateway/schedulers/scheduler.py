"""The interface of schedulers, the default scheduler, free instances, and timers."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from functools import partial

from gateway.backend import Instance
from gateway.errors import InferenceError
from gateway.messages import InferRequest
from gateway.observability.receipt_parts import NO_HOLD, Bound, Hold
from gateway.observability.statistics import ModelStatistics
from gateway.schedulers.begun_executions import BegunExecutions, all_ended
from gateway.schedulers.execution import Entry, Execution
from gateway.schedulers.parts import LimitedQueue, OpenSequences, Preparation
from gateway.schedulers.rate_limiter import ExecutionLimiter, Registration
from gateway.schedulers.response_order import ResponseOrder

NS_PER_MS = 1_000_000
MS_PER_SECOND = 1000


class Scheduler(ABC):
    """Executes entries on instances. One task owns `run`; synchronous methods never wait.

    Requests: `admit`, then `submit`. Instances: `preparation`, `add`, then `remove`.
    """

    preparation: Preparation | None = None
    """The preparation of each instance; None if it needs none."""
    sequences: OpenSequences | None = None
    """The open sequences; None if the model has none."""
    limited: LimitedQueue | None = None
    """The queue, if `admit` limits its size."""
    order: ResponseOrder | None = None
    """The order of all responses, which those of the response cache keep too; None without one."""

    def admit(self, request: InferRequest) -> None:  # noqa: B027 - optional
        """Raise InferenceError if the queue cannot take this request; comes before `submit`."""

    @abstractmethod
    def submit(self, entry: Entry) -> None:
        """Queue an entry; the order of calls is the order of the queue."""

    @abstractmethod
    def add(self, instance: Instance, registration: Registration | None = None) -> None:
        """Execute on this instance; with a registration, only in turns of the rate limiter."""

    @abstractmethod
    def remove(self, instance: Instance, error: InferenceError | None = None) -> Awaitable[object]:
        """Stop using an instance at once; the result ends after its last execution.

        The requests that a dead instance was executing get the error. A second call with an error
        may follow if it dies meanwhile. The executions continue if the wait is cancelled.
        """

    @property
    @abstractmethod
    def executions(self) -> Iterable[Execution]:
        """The executions that have not ended."""

    @abstractmethod
    async def run(self) -> None:
        """Own the tasks of the executions until cancelled."""


class FreeInstances:
    """The instances that can take one more execution, in the order in which they became free.

    `on_free` is called when an instance may have become free. An instance that is registered with
    a rate limiter also needs its turn; `on_free` is called in its turn, which ends with that call.
    `instances` are the free ones; one that takes any number of executions stays among them.
    They are `limited` if a rate limiter gives turns. Queued requests wait for the limit `hold`.
    An `unlimited` instance is the only one, and takes any number of executions without a lease.
    """

    def __init__(self, on_free: Callable[[], None]) -> None:
        self._on_free = on_free
        self.instances: deque[Instance] = deque()
        self.limited = False
        self.hold: Hold = NO_HOLD
        self.unlimited: Instance | None = None
        self._known: set[Instance] = set()
        self._limiter: ExecutionLimiter | None = None
        self._registrations: dict[Instance, Registration] = {}
        self._executing: Counter[Instance] = Counter()
        self._offered: Instance | None = None

    def knows(self, instance: Instance) -> bool:
        """Whether it may execute: it was added, not removed since, and is alive."""
        return instance in self._known and instance.alive

    @property
    def first(self) -> Instance:
        """The instance to be taken next, unless the rate limiter offers another; not if empty."""
        return self._offered or self.instances[0]

    def add(self, instance: Instance, registration: Registration | None = None) -> None:
        """Add an instance, free for all executions that it takes at once."""
        self._known.add(instance)
        if registration is not None:
            self._limiter, self.limited = registration.limiter, True
            self._registrations[instance] = registration
        self.instances.extend([instance] * (instance.concurrency or 1))
        self._find_unlimited()

    def remove(self, instance: Instance) -> None:
        """Remove an instance; its leases stay valid."""
        self._known.discard(instance)
        self.instances = deque(free for free in self.instances if free is not instance)
        if self._offered is instance:
            self._offered = None
        self._forget_registration(instance)
        self._find_unlimited()
        if not self._known:
            self.rest()

    def _find_unlimited(self) -> None:
        known = [each for each in self._known if each.concurrency is None and not self.limited]
        self.unlimited = known[0] if len(known) == len(self._known) == 1 else None

    def take(self) -> "Lease | None":
        """A lease of the next instance; None if no instance is free, or it is not its turn."""
        if self._limiter is not None:
            return self._take_turn(self._limiter)
        while self.instances:
            instance = self.instances.popleft()
            if not instance.alive:  # it is about to be removed
                continue
            if instance.concurrency is None:
                self.instances.append(instance)
            return Lease(self, instance)
        return None

    def release(self, instance: Instance) -> None:
        """Return an instance whose lease has ended."""
        if instance.concurrency is not None and instance in self._known and instance.alive:
            self.instances.append(instance)
        if self._limiter is not None:
            self._executing[instance] -= 1
            self._limiter.ended(self._registrations[instance])
            self._forget_registration(instance)
        self._on_free()

    def rest(self) -> None:
        """Withdraw from the rate limiter: nothing is queued for these instances."""
        self.hold = NO_HOLD
        if self._limiter is not None:
            self._limiter.rest(self)

    def _take_turn(self, limiter: ExecutionLimiter) -> "Lease | None":
        instance, self._offered = self._offered, None
        if instance is None:
            limiter.ask(self)
            if self.instances:
                self.hold = self.hold.also(Bound.TURN)
            return None
        self.instances.remove(instance)
        if instance.concurrency is None:
            self.instances.append(instance)
        self._executing[instance] += 1
        limiter.began(self._registrations[instance])
        return Lease(self, instance)

    def _forget_registration(self, instance: Instance) -> None:
        if instance not in self._known and not self._executing[instance]:
            self._registrations.pop(instance, None)
            del self._executing[instance]

    # Called by the rate limiter.

    def candidates(self) -> Iterator[tuple[Instance, Registration]]:
        """Each free instance that is alive, with its registration."""
        free = dict.fromkeys(self.instances)
        return ((each, self._registrations[each]) for each in free if each.alive)

    def offer(self, instance: Instance) -> None:
        """Give an instance its turn."""
        self._offered = instance
        try:
            self._on_free()
        finally:
            self._offered = None


class Lease:
    """An instance that was taken for one execution; ends with the execution at the latest."""

    __slots__ = ("_free", "ended", "instance")

    def __init__(self, free: FreeInstances, instance: Instance) -> None:
        self.instance = instance
        self.ended = False
        self._free = free

    def release(self) -> None:
        """Return the instance; no effect if it has been returned."""
        if not self.ended:
            self.ended = True
            self._free.release(self.instance)


class DirectScheduler(Scheduler):
    """A FIFO queue of requests.

    An instance takes as many executions at once as its `concurrency` says. An instance without a
    `concurrency`, such as an engine that batches in flight, takes every request immediately:
    `_shared` counts them by tenant. A request is executed without a task if its instance can.
    """

    def __init__(self, statistics: ModelStatistics) -> None:
        self._statistics = statistics
        self._queue: OrderedDict[Entry, None] = OrderedDict()
        self._free = FreeInstances(self._dispatch)
        self._shared: dict[Instance, dict[str, int]] = {}
        self._running: dict[asyncio.Task[None], Execution] = {}
        self._begun = BegunExecutions()
        self._tasks: asyncio.TaskGroup | None = None
        self._dispatching = False

    def submit(self, entry: Entry) -> None:
        only = self._free.unlimited
        if only is not None and self._tasks is not None and not self._queue and only.alive:
            singles = only.singles
            if singles is not None and singles.accepts(entry.request):
                execution = Execution(only, [entry], self._statistics)
                self._share(execution)
                self._begun.begin(singles, execution, partial(self._ended, None, execution))
                return
        self._queue[entry] = None
        self._dispatch()
        if entry in self._queue:  # a cancelled request leaves the queue immediately
            entry.stream.on_cancel(partial(self._cancelled, entry))

    def add(self, instance: Instance, registration: Registration | None = None) -> None:
        if instance.concurrency is None:
            self._shared[instance] = {}
        self._free.add(instance, registration)
        self._dispatch()

    def remove(self, instance: Instance, error: InferenceError | None = None) -> Awaitable[object]:
        self._free.remove(instance)
        self._shared.pop(instance, None)
        running = {task: each for task, each in self._running.items() if each.instance is instance}
        return all_ended(running | self._begun.of(instance), error)

    @property
    def executions(self) -> Iterable[Execution]:
        return (*self._running.values(), *self._begun)

    async def run(self) -> None:
        async with self._begun, asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            try:
                self._dispatch()
                await asyncio.Event().wait()
            finally:
                self._tasks = None
                self._begun.cancel()

    def _cancelled(self, entry: Entry) -> None:
        self._queue.pop(entry, None)
        if not self._queue:
            self._free.rest()

    def _dispatch(self) -> None:
        if self._dispatching:
            return  # an execution ended as it began: the outer call continues
        self._dispatching = True
        try:
            while self._tasks is not None and self._queue:
                lease = self._free.take()
                if lease is None:
                    return
                entry, _ = self._queue.popitem(last=False)
                self._execute(self._tasks, lease, entry)
        finally:
            self._dispatching = False

    def _execute(self, tasks: asyncio.TaskGroup, lease: Lease, entry: Entry) -> None:
        execution = Execution(lease.instance, [entry], self._statistics, freed=lease.release)
        execution.hold, self._free.hold = self._free.hold, NO_HOLD
        self._share(execution)
        if (singles := lease.instance.singles) is not None and singles.accepts(entry.request):
            self._begun.begin(singles, execution, partial(self._ended, lease, execution))
            return
        task = tasks.create_task(execution.attempt())
        self._running[task] = execution
        task.add_done_callback(partial(self._finished, lease))

    def _share(self, execution: Execution) -> None:
        shared = execution.shared = self._shared.get(execution.instance)
        if shared is not None:
            caller = execution.entries[0].request.caller
            tenant = "" if caller is None else caller.tenant  # as `tenant_of`, without a call
            shared[tenant] = shared.get(tenant, 0) + 1

    def _unshare(self, execution: Execution, shared: dict[str, int]) -> None:
        caller = execution.entries[0].request.caller
        tenant = "" if caller is None else caller.tenant
        shared[tenant] -= 1
        if not shared[tenant]:
            del shared[tenant]

    def _finished(self, lease: Lease, task: asyncio.Task[None]) -> None:
        self._ended(lease, self._running.pop(task))

    def _ended(self, lease: Lease | None, execution: Execution) -> None:
        if execution.shared is not None:
            self._unshare(execution, execution.shared)
        if execution.unsent:
            self._put_back(execution.entries[0])
        if lease is not None:
            lease.release()
        elif execution.unsent:
            self._dispatch()

    def _put_back(self, entry: Entry) -> None:
        """Queue a request that its instance did not receive, at its place in the order."""
        if entry.stream.done:
            return
        waiting = sorted((entry, *self._queue), key=lambda each: each.record.submitted_ns)
        self._queue = OrderedDict.fromkeys(waiting)
        entry.stream.on_cancel(partial(self._cancelled, entry))


class Timer:
    """Calls back once, at the earliest time that was set.

    Event loops wait for whole milliseconds, but batches wait for tens of microseconds: below a
    millisecond the timer takes one turn of the loop after the other, unless it may be `late` by a
    millisecond. Times are those of `time.monotonic_ns`.
    """

    def __init__(self, callback: Callable[[], None], *, late: bool = False) -> None:
        self._callback = callback
        self._late_ns = NS_PER_MS if late else 0
        self._at_ns = 0
        self._handle: asyncio.Handle | None = None

    def set(self, at_ns: int) -> None:
        """Call back at that time, unless an earlier time is set."""
        if self._handle is not None:
            if self._at_ns <= at_ns:
                return
            self._handle.cancel()
        self._at_ns = at_ns
        self._wait()

    @property
    def is_set(self) -> bool:
        """Whether it will call back."""
        return self._handle is not None

    def clear(self) -> None:
        """Cancel the call."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _wait(self) -> None:
        loop = asyncio.get_running_loop()
        left_ms = (self._at_ns + self._late_ns - time.monotonic_ns()) // NS_PER_MS
        if left_ms > 0:
            self._handle = loop.call_later(left_ms / MS_PER_SECOND, self._ring)
        else:
            self._handle = loop.call_soon(self._ring)

    def _ring(self) -> None:
        if time.monotonic_ns() < self._at_ns:
            self._wait()
            return
        self._handle = None
        self._callback()
