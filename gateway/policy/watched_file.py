"""Files that are read again after a change: the key file, a key set, certificates of TLS."""

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from gateway.policy.key_file import KeyFileError

LOOK_SECS = 1.0
"""The interval of looking for changed files."""

T = TypeVar("T")

log = logging.getLogger("sluice.server")


class ReloadFailures:
    """The failures of reading files again: each is logged and counted, unless it is the last one.

    `event` is the message of the line, `fields` are its fields.
    """

    def __init__(self, event: str, **fields: str) -> None:
        self._event = event
        self._fields = fields
        self._last = ""
        self.count = 0

    def note(self, error: Exception) -> None:
        """Log and count a failure."""
        reason = str(error) if isinstance(error, KeyFileError | OSError) else repr(error)
        if reason != self._last:
            self._last = reason
            self.count += 1
            log.error(self._event, extra={**self._fields, "reason": reason})

    def clear(self) -> None:
        """Log and count the next failure, even if it is the last one."""
        self._last = ""


class WatchedFile(Generic[T]):
    """The value of one or more files, which are read again after a change.

    The error of `read` if they cannot be used at first; later ones that cannot be used change
    nothing.
    """

    def __init__(
        self, paths: Sequence[Path], read: Callable[[], T], failures: ReloadFailures
    ) -> None:
        self._paths = paths
        self._read = read
        self._seen = _states_of(paths)
        self.value = read()
        self.failures = failures

    async def look(self) -> bool:
        """Read the files if one has changed; whether there is a new value.

        KeyFileError is noted; after it the files are read only if they change, unless it passes.
        Another error is raised, and the files are read again by the next look.
        """
        seen = await asyncio.to_thread(_states_of, self._paths)
        if seen == self._seen:
            return False
        try:
            self.value = await asyncio.to_thread(self._read)
        except KeyFileError as error:
            self.failures.note(error)
            if not error.passes:
                self._seen = seen
            return False
        self._seen = seen
        self.failures.clear()
        return True


def _states_of(paths: Sequence[Path]) -> Sequence[tuple[int, ...]]:
    return [_state_of(each) for each in paths]


def _state_of(path: Path) -> tuple[int, ...]:
    """The state of a file that differs once its content, or the file behind a link, does."""
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return (found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino, found.st_mode)
