"""The engine's processes: their exit with the server, the errors that they send, and their end.

An interrupt from the terminal reaches the server only, which drains requests first. This module
imports nothing of vLLM: a process follows its parent before it has imported vLLM.
"""

import asyncio
import logging
import multiprocessing
import os
import select
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import get_spawning_popen
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd
from typing import Any, Self, TypeVar

from gateway.errors import Code, InferenceError

EXIT_CODE = 1
POLL_SECS = 1.0
THREAD = "follow-parent"

MAX_REASON = 500
MAX_MESSAGE_BYTES = 4000
"""Below PIPE_BUF, so that messages of several processes do not interleave."""

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


class ErrorSender:
    """Sends errors that are logged in this process; an argument of new processes."""

    def __init__(self, connection: Connection | None) -> None:
        self._connection = connection

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    def __reduce__(self) -> Any:
        # Descriptors are passed only to spawned processes: vLLM also pickles its settings itself.
        if self._connection is None or get_spawning_popen() is None:
            return ErrorSender, (None,)
        return _arrived, (DupFd(self._connection.fileno()),)

    def close(self) -> None:
        """Stop sending."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def watch_log(self) -> None:
        """Send each exception logged as an error from now on, as one line."""
        if (connection := self._connection) is None:
            return
        make = logging.getLogRecordFactory()

        # vLLM reconfigures its loggers while it starts, but not the factory of records.
        def record(*values: Any, **named: Any) -> logging.LogRecord:
            made = make(*values, **named)
            if made.levelno >= logging.ERROR and made.exc_info and made.exc_info[1]:
                _send(connection, made.exc_info[1])
            return made

        logging.setLogRecordFactory(record)


class FollowingSettings(dict[str, Any]):
    """Settings of an engine that make the process that unpickles them follow its parent.

    They also remove it from the process group that a terminal interrupts, and pass it the sender
    of its errors. vLLM's plugins are too late for that: without its parent, a new process waits
    minutes before it loads them.
    """

    def __init__(self, settings: Mapping[str, Any], errors: ErrorSender) -> None:
        super().__init__(settings)
        self._errors = errors

    def __reduce__(self) -> Any:
        return _arrive, (dict(self), os.getpid(), self._errors)


def _arrive(settings: dict[str, Any], sender: int, errors: ErrorSender) -> FollowingSettings:
    if sender != os.getpid():
        follow(sender)
        errors.watch_log()
        with suppress(PermissionError):  # a session leader has no terminal
            os.setpgrp()
    return FollowingSettings(settings, errors)


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


def one_line(error: BaseException) -> str:
    """The type and the text of an error, without the advice that Torch appends."""
    text = " ".join(str(error).strip().partition("\n\n")[0].split())
    text = text if len(text) <= MAX_REASON else f"{text[:MAX_REASON]}..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _arrived(descriptor: Any) -> ErrorSender:
    return ErrorSender(Connection(descriptor.detach(), readable=False))


def _send(connection: Connection, error: BaseException) -> None:
    process = multiprocessing.current_process().name
    message = f"{process}\n{one_line(error)}".encode()[:MAX_MESSAGE_BYTES]
    with suppress(OSError):  # the load has ended, or the pipe is full
        connection.send_bytes(message)


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
