"""How a log line looks: one event with its fields."""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import TextIO

RENDERED = frozenset({"message", "asctime", "taskName"})
"""What formatters leave on a record."""

_MARKS = frozenset(' "=')


class EventFormatter(logging.Formatter):
    """`2026-01-31T12:00:00.000Z INFO model ready model=llama version=1`."""

    def format(self, record: logging.LogRecord) -> str:
        """One line; a traceback, if there is one, follows it."""
        moment = datetime.fromtimestamp(record.created, UTC)
        stamp = moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
        fields = "".join(f" {key}={_value(value)}" for key, value in _fields(record).items())
        line = f"{stamp} {record.levelname} {record.getMessage()}{fields}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def set_up(level: int, stream: TextIO = sys.stderr) -> None:
    """Send the gateway's events, and the warnings of libraries, to one stream."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(EventFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("sluice").setLevel(level)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    """What the call gave; a library may have every record carry more (vLLM does)."""
    blank = logging.getLogRecordFactory()("", 0, "", 0, "", (), None)
    standard = RENDERED.union(vars(blank))
    return {key: value for key, value in vars(record).items() if key not in standard}


def _value(value: object) -> str:
    """A value as it is, or in quotes if it could be taken for more than one."""
    text = str(value)
    if text and text.isprintable() and _MARKS.isdisjoint(text):
        return text
    return json.dumps(text, ensure_ascii=not text.isprintable())
