"""Shared memory for large tensors: both ends use this module.

The sender copies a tensor into a segment of its own pool. The receiver maps it once, reads it in
place, and releases it after its last view. The file descriptor of a new segment is sent over a
socket of its own before the message that first names the segment.
A segment has no name in any file system: it ends with the processes that map it. A mapped
segment keeps no descriptor open at either end, so unread tensors take no descriptors.
"""

import array
import ctypes
import errno
import mmap
import os
import socket
import struct
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Sequence

import numpy as np

SHARED_FROM_BYTES = 64 << 10
"""Tensors from this size on go through a segment; smaller ones in the frame itself."""
IDLE_BYTES = 256 << 20
"""Idle segments beyond this size are unmapped."""
IDLE_COUNT = 64
"""Idle segments beyond this number are unmapped."""
ABOUT = struct.Struct("<QQ")
"""Data sent with a descriptor: the segment's number, its size in bytes."""
SCARCE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""Errors of a mapping that may succeed later."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value


def _mapped(descriptor: int, size: int) -> "ctypes.Array[ctypes.c_char]":
    """Map a file for reading and writing; unmapped with the last view of it.

    Python's own mmap keeps a copy of the descriptor until then. OSError if there is no room.
    """
    access = mmap.PROT_READ | mmap.PROT_WRITE
    address = _libc.mmap(None, size, access, mmap.MAP_SHARED, descriptor, 0)
    if address is None or address == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    memory = (ctypes.c_char * size).from_address(address)
    weakref.finalize(memory, _libc.munmap, address, size).atexit = False
    return memory


class OutgoingSegments:
    """Segments that this end writes; usable from any thread."""

    def __init__(self, descriptors: socket.socket) -> None:
        self._descriptors = descriptors
        self._lock = threading.Lock()
        self._next = 1
        self._maps: dict[int, ctypes.Array[ctypes.c_char]] = {}
        self._idle: dict[int, list[int]] = {}
        self._idle_bytes = self._idle_count = 0
        self._dropped: list[int] = []

    def place(self, data: memoryview) -> int:
        """Copy contiguous bytes into a segment; returns its number.

        OSError if the machine has no more memory or descriptors.
        """
        number, memory = self._take(_rounded(data.nbytes))
        # By numpy, because that lets other threads run meanwhile.
        target = np.frombuffer(memoryview(memory), np.uint8, data.nbytes)
        target[:] = np.frombuffer(data, np.uint8)
        return number

    def freed(self, numbers: Sequence[int]) -> None:
        """The other end has released these."""
        with self._lock:
            for number in numbers:
                if number in self._maps:
                    self._rest(number)

    def take_dropped(self) -> list[int]:
        """Segments that the other end should unmap."""
        if not self._dropped:
            return []
        with self._lock:
            dropped, self._dropped = self._dropped, []
            return dropped

    def close(self) -> None:
        """Unmap all; nothing may be placed afterwards."""
        with self._lock:
            self._maps.clear()
            self._idle.clear()

    def _take(self, size: int) -> "tuple[int, ctypes.Array[ctypes.c_char]]":
        with self._lock:
            if idle := self._idle.get(size):
                self._idle_bytes -= size
                self._idle_count -= 1
                number = idle.pop()
                return number, self._maps[number]
            number, self._next = self._next, self._next + 1
        # Not under the lock: this may block until the other end has received earlier segments.
        memory = self._create(number, size)
        with self._lock:
            self._maps[number] = memory
        return number, memory

    def _create(self, number: int, size: int) -> "ctypes.Array[ctypes.c_char]":
        descriptor = _anonymous_file()
        try:
            os.ftruncate(descriptor, size)
            memory = _mapped(descriptor, size)
            socket.send_fds(self._descriptors, [ABOUT.pack(number, size)], [descriptor])
        finally:
            os.close(descriptor)
        return memory

    def _rest(self, number: int) -> None:
        size = len(self._maps[number])
        if self._idle_bytes + size > IDLE_BYTES or self._idle_count >= IDLE_COUNT:
            del self._maps[number]
            self._dropped.append(number)
            return
        self._idle.setdefault(size, []).append(number)
        self._idle_bytes += size
        self._idle_count += 1


class IncomingSegments:
    """Segments that the other end writes; usable from any thread."""

    def __init__(self, descriptors: socket.socket) -> None:
        self._descriptors = descriptors
        self._lock = threading.Lock()
        self._maps: dict[int, ctypes.Array[ctypes.c_char]] = {}
        self._views: dict[int, weakref.finalize[..., np.ndarray]] = {}
        self._released: deque[int] = deque()

    def view(self, number: int, size: int) -> memoryview:
        """The first `size` bytes of a segment, in place; released with the last reference.

        ValueError if the other end never sent such a segment, or it is smaller. OSError with a
        number in SCARCE if it cannot be mapped now: a later call may succeed.
        """
        with self._lock:
            while number not in self._maps:
                self._receive()
            memory = self._maps[number]
        if size > len(memory):
            raise ValueError(f"segment {number} has {len(memory)} bytes, expected {size}")
        found = np.frombuffer(memoryview(memory), np.uint8, size)
        finalizer = self._views[number] = weakref.finalize(found, self._released.append, number)
        finalizer.atexit = False
        return found.data

    def forget(self, numbers: Sequence[int]) -> None:
        """Detach the views of these: each is viewed again before it is released."""
        for number in numbers:
            self._views.pop(number).detach()

    def receive(self) -> None:
        """Map a segment that has been sent; raises as `view`, BlockingIOError without one."""
        with self._lock:
            self._receive()

    def take_released(self) -> list[int]:
        """The numbers of released segments, once per view."""
        numbers = []
        while self._released:
            numbers.append(self._released.popleft())
            self._views.pop(numbers[-1], None)
        return numbers

    def drop(self, numbers: Sequence[int]) -> None:
        """Unmap these: the other end has dropped them."""
        with self._lock:
            for number in numbers:
                self._maps.pop(number, None)

    def close(self) -> None:
        """Unmap all; views stay valid."""
        with self._lock:
            self._maps.clear()

    def _receive(self) -> None:
        # A peeked message keeps its descriptor if this process has no free one.
        room = socket.CMSG_LEN(array.array("i").itemsize)
        about, ancillary, flags, _ = self._descriptors.recvmsg(ABOUT.size, room, socket.MSG_PEEK)
        if len(about) != ABOUT.size:
            raise ValueError("a segment was named that has not been sent")
        if not ancillary and flags & socket.MSG_CTRUNC:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        descriptors = array.array("i")
        for _, _, data in ancillary:
            descriptors.frombytes(data)
        if not descriptors:
            raise ValueError("a segment was sent without its memory")
        try:
            number, size = ABOUT.unpack(about)
            self._maps[number] = _mapped(descriptors[0], size)
            self._descriptors.recv(ABOUT.size)
        finally:
            for each in descriptors:
                os.close(each)


def _rounded(size: int) -> int:
    """The next power of two, so that segments can be used again."""
    return max(SHARED_FROM_BYTES, 1 << (size - 1).bit_length())


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("sluice")
    descriptor, path = tempfile.mkstemp()
    os.unlink(path)
    return descriptor
