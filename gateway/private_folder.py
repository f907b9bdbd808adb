"""Temporary folders that are deleted after their process, however it ends."""

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Self


class PrivateFolder:
    """A new folder of this user under `parent`, which `remove` deletes.

    Its owner holds a lock on it, which the system releases if the process is killed. A new folder
    deletes the older ones of its prefix without a lock.
    """

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def make(cls, prefix: str, parent: Path | None = None) -> Self:
        """Delete the folders of dead processes and create a new one; OSError if that fails."""
        parent = parent or Path(tempfile.gettempdir())
        for stale in parent.glob(f"{prefix}*"):
            _remove_if_stale(stale)
        while True:
            path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
            lock = _locked(path)
            if lock is not None:
                return cls(path, lock)

    def remove(self) -> None:
        """Delete the folder with its files; idempotent."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def _remove_if_stale(path: Path) -> None:
    # OSError: a folder of another user, or one that another process is deleting.

    with suppress(OSError):
        lock = _locked(path)
        if lock is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)


def _locked(path: Path) -> int | None:
    """A descriptor that locks a folder; None if another process has locked or deleted it."""
    try:
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(lock).st_nlink:
            return lock
    except BlockingIOError:
        pass
    os.close(lock)
    return None
