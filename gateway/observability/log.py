"""The log: line format, outputs, and settings (logging extension)."""

import json
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from logging.handlers import WatchedFileHandler
from typing import Any, TextIO

from gateway.errors import Code, InferenceError
from gateway.json_lines import json_line
from gateway.observability.client_files import client_file, refused_file
from gateway.observability.escaping import escaped
from gateway.observability.request_context import current_request
from gateway.settings import LogFormat, LogSettings

RENDERED = frozenset({"message", "asctime", "taskName"})
"""Attributes that formatters add to a record."""

_MARKS = frozenset(' "=')

FILE = "log_file"
VERBOSE = "log_verbose_level"
FORMAT = "log_format"
BOOLEANS = {"log_info": "info", "log_warning": "warning", "log_error": "error"}
MAX_VERBOSE = 2**32 - 1

SHORT_SECS = 0.1
"""A stage that takes less has no line."""


class Log:
    """The log of this process, with settings that may change at run time.

    On the console, warnings and errors go to `err` and other lines to `out`. With a file all lines
    go there.
    """

    def __init__(self, settings: LogSettings | None = None) -> None:
        self.settings = settings or LogSettings()
        self._first_file = self.settings.file
        self._console: tuple[TextIO, TextIO] = (sys.stdout, sys.stderr)
        self._installed: list[logging.Handler] = []
        self._on_change: list[Callable[[LogSettings], None]] = []

    def install(self, out: TextIO = sys.stdout, err: TextIO = sys.stderr) -> None:
        """Replace the handlers of the root logger; OSError if the file cannot be opened."""
        self._console = (out, err)
        self._open(self.settings.file)
        logging.getLogger().setLevel(logging.WARNING)
        self._apply()

    def file_named(self, wanted: object) -> str:
        """The path of a file that a client names; InferenceError if it may not be the log."""
        directory = self.settings.directory if self._installed else ""
        return client_file(wanted, (self._first_file,), directory, "log")

    def change(self, changes: Mapping[str, Any]) -> None:
        """Change fields of the settings, from the next line on.

        Raises INVALID_ARG for a file that cannot be opened; then nothing changes.
        """
        settings = replace(self.settings, **changes)
        if self._installed and settings.file != self.settings.file:
            try:
                self._open(settings.file)
            except OSError as error:
                reason = f"it cannot be opened: {error.strerror}"
                raise refused_file(settings.file, "log", reason) from None
        self.settings = settings
        if self._installed:
            self._apply()
        for callback in self._on_change:
            callback(self.settings)

    def on_change(self, callback: Callable[[LogSettings], None]) -> None:
        """Call a function with the settings after each change."""
        self._on_change.append(callback)

    def _open(self, file: str) -> None:
        """Replace the handlers; OSError if the file cannot be opened."""
        before, self._installed = self._installed, self._handlers(file)
        logging.getLogger().handlers[:] = self._installed
        for each in before:
            if isinstance(each, LogFile):
                each.close()

    def _handlers(self, file: str) -> list[logging.Handler]:
        if file:
            found: list[logging.Handler] = [LogFile(file, encoding="utf-8", errors="replace")]
        else:
            found = [logging.StreamHandler(each) for each in self._console]
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
            handler.setFormatter(formatter(self.settings))
        level = logging.DEBUG if self.settings.verbose_level else logging.INFO
        logging.getLogger("sluice").setLevel(level)


@contextmanager
def logged_stage(log: logging.Logger, event: str, **fields: object) -> Iterator[None]:
    """Log the seconds that the block took, unless it failed or was short."""
    began = time.monotonic()
    yield
    secs = time.monotonic() - began
    if secs >= SHORT_SECS:
        log.info(event, extra={**fields, "secs": round(secs, 1)}, stacklevel=3)


class LogFile(WatchedFileHandler):
    """A log file that is created again after it was moved (log rotation)."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line; a failure is reported on stderr."""
        try:
            super().emit(record)
        except OSError:
            self.handleError(record)


