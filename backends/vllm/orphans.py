"""The engine's processes: their exit with the server, and the errors that they send to it.

An interrupt from the terminal reaches the server only, which drains requests first. This module
imports nothing of vLLM: a process follows its parent before it has imported vLLM.
"""

import logging
import multiprocessing
import os
import select
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from typing import Any, Self

EXIT_CODE = 1
POLL_SECS = 1.0
THREAD = "follow-parent"

MAX_REASON = 500
MAX_MESSAGE_BYTES = 4000
"""Below PIPE_BUF, so that messages of several processes do not interleave."""


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
