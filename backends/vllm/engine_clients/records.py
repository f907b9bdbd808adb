"""The log of a process that has none of its own: its records become those of the server."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

import orjson

UNTOLD = frozenset({"args", "exc_info", "exc_text", "stack_info", "msg"})
"""What cannot be told of a record, or is told in other words."""

_formatter = logging.Formatter()


class Records(logging.Handler):
    """Tells what is logged in this process, by whichever thread, on its event loop."""

    def __init__(self, tell: Callable[[bytes], None]) -> None:
        super().__init__()
        self._tell = tell
        self._loop = asyncio.get_running_loop()

    def emit(self, record: logging.LogRecord) -> None:
        """Tell it; once the loop has ended nobody hears it."""
        try:
            told = orjson.dumps(_told(record), default=str, option=orjson.OPT_NON_STR_KEYS)
        except (TypeError, ValueError):
            self.handleError(record)
            return
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._tell, told)


def relay(payload: bytes) -> None:
    """Log here what has been logged there."""
    record = logging.makeLogRecord(orjson.loads(payload))
    logger = logging.getLogger(record.name)
    if logger.isEnabledFor(record.levelno):
        logger.handle(record)


def _told(record: logging.LogRecord) -> Mapping[str, Any]:
    told = {key: value for key, value in vars(record).items() if key not in UNTOLD}
    told["msg"] = record.getMessage()
    if record.exc_info:
        told["trace"] = _formatter.formatException(record.exc_info)
    return told