class LineFormatter(logging.Formatter):
    """An event with its fields, behind the prefix of Triton's log lines.

    `I1120 05:05:13.572222 7636 registry.py:83] "model ready model=llama version=1"`, or in ISO8601
    `2025-11-20T05:05:13Z I 7636 registry.py:83] "model ready model=llama version=1"`.
    """

    def __init__(self, settings: LogSettings) -> None:
        super().__init__()
        self._iso = settings.format is LogFormat.ISO8601
        self._escape = settings.escape

    def format(self, record: logging.LogRecord) -> str:
        """One line, followed by the traceback of an exception, whose lines begin none."""
        fields = "".join(f" {key}={_value(value)}" for key, value in _fields(record).items())
        event = f"{record.getMessage()}{fields}"
        shown = json.dumps(event, ensure_ascii=False) if self._escape else event
        message = "\n".join(map(escaped, shown.split("\n")))
        line = f"{self._begin(record)}] {message.encode(errors='replace').decode()}"
        return f"{line}\n{self._traceback(record.exc_info)}" if record.exc_info else line

    def _traceback(self, found: Any) -> str:
        first, *rest = self.formatException(found).split("\n")
        inner = (each if each.startswith(" ") else f"  {each}" for each in map(escaped, rest))
        return "\n".join((escaped(first), *inner)).encode(errors="replace").decode()

    def _begin(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC)
        place = f"{record.process} {record.filename}:{record.lineno}"
        if self._iso:
            return f"{moment:%Y-%m-%dT%H:%M:%SZ} {_letter(record.levelno)} {place}"
        return f"{_letter(record.levelno)}{moment:%m%d %H:%M:%S.%f} {place}"


class JsonFormatter(logging.Formatter):
    """An event as a JSON object on one line: its fields are members, behind those of every line.

    The request that the running task is about adds its ids and its tenant; a traceback is the
    member `exception`.
    """

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        members: dict[str, object] = {
            "time": f"{datetime.fromtimestamp(record.created, UTC):%Y-%m-%dT%H:%M:%S.%fZ}",
            "severity": record.levelname,
            "message": record.getMessage(),
            "logger": record.name,
            "place": f"{record.filename}:{record.lineno}",
            "process": record.process,
        }
        request = current_request()
        if request is not None:
            members |= request.names()
        if record.exc_info:
            members["exception"] = self.formatException(record.exc_info)
        fields = {key: _json_value(value) for key, value in _fields(record).items()}
        return json_line({**members, **fields, **members}).decode().rstrip()


def formatter(settings: LogSettings) -> logging.Formatter:
    """The formatter of lines."""
    return JsonFormatter() if settings.format is LogFormat.JSON else LineFormatter(settings)


def line_handler() -> logging.Handler:
    """A handler that writes lines to stderr as a server does by default."""
    found = logging.StreamHandler()
    found.setFormatter(formatter(LogSettings()))
    return found


def _json_value(value: object) -> object:
    """A number, a truth or nothing as it is; other values, also NaN, as text."""
    is_number = isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
    return value if value is None or is_number else str(value)


def _letter(level: int) -> str:
    if level >= logging.ERROR:
        return "E"
    return "W" if level >= logging.WARNING else "I"


def _fields(record: logging.LogRecord) -> dict[str, object]:
    """The fields of the call, without those that a record factory adds (vLLM has one)."""
    blank = logging.getLogRecordFactory()("", 0, "", 0, "", (), None)
    standard = RENDERED.union(vars(blank))
    return {key: value for key, value in vars(record).items() if key not in standard}


def _value(value: object) -> str:
    """A value, in quotes if it is empty or has spaces, quotes or `=`."""
    text = str(value)
    if text and text.isprintable() and _MARKS.isdisjoint(text):
        return text
    return json.dumps(text, ensure_ascii=not text.isprintable())


def show_log_settings(settings: LogSettings) -> dict[str, Any]:
    """The settings as the protocol shows them, in Triton's order."""
    return {
        FILE: settings.file,
        "log_info": settings.info,
        "log_warning": settings.warning,
        "log_error": settings.error,
        VERBOSE: settings.verbose_level,
        FORMAT: settings.format.value,
    }


def read_log_settings(
    wanted: Mapping[str, Any],
    refused_format: Callable[[str], InferenceError],
    file_named: Callable[[object], str],
) -> dict[str, Any]:
    """Fields of LogSettings for `Log.change`, from values of the right types.

    Unknown names are ignored. Raises INVALID_ARG for a level beyond 32 bits, the error of
    `refused_format` for an unknown format, and that of `file_named` (`Log.file_named`).
    """
    found: dict[str, Any] = {}
    if FILE in wanted:
        found["file"] = file_named(wanted[FILE])
    found |= {field: wanted[name] for name, field in BOOLEANS.items() if name in wanted}
    if VERBOSE in wanted:
        found["verbose_level"] = _level(wanted[VERBOSE])
    if FORMAT in wanted:
        found["format"] = _format(wanted[FORMAT], refused_format)
    return found


def _level(level: int) -> int:
    if level > MAX_VERBOSE:
        raise InferenceError(
            Code.INVALID_ARG,
            f"Unable to parse '{VERBOSE}', value is out of range [ 0, {MAX_VERBOSE} ], got: "
            f"{level}",
        )
    return level


def _format(text: str, refused: Callable[[str], InferenceError]) -> LogFormat:
    try:
        return LogFormat(text)
    except ValueError:
        raise refused(text) from None
