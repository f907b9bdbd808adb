"""Detection of engines that stop: the event loop watches their processes."""

import asyncio
import os
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from gateway.errors import Code, InferenceError

Result = TypeVar("Result")

STOPPED = "its engine has stopped"


class Watch:
    """Detects the exit of an engine's processes, without polling; `death` becomes the reason.

    Created on the event loop while the processes run; closed before they are stopped.
    """

    def __init__(self, processes: Sequence[BaseProcess]) -> None:
        self._loop = asyncio.get_running_loop()
        self.death: asyncio.Future[str] = self._loop.create_future()
        self._descriptors: list[int] = []
        self._closed = False
        self._processes = tuple(processes)
        for process in processes:
            if not self.death.done():
                self._add(process)

    @property
    def over(self) -> bool:
        """Whether the engine has stopped."""
        return self.death.done()

    async def unless_ended(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of `work` in the engine; InferenceError if the engine stops first."""
        working = asyncio.ensure_future(work)
        try:
            await asyncio.wait((working, self.death), return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            raise InferenceError(Code.INTERNAL, self.death.result())
        finally:
            working.cancel()

    def add_task(self, task: asyncio.Future[Any]) -> None:
        """Report the engine as stopped when a task ends: the reader of its messages."""
        task.add_done_callback(lambda _: self.report(STOPPED))

    def report(self, reason: str) -> None:
        """Report that the engine has stopped."""
        if not self._closed and not self.death.done():
            self.death.set_result(reason)

    def kill(self, reason: str) -> None:
        """Kill the processes, and report the reason."""
        self.report(f"{STOPPED}: {reason}")
        for process in self._processes:
            with suppress(ValueError):  # already closed by vLLM
                process.kill()

    def close(self) -> None:
        """Stop watching; the engine may be stopped then."""
        self._closed = True
        while self._descriptors:
            descriptor = self._descriptors.pop()
            self._loop.remove_reader(descriptor)
            os.close(descriptor)

    def _add(self, process: BaseProcess) -> None:
        try:
            descriptor = exit_descriptor(process)
        except ProcessLookupError:
            self._exited(process)
            return
        self._descriptors.append(descriptor)
        self._loop.add_reader(descriptor, self._exited, process)

    def _exited(self, process: BaseProcess) -> None:
        code = process.exitcode
        how = "" if code is None else f" (exit code {code})"
        self.report(f"{STOPPED}{how}")
        self.close()


def exit_descriptor(process: BaseProcess) -> int:
    """A descriptor that becomes readable when the process exits; the caller closes it."""
    try:
        return os.pidfd_open(process.pid or 0)
    except ProcessLookupError:
        raise
    except (AttributeError, OSError):  # not available, or not permitted
        return os.dup(process.sentinel)
