"""Locks on files of the cache, shared by processes; the system frees those of a dead process."""

import fcntl
import os
from pathlib import Path


class CacheLock:
    """A lock on a file, until `close`."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    @classmethod
    def shared(cls, path: Path) -> "CacheLock":
        """Wait for a lock that others may share; FileNotFoundError if there is no such file."""
        while (found := _locked(path, os.O_RDONLY, fcntl.LOCK_SH)) is None:
            pass
        return cls(path, found)

    @classmethod
    def exclusive(cls, path: Path) -> "CacheLock":
        """Create the file if it is missing, and wait for a lock of its own."""
        while (found := _locked(path, os.O_RDWR | os.O_CREAT, fcntl.LOCK_EX)) is None:
            pass
        return cls(path, found)

    @classmethod
    def attempt(cls, path: Path, *, create: bool = False) -> "CacheLock | None":
        """A lock of its own; None if the file is locked, or missing and not to be created."""
        flags = os.O_RDWR | (os.O_CREAT if create else 0)
        try:
            while (found := _locked(path, flags, fcntl.LOCK_EX | fcntl.LOCK_NB)) is None:
                pass
        except (BlockingIOError, FileNotFoundError):
            return None
        return cls(path, found)

    @classmethod
    def is_free(cls, path: Path) -> bool:
        """Whether a file is there that no process has locked."""
        if (found := cls.attempt(path)) is None:
            return False
        found.close()
        return True

    def close(self) -> None:
        """Free the lock; idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def delete(self) -> None:
        """Delete the file, then free the lock."""
        self.path.unlink(missing_ok=True)
        self.close()


def _locked(path: Path, flags: int, operation: int) -> int | None:
    """A descriptor with the lock; None if the file was deleted meanwhile."""
    descriptor = os.open(path, flags | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, operation)
        if _is_at(path, descriptor):
            return descriptor
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False
