"""Hand requests over one by one, at once: the default, and for engines that batch in flight."""

import asyncio
from collections import deque

from gateway.backend import Instance
from gateway.errors import InferenceError
from gateway.observability.statistics import ModelStatistics
from gateway.schedulers.execution import execute
from gateway.schedulers.scheduler import Entry, Scheduler


class DirectScheduler(Scheduler):
    """First in, first out, each request an execution of its own.

    An instance with a `concurrency` takes that many executions at once and later requests wait;
    one without takes every request as it comes.
    """

    def __init__(self, statistics: ModelStatistics) -> None:
        self._statistics = statistics
        self._queue: deque[Entry] = deque()
        self._free: deque[Instance] = deque()
        self._instances: list[Instance] = []
        self._running: dict[asyncio.Task[None], tuple[Instance, Entry]] = {}
        self._tasks: asyncio.TaskGroup | None = None

    def submit(self, entry: Entry) -> None:
        self._queue.append(entry)
        self._dispatch()

    def add(self, instance: Instance) -> None:
        self._instances.append(instance)
        self._free.extend([instance] * (instance.concurrency or 1))
        self._dispatch()

    def remove(self, instance: Instance, error: InferenceError) -> None:
        self._forget(instance)
        for executing, entry in tuple(self._running.values()):
            if executing is instance:
                entry.stream.abandon(error)

    async def withdraw(self, instance: Instance) -> None:
        self._forget(instance)
        if executing := [task for task, (each, _) in self._running.items() if each is instance]:
            await asyncio.wait(executing)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            try:
                self._dispatch()
                await asyncio.Event().wait()
            finally:
                self._tasks = None

    def _forget(self, instance: Instance) -> None:
        self._instances.remove(instance)
        self._free = deque(free for free in self._free if free is not instance)

    def _dispatch(self) -> None:
        while self._tasks is not None and self._queue and self._free:
            entry = self._queue.popleft()
            if not entry.stream.done:
                self._start(entry, self._tasks)

    def _start(self, entry: Entry, tasks: asyncio.TaskGroup) -> None:
        instance = self._free.popleft()
        task = tasks.create_task(execute(instance, [entry], self._statistics))
        self._running[task] = (instance, entry)
        task.add_done_callback(self._finished)
        if instance.concurrency is None:
            self._free.append(instance)

    def _finished(self, task: asyncio.Task[None]) -> None:
        instance, _ = self._running.pop(task)
        if instance.concurrency is not None and instance in self._instances:
            self._free.append(instance)
            self._dispatch()
