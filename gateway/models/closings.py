"""The closing of instances: concurrent, limited in time, in tasks that no caller cancels."""

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Iterable

from gateway.backend import Instance

log = logging.getLogger("sluice.model")

CLOSE_SECS = 60.0
"""Longest time for an instance to close while the server runs (seconds)."""
KILLED_SECS = 2.0
"""Longest time for an instance to close after it was killed (seconds)."""
EARLY_SECS = 1.0
"""Executions end this long before the server's limit, to leave time to close instances."""


class Closings:
    """Closes instances, and owns clean-ups that must outlive a cancelled caller.

    An instance that does not close in time is logged, and killed if its backend can kill it.
    """

    def __init__(self, limit_secs: float = CLOSE_SECS) -> None:
        self._limit_secs = limit_secs
        self._ends_at = float("inf")
        self._limits: dict[asyncio.Timeout, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def end_by(self, at: float) -> None:
        """Limit every closing, also those under way, to that time of the event loop."""
        self._ends_at = at
        for limit, early_secs in self._limits.items():
            if not limit.expired():
                limit.reschedule(min(at - early_secs, limit.when() or at))

    async def run(
        self,
        executing: Coroutine[None, None, None],
        instances: Callable[[], Iterable[Instance]],
        model: str,
    ) -> None:
        """Run a coroutine that executes; raises its error.

        If cancelled, the model's executions may take until the server's exit limit. Then the
        `instances` that still execute are killed.
        """
        task = asyncio.get_running_loop().create_task(executing)
        cancelled: asyncio.CancelledError | None = None
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
            task.cancel()
        if cancelled is None:
            return task.result()
        await _outlast({self.adopt(self._stop(task, instances, model))})
        if task.done() and not task.cancelled():
            task.result()
        raise cancelled

    async def run_within(
        self, secs: float, executing: Coroutine[None, None, None], instance: Instance
    ) -> bool:
        """Run a coroutine that executes on an instance; whether it has ended in that time.

        If not, it is cancelled; an instance that does not stop is killed.
        """
        task = asyncio.get_running_loop().create_task(executing)
        try:
            await asyncio.wait([task], timeout=secs)
        except asyncio.CancelledError:
            task.cancel()
            await _outlast({task})
            raise
        if task.done():
            task.result()
            return True
        task.cancel()
        await asyncio.wait([task], timeout=KILLED_SECS)
        if not task.done():
            await _kill([instance], "its execution did not end in time", task)
        return False

    def close(self, instance: Instance, name: str) -> asyncio.Future[None]:
        """Begin to close an instance; the future is its end, and never fails.

        If the future is cancelled, the instance still closes.
        """
        return asyncio.shield(self.adopt(self._close(instance, name)))

    def adopt(self, ending: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Run a coroutine to its end; `ended` waits for it."""
        task = asyncio.get_running_loop().create_task(ending)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return task

    async def ended(self) -> None:
        """Wait until everything has closed, even if cancelled; each closing has a limit."""
        await _outlast(self._tasks)

    async def _stop(
        self,
        executing: asyncio.Task[None],
        instances: Callable[[], Iterable[Instance]],
        model: str,
    ) -> None:
        if await self._in_time(executing, float("inf"), EARLY_SECS):
            return
        log.error("executions not ended in time", extra={"model": model})
        if not await _kill(instances(), "its execution did not end in time", executing):
            log.error("executions abandoned", extra={"model": model})

    async def _close(self, instance: Instance, name: str) -> None:
        closing = asyncio.ensure_future(instance.close())
        ends_at = asyncio.get_running_loop().time() + self._limit_secs
        if not await self._in_time(closing, ends_at):
            log.error("instance not closed in time", extra={"instance": name})
            if not await _kill([instance], "it did not close in time", closing):
                log.error("instance abandoned", extra={"instance": name})
        if closing.done() and not closing.cancelled() and (error := closing.exception()):
            # Around one closing: its error must not end the server.
            log.error("instance did not close", extra={"instance": name}, exc_info=error)

    async def _in_time(
        self, ending: asyncio.Future[None], ends_at: float, early_secs: float = 0.0
    ) -> bool:
        try:
            async with asyncio.timeout_at(min(self._ends_at - early_secs, ends_at)) as limit:
                self._limits[limit] = early_secs
                await asyncio.wait([ending])
        except TimeoutError:
            return False
        finally:
            del self._limits[limit]
        return True

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("clean-up of a model failed", exc_info=error)


async def _kill(instances: Iterable[Instance], reason: str, ending: asyncio.Future[None]) -> bool:
    """Kill instances; whether the future has ended by itself."""
    for instance in instances:
        instance.kill(reason)
    await asyncio.wait([ending], timeout=KILLED_SECS)
    if ending.done():
        return True
    ending.cancel()
    await asyncio.wait([ending], timeout=KILLED_SECS)
    return False


async def _outlast(tasks: Collection[asyncio.Task[None]]) -> None:
    """Wait until all are done, even if cancelled; the cancellation is raised afterwards."""
    cancelled: asyncio.CancelledError | None = None
    while waiting := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(waiting)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
