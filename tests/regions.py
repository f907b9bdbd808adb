"""POSIX shared memory that a test owns, as a client would."""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def shared_object(content: bytes) -> Iterator[str]:
    """The key of a new object with this content; it is gone after the block."""
    key = f"/sluice_test_{uuid.uuid4().hex}"
    path_of(key).write_bytes(content)
    try:
        yield key
    finally:
        with suppress(FileNotFoundError):
            path_of(key).unlink()


def path_of(key: str) -> Path:
    """The file in which the system keeps an object."""
    return Path("/dev/shm") / key.lstrip("/")


def shrink(key: str, size: int) -> None:
    """Cut an object short, as any process that may write to it can."""
    os.truncate(path_of(key), size)
