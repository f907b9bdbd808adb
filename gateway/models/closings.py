"""The end of instances: side by side, within a time limit, in tasks that no caller cancels."""

import asyncio
import logging
from collections.abc import Coroutine

from gateway.backend import Instance

log = logging.getLogger("sluice.model")

CLOSE_SECS = 60.0
"""Longest time for an instance to close while the server goes on."""
KILLED_SECS = 2.0
"""Longest time for an instance to close after it was killed."""


class Closings:
    """Closes instances, and owns what must be done to its end after its caller was cancelled.

    An instance that does not close in time is logged, and killed if its backend can.
    """

    def __init__(self, limit_secs: float = CLOSE_SECS) -> None:
        self._limit_secs = limit_secs
        self._ends_at = float("inf")
        self._limits: set[asyncio.Timeout] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def end_by(self, at: float) -> None:
        """Limit every closing, also those under way, to that time of the event loop."""
        self._ends_at = at
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(min(at, limit.when() or at))

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
        """Wait until everything has closed, also if cancelled: the time of each is bounded."""
        cancelled: asyncio.CancelledError | None = None
        while self._tasks:
            try:
                await asyncio.wait(self._tasks)
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled

    async def _close(self, instance: Instance, name: str) -> None:
        closing = asyncio.ensure_future(instance.close())
        if not await self._in_time(closing):
            log.error("instance not closed in time", extra={"instance": name})
            instance.kill("it did not close in time")
            await asyncio.wait([closing], timeout=KILLED_SECS)
            if not closing.done():
                log.error("instance abandoned", extra={"instance": name})
                closing.cancel()
                await asyncio.wait([closing], timeout=KILLED_SECS)
        if closing.done() and not closing.cancelled() and (error := closing.exception()):
            # The end of one model's life: its error must not end the server.
            log.error("instance did not close", extra={"instance": name}, exc_info=error)

    async def _in_time(self, closing: asyncio.Future[None]) -> bool:
        ends_at = min(self._ends_at, asyncio.get_running_loop().time() + self._limit_secs)
        try:
            async with asyncio.timeout_at(ends_at) as limit:
                self._limits.add(limit)
                await asyncio.wait([closing])
        except TimeoutError:
            return False
        finally:
            self._limits.discard(limit)
        return True

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("end of a model failed", exc_info=error)
