"""The default scheduler: each request is an execution of its own."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Iterable
from functools import partial

from gateway.backend import Instance
from gateway.errors import InferenceError
from gateway.observability.statistics import ModelStatistics
from gateway.schedulers.execution import Entry, Execution
from gateway.schedulers.rate_limiter import Registration
from gateway.schedulers.scheduler import FreeInstances, Lease, Scheduler, all_ended


class DirectScheduler(Scheduler):
    """A FIFO queue of requests.

    An instance takes as many executions at once as its `concurrency` says. An instance without a
    `concurrency`, such as an engine that batches in flight, takes every request immediately.
    """

    def __init__(self, statistics: ModelStatistics) -> None:
        self._statistics = statistics
        self._queue: OrderedDict[Entry, None] = OrderedDict()
        self._free = FreeInstances(self._dispatch)
        self._running: dict[asyncio.Task[None], Execution] = {}
        self._tasks: asyncio.TaskGroup | None = None

    def submit(self, entry: Entry) -> None:
        self._queue[entry] = None
        self._dispatch()
        if entry in self._queue:  # a cancelled request leaves the queue immediately
            entry.stream.on_cancel(partial(self._cancelled, entry))

    def add(self, instance: Instance, registration: Registration | None = None) -> None:
        self._free.add(instance, registration)
        self._dispatch()

    def remove(self, instance: Instance, error: InferenceError | None = None) -> Awaitable[object]:
        self._free.remove(instance)
        running = {task: each for task, each in self._running.items() if each.instance is instance}
        if error is not None:
            for execution in running.values():
                if not execution.refuse():
                    execution.entries[0].stream.abandon(error)
        return all_ended(running)

    @property
    def executions(self) -> Iterable[Execution]:
        return tuple(self._running.values())

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            try:
                self._dispatch()
                await asyncio.Event().wait()
            finally:
                self._tasks = None

    def _cancelled(self, entry: Entry) -> None:
        self._queue.pop(entry, None)
        if not self._queue:
            self._free.rest()

    def _dispatch(self) -> None:
        while self._tasks is not None and self._queue:
            lease = self._free.take()
            if lease is None:
                return
            entry, _ = self._queue.popitem(last=False)
            execution = Execution(lease.instance, [entry], self._statistics, freed=lease.release)
            task = self._tasks.create_task(execution.attempt())
            self._running[task] = execution
            task.add_done_callback(partial(self._finished, lease))

    def _finished(self, lease: Lease, task: asyncio.Task[None]) -> None:
        execution = self._running.pop(task)
        if execution.unsent:
            self._put_back(execution.entries[0])
        lease.release()

    def _put_back(self, entry: Entry) -> None:
        """Queue a request that its instance did not receive, at its place in the order."""
        if entry.stream.done:
            return
        waiting = sorted((entry, *self._queue), key=lambda each: each.record.submitted_ns)
        self._queue = OrderedDict.fromkeys(waiting)
        entry.stream.on_cancel(partial(self._cancelled, entry))
