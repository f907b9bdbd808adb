"""What becomes of an engine's processes when the gateway is killed? They end, too.

But an interrupt from the terminal is for the gateway alone, which lets requests end first.
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
"""Below PIPE_BUF, so that messages of several processes do not mix."""


def follow_parent() -> None:
    """In a process that multiprocessing has started: end it as soon as its parent has ended.

    Elsewhere, as in the gateway itself, this does nothing. vLLM calls it in each of its processes,
    where it is an entry point of the group `vllm.general_plugins`.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        follow(parent.pid or 0)


class ErrorSender:
    """Sends errors that are logged in this process; travels with the arguments of a new process."""

    def __init__(self, connection: Connection | None) -> None:
        self._connection = connection

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    def __reduce__(self) -> Any:
        # The descriptor is handed over here: vLLM pickles its settings by a pickler that cannot.
        if self._connection is None or get_spawning_popen() is None:
            return ErrorSender, (None,)
        return _arrived, (DupFd(self._connection.fileno()),)

    def close(self) -> None:
        """Send nothing more."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def watch_log(self) -> None:
        """Send each exception that is logged as an error from now on, in one line."""
        if (connection := self._connection) is None:
            return
        make = logging.getLogRecordFactory()

        # vLLM configures its loggers anew while it starts; the factory of records stays.
        def record(*values: Any, **named: Any) -> logging.LogRecord:
            made = make(*values, **named)
            if made.levelno >= logging.ERROR and made.exc_info and made.exc_info[1]:
                _send(connection, made.exc_info[1])
            return made

        logging.setLogRecordFactory(record)


class FollowingSettings(dict[str, Any]):
    """Settings that make a process they are sent to follow the sender, which is its parent.

    They also take it out of the group of processes that a terminal interrupts, and hand it the
    sender of its errors.

    A new process of vLLM waits minutes for a parent that has gone before it loads its plugins;
    what it is sent arrives before that.
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
        with suppress(PermissionError):  # it leads a session: there is no terminal
            os.setpgrp()
    return FollowingSettings(settings, errors)


def follow(parent: int) -> None:
    """End this process as soon as process `parent`, which has started it, has ended."""
    if all(thread.name != THREAD for thread in threading.enumerate()):
        threading.Thread(target=_end_after, args=(parent,), name=THREAD, daemon=True).start()


def _end_after(parent: int) -> None:
    wait_for_exit(parent)
    # Not sys.exit: the main thread may be computing, or waiting for a parent that has gone.
    os._exit(EXIT_CODE)


def wait_for_exit(parent: int) -> None:
    """Block until this process has no such parent any more; return at once if it never had."""
    try:
        descriptor = os.pidfd_open(parent)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):  # no such call here, or not allowed
        _poll_for_exit(parent)
        return
    try:
        # Still the parent now means that the descriptor is not that of a later process.
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
    """The type and the text of an error, up to the advice that Torch adds below."""
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
