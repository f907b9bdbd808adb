"""System regions: POSIX shared memory of another process, which may shrink at any time."""

import mmap
import os
import stat
import weakref
from functools import cached_property
from pathlib import PurePosixPath

from gateway.errors import Code, InferenceError
from gateway.tensor import Buffer

FOLDER = PurePosixPath("/dev/shm")
RESERVED_PREFIXES = ("triton_python_backend_shm_region_", "sluice-", "psm_", "sem.")
"""Names of memory that processes of servers share among themselves: Triton's and Sluice's workers,
Python's `multiprocessing` (vLLM), and POSIX semaphores. A client that writes there controls them.
"""

VIEWED_BYTES = 65536
"""Reads of at least this many bytes are views. A smaller copy costs no more than the check that a
view needs, and later changes by the client do not affect it."""


class SystemRegion:
    """Bytes [offset, offset + byte_size) of the object named `key`; offsets are relative to that.

    The object's memory stays mapped until this region and all its views are deleted.
    """

    def __init__(self, name: str, key: str, file: int, span: tuple[int, int]) -> None:
        self.name = name
        self.key = key
        self.offset, self.byte_size = span
        self._file = file
        weakref.finalize(self, os.close, file)

    def read(self, offset: int, byte_size: int) -> memoryview:
        """Those bytes, read-only; INVALID_ARG if the object has shrunk below them."""
        start = self.offset + offset
        if byte_size < VIEWED_BYTES:
            data = os.pread(self._file, byte_size, start)
            self._check_size(start + len(data), start + byte_size)
            return memoryview(data)
        # A read beyond the object's end would end this process (SIGBUS).
        self._check_size(os.fstat(self._file).st_size, start + byte_size)
        return memoryview(self._mapping)[start : start + byte_size]

    def write(self, offset: int, data: Buffer) -> None:
        """Write bytes; INVALID_ARG if the object has shrunk below them."""
        start = self.offset + offset
        self._check_size(os.fstat(self._file).st_size, start + len(data))
        left = memoryview(data)
        try:
            while left:
                written = os.pwrite(self._file, left, start)
                start, left = start + written, left[written:]
        except OSError as error:
            raise InferenceError(
                Code.INTERNAL,
                f"cannot write to shared memory region '{self.name}': {error.strerror}",
            ) from None

    @cached_property
    def _mapping(self) -> mmap.mmap:
        length = self.offset + self.byte_size
        return mmap.mmap(self._file, length, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)

    def _check_size(self, found: int, expected: int) -> None:
        if found < expected:
            raise InferenceError(
                Code.INVALID_ARG,
                f"shared memory region '{self.name}' has lost its memory: the object '{self.key}' "
                f"ends at byte {found}, expected at least {expected} bytes; register it again",
            )


def open_system(name: str, key: str, offset: int, byte_size: int) -> SystemRegion:
    """Open an existing object.

    INTERNAL if it does not exist, INVALID_ARG if it is smaller than offset + byte_size.
    """
    plain = _plain_name(name, key)
    try:
        # The flags of shm_open; in addition links are refused, and a pipe does not block.
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        file = os.open(FOLDER / plain, flags)
    except (OSError, UnicodeEncodeError):
        raise _cannot_open(key) from None
    try:
        _check_object(os.fstat(file), name, key, (offset, byte_size))
    except InferenceError:
        os.close(file)
        raise
    return SystemRegion(name, key, file, (offset, byte_size))


def _plain_name(name: str, key: str) -> str:
    """The file name of a POSIX key, without its leading slashes."""
    plain = key.lstrip("/")
    if reserved := next((each for each in RESERVED_PREFIXES if plain.startswith(each)), None):
        raise InferenceError(
            Code.INVALID_ARG,
            f"cannot register shared memory region '{name}' with key '{key}' as the key contains "
            f"the reserved prefix '{reserved}'",
        )
    if plain in ("", ".", "..") or "/" in plain or "\0" in plain:
        raise _cannot_open(key)
    return plain


def _check_object(found: os.stat_result, name: str, key: str, span: tuple[int, int]) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise _cannot_open(key)
    offset, byte_size = span
    if offset < 0 or byte_size <= 0 or offset + byte_size > found.st_size:
        raise InferenceError(
            Code.INVALID_ARG, f"failed to register shared memory region '{name}': invalid args"
        )


def _cannot_open(key: str) -> InferenceError:
    return InferenceError(Code.INTERNAL, f"Unable to open shared memory region: '{key}'")
