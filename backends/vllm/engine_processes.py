"""The engine's processes: their exit with the server, and their end.

An interrupt from the terminal reaches the server only, which drains requests first. This module
imports nothing of vLLM: a process follows its parent before it has imported vLLM.
"""

import asyncio
import multiprocessing
import os
import select
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from backends.vllm.start_reports import StartReporter
from gateway.errors import Code, InferenceError
from gateway.process_limits import collect_garbage_rarely

EXIT_CODE = 1
POLL_SECS = 1.0
THREAD = "follow-parent"

Result = TypeVar("Result")

STOPPED = "its engine has stopped"


def follow_parent() -> None:
    """Exit this process as soon as its parent exits, if multiprocessing started it.

    In other processes, such as the server, this has no effect. vLLM calls it in each of its
    processes: it is an entry point of the group `vllm.general_plugins`.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        follow(parent.pid or 0)


class FollowingSettings(dict[str, Any]):
    """Settings of an engine that make the process that unpickles them follow its parent.

    They also remove it from the process group that a terminal interrupts, let it collect garbage
    rarely, and pass it the reporter of its start. vLLM's plugins are too late for that: they come
    after the import of vLLM, and without its parent a new process waits minutes for them.
    """

    def __init__(self, settings: Mapping[str, Any], reporter: StartReporter) -> None:
        super().__init__(settings)
        self._reporter = reporter

    def __reduce__(self) -> Any:
        return _arrive, (dict(self), os.getpid(), self._reporter)


def _arrive(settings: dict[str, Any], sender: int, reporter: StartReporter) -> FollowingSettings:
    if sender != os.getpid():
        follow(sender)
        collect_garbage_rarely()
        reporter.watch_log()
        with suppress(PermissionError):  # a session leader has no terminal
            os.setpgrp()
    return FollowingSettings(settings, reporter)


def follow(parent: int) -> None:
    """Exit this process as soon as its parent, process `parent`, exits."""
    if all(thread.name != THREAD for thread in threading.enumerate()):
        threading.Thread(target=_end_after, args=(parent,), name=THREAD, daemon=True).start()


def _end_after(parent: int) -> None:
    wait_for_exit(parent)
    # Not sys.exit: the main thread may be computing, or waiting for its dead parent.
    os._exit(EXIT_CODE)


def wait_for_exit(parent: int) -> None:
    """Block until process `parent` exits; return immediately if it is not the parent."""
    try:
        descriptor = os.pidfd_open(parent)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):  # not available, or not permitted
        _poll_for_exit(parent)
        return
    try:
        # If it is still the parent, the descriptor is not that of a later process.
        if os.getppid() == parent:
            _wait_until_readable(descriptor)
    finally:
        os.close(descriptor)


def _wait_until_readable(descriptor: int) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    poll.poll()


def _poll_for_exit(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_SECS)


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
