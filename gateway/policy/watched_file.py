"""Files that are read again after a change: the key file, and a file with a key set."""

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from gateway.policy.key_file import KeyFileError

LOOK_SECS = 1.0
"""The interval of looking for a changed file."""

T = TypeVar("T")

log = logging.getLogger("sluice.server")


class ReloadFailures:
    """The failures of reading keys again: each is logged and counted, unless it is the last one.

    `event` is the message of the line, `fields` are its fields.
    """

    def __init__(self, event: str, **fields: str) -> None:
        self._event = event
        self._fields = fields
        self._last = ""
        self.count = 0

    def note(self, error: Exception) -> None:
        """Log and count a failure."""
        reason = str(error) if isinstance(error, KeyFileError) else repr(error)
        if reason != self._last:
            self._last = reason
            self.count += 1
            log.error(self._event, extra={**self._fields, "reason": reason})

    def clear(self) -> None:
        """Log and count the next failure, even if it is the last one."""
        self._last = ""


class WatchedFile(Generic[T]):
    """The value of a file, which is read again after a change.

    KeyFileError if the file cannot be used at first; later one that cannot be used changes nothing.
    `kind` is the name of the file in the log.
    """

    def __init__(self, path: Path, read: Callable[[Path], T], kind: str) -> None:
        self._path = path
        self._read = read
        self._seen = _state_of(path)
        self.value = read(path)
        self.failures = ReloadFailures(f"{kind} refused", file=str(path))

    async def look(self) -> bool:
        """Read the file if it has changed; whether it has a new value."""
        seen = await asyncio.to_thread(_state_of, self._path)
        if seen == self._seen:
            return False
        try:
            self.value = await asyncio.to_thread(self._read, self._path)
        except KeyFileError as error:
            self.failures.note(error)
            if not error.passes:
                self._seen = seen
            return False
        self._seen = seen
        self.failures.clear()
        return True


def _state_of(path: Path) -> tuple[int, ...]:
    """The state of a file that differs once its content, or the file behind a link, does."""
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return (found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino, found.st_mode)
