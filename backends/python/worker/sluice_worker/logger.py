"""Log lines of model.py."""

import sys
from enum import IntEnum

from .protocol import ToGateway
from .worker_state import worker

MESSAGE_LIMIT = 1 << 16
"""Characters of one line."""


class Level(IntEnum):
    """Triton's levels."""

    INFO = 0
    WARNING = 1
    ERROR = 2
    VERBOSE = 3


class Logger:
    """Writes to the server's log, with file and line in model.py; usable in every stage."""

    LogLevel = Level
    INFO = Level.INFO
    WARNING = Level.WARNING
    ERROR = Level.ERROR
    VERBOSE = Level.VERBOSE

    @staticmethod
    def log(message: str, level: Level = Level.INFO) -> None:
        """Log a line of that level."""
        _log(level, message)

    @staticmethod
    def log_info(message: str) -> None:
        """Log at INFO."""
        _log(Level.INFO, message)

    @staticmethod
    def log_warn(message: str) -> None:
        """Log at WARNING."""
        _log(Level.WARNING, message)

    @staticmethod
    def log_error(message: str) -> None:
        """Log at ERROR."""
        _log(Level.ERROR, message)

    @staticmethod
    def log_verbose(message: str) -> None:
        """Log at VERBOSE, which is DEBUG in the server's log."""
        _log(Level.VERBOSE, message)


def _log(level: Level, message: str) -> None:
    if not isinstance(message, str):
        raise TypeError(f"a message for the log must be a str, found {type(message)}")
    if not isinstance(level, Level):
        raise TypeError(f"level must be one of Logger's, found {level!r}")
    place = sys._getframe(2)  # noqa: SLF001 - the caller, without reading its source
    line = [
        ToGateway.LOG,
        level.name,
        message[:MESSAGE_LIMIT],
        place.f_code.co_filename,
        place.f_lineno,
    ]
    worker().connection.send(line)
