"""From an exception that a process of an engine logs to the server; imports nothing of vLLM."""

import logging
import multiprocessing
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import DupFd
from typing import Any, Self

MAX_REASON = 500
MAX_MESSAGE_BYTES = 4000
"""Below PIPE_BUF, so that messages of several processes do not mix."""


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
