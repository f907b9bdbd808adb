"""What did TensorRT say last? It logs its reasons, and returns nothing but None or False."""

import logging
import re
import threading
from typing import Any

log = logging.getLogger("sluice.tensorrt")

SOURCE = re.compile(r"\[?[\w:/.-]+\.(?:cpp|cc|h|hpp|cu|cuh)(?:::\S*?::\d+|:\d+)\]?:?\s*")
"""A place in the library's C++ sources."""
PATH = re.compile(r"(?<![\w.])/(?:[^\s/'\":;,()]+/)+")
"""The folders of a path of the host."""
SPACES = re.compile(r"\s+")
LONGEST = 2000
SILENT = "TensorRT gives no reason"


class LibraryError(Exception):
    """TensorRT refused a call; the text is its own, as clients may read it."""


class Ear:
    """Hears TensorRT's log, of which a process has one; each thread knows its own last error.

    `base` is the library's `ILogger`.
    """

    def __init__(self, base: Any) -> None:
        self._base = base
        self._of_thread = threading.local()
        self._errors = (base.Severity.INTERNAL_ERROR, base.Severity.ERROR)
        self._levels = {
            base.Severity.INTERNAL_ERROR: logging.ERROR,
            base.Severity.ERROR: logging.ERROR,
            base.Severity.WARNING: logging.WARNING,
        }

    def logger(self) -> Any:
        """What the library wants to be given: an object of a class made from its own."""
        members = {"log": lambda _, severity, msg: self.hear(severity, msg)}
        return type("Logger", (self._base,), members)()

    def hear(self, severity: Any, text: str) -> None:
        """Remember an error, and pass all that matters on to the server's log."""
        level = self._levels.get(severity, logging.DEBUG)
        log.log(level, "said", extra={"text": text})
        if severity in self._errors:
            self._of_thread.last = text

    def forget(self) -> None:
        """What comes next is about something else."""
        self._of_thread.last = ""

    @property
    def last(self) -> str:
        """The last error of this thread, without C++ and without folders of the host."""
        return clear(getattr(self._of_thread, "last", "")) or SILENT

    def require(self, done: object, call: str) -> None:
        """Raise LibraryError, with what was heard, for a call that has not done its work."""
        if not done:
            raise LibraryError(f"{call}: {self.last}")


def clear(text: str) -> str:
    """A message of the library as clients may read it."""
    return SPACES.sub(" ", PATH.sub("", SOURCE.sub("", text))).strip()[:LONGEST]
