"""How a log line looks, where it goes, and which lines there are: all of it can change."""

import json
import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from logging.handlers import WatchedFileHandler
from typing import Any, TextIO

from gateway.settings import LogFormat, LogSettings

RENDERED = frozenset({"message", "asctime", "taskName"})
"""What formatters leave on a record."""

_MARKS = frozenset(' "=')


class Log:
    """The log of this process, as its settings say at each moment.

    On the console, what is no trouble goes to `out` and warnings and errors to `err`; with a file
    everything goes there.
    """

    def __init__(self, settings: LogSettings | None = None) -> None:
        self.settings = settings or LogSettings()
        self._installed: list[logging.Handler] = []
        self._on_change: list[Callable[[LogSettings], None]] = []

    def install(self, out: TextIO = sys.stdout, err: TextIO = sys.stderr) -> None:
        """Have the whole process log here; OSError if the file cannot be had."""
        self._installed = self._handlers(out, err)
        root = logging.getLogger()
        root.handlers[:] = self._installed
        root.setLevel(logging.WARNING)
        self._apply()

    def change(self, changes: Mapping[str, Any]) -> None:
        """Take other values for some fields of the settings, from the next line on."""
        self.settings = replace(self.settings, **changes)
        if self._installed:
            self._apply()
        for tell in self._on_change:
            tell(self.settings)

    def on_change(self, tell: Callable[[LogSettings], None]) -> None:
        """Have a function called with the settings whenever they have changed."""
        self._on_change.append(tell)

    def _handlers(self, out: TextIO, err: TextIO) -> list[logging.Handler]:
        if self.settings.file:
            found: list[logging.Handler] = [
                LogFile(self.settings.file, encoding="utf-8", errors="replace")
            ]
        else:
            found = [logging.StreamHandler(out), logging.StreamHandler(err)]
            found[0].addFilter(lambda record: record.levelno < logging.WARNING)
            found[1].addFilter(lambda record: record.levelno >= logging.WARNING)
        for handler in found:
            handler.addFilter(self._wanted)
        return found

    def _wanted(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.ERROR:
            return self.settings.error
        if record.levelno >= logging.WARNING:
            return self.settings.warning
        if record.levelno >= logging.INFO:
            return self.settings.info
        return self.settings.verbose_level > 0

    def _apply(self) -> None:
        for handler in self._installed:
            handler.setFormatter(LineFormatter(self.settings))
        level = logging.DEBUG if self.settings.verbose_level else logging.INFO
        logging.getLogger("sluice").setLevel(level)


class LogFile(WatchedFileHandler):
    """A file that may be moved away (log rotation): the next line begins it anew."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line; if there is no place for it any more, stderr says so."""
        try:
            super().emit(record)
        except OSError:
            self.handleError(record)


class LineFormatter(logging.Formatter):
    """An event with its fields, behind the beginning that Triton gives a line.

    `I1120 05:05:13.572222 7636 registry.py:83] "model ready model=llama version=1"`, or in ISO8601
    `2025-11-20T05:05:13Z I 7636 registry.py:83] "model ready model=llama version=1"`.
    """

    def __init__(self, settings: LogSettings) -> None:
        super().__init__()
        self._iso = settings.format is LogFormat.ISO8601
        self._escape = settings.escape

    def format(self, record: logging.LogRecord) -> str:
        """One line; a traceback, if there is one, follows it."""
        fields = "".join(f" {key}={_value(value)}" for key, value in _fields(record).items())
        event = f"{record.getMessage()}{fields}"
        message = json.dumps(event, ensure_ascii=False) if self._escape else event
        line = f"{self._begin(record)}] {message.encode(errors='replace').decode()}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line

    def _begin(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC)
        place = f"{record.process} {record.filename}:{record.lineno}"
        if self._iso:
            return f"{moment:%Y-%m-%dT%H:%M:%SZ} {_letter(record.levelno)} {place}"
        return f"{_letter(record.levelno)}{moment:%m%d %H:%M:%S.%f} {place}"


def _letter(level: int) -> str:
    if level >= logging.ERROR:
        return "E"
    return "W" if level >= logging.WARNING else "I"


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
