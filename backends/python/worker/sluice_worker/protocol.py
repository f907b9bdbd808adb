"""Frames, messages and shared memory between the gateway and a worker, for both ends.

A worker is started as `PYTHON backends/python/worker WORK CONTROL DESCRIPTORS`: the folder, and
the numbers of its ends of three pairs of stream sockets. `work` carries the messages of
`ToWorker.COMPLETE, LOAD, EXECUTE, FINALIZE` and all that the worker sends of requests and of
itself. `control` carries messages that must not wait for an execution: the rest of `ToWorker`, and
the answers `PONG` and `READY`. The third carries file descriptors.

A frame is a prefix (two little-endian integers: the sizes of header and body), a header (JSON) and
a body (the bytes of tensors, one after the other). A header is a list that begins with the kind of
message; `ToWorker` and `ToGateway` define the rest of it.
A tensor in a header is `[name, datatype, shape, size, segment]`: datatype as the v2 protocol spells
it, size in bytes. With segment 0 its bytes are in the body, in the order of the header. BYTES
tensors are serialised as in the protocol's binary extension.
A request is `[number, model, version, id, correlation, flags, timeout_us, priority, parameters,
outputs, inputs]`: number identifies it from here on; correlation is an integer, a text or null;
flags 1 START and 2 END; outputs are names; inputs tensors.
A response is `[outputs, error, parameters]`: error null or `[code, message]` with the code's name
(`INVALID_ARG`, ...). A call carries a number of its sender; the answer repeats it.

A large tensor goes through a segment: the sender copies it into one of its own pool, the receiver
maps that once, reads it in place, and releases it after its last view. The descriptor of a new
segment is sent before the message that first names it. A segment has no name in any file system
and ends with the processes that map it; mapped, it keeps no descriptor open at either end.
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
from collections.abc import Iterator, Sequence
from enum import IntEnum

import numpy as np

PREFIX = struct.Struct("<IQ")
MAX_HEADER_BYTES = 64 << 20
MAX_BODY_BYTES = 1 << 34
RECEIVE_BYTES = 1 << 18
"""Bytes to read from the socket at once."""
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
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FAILED = ctypes.c_void_p(-1).value


class BrokenFrame(Exception):
    """Bytes of the other end are no frame; nothing after them can be read."""


def frame(header: bytes, buffers: Sequence[memoryview | bytes] = ()) -> bytes:
    """A whole frame as bytes."""
    size = sum(map(len, buffers))
    return b"".join((PREFIX.pack(len(header), size), header, *buffers))


class FrameSplitter:
    """Splits the bytes of a socket into frames; bodies are views of the fed bytes."""

    __slots__ = ("_needed", "_parts", "_size")

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0
        self._needed = PREFIX.size

    def feed(self, data: bytes) -> Iterator[tuple[bytes, memoryview]]:
        """The complete frames, as header and body; BrokenFrame if one is too large."""
        self._parts.append(data)
        self._size += len(data)
        if self._size < self._needed:
            return
        if len(self._parts) > 1:
            data = b"".join(self._parts)
        view, start = memoryview(data), 0
        while True:
            left = len(data) - start
            whole = PREFIX.size
            if left >= whole:
                header_size, body_size = PREFIX.unpack_from(view, start)
                if header_size > MAX_HEADER_BYTES or body_size > MAX_BODY_BYTES:
                    raise BrokenFrame(f"header of {header_size} bytes, body of {body_size} bytes")
                whole += header_size + body_size
            if left < whole:
                break
            body = start + PREFIX.size + header_size
            end = start + whole
            yield data[start + PREFIX.size : body], view[body:end]
            start = end
        self._parts = [data[start:]] if left else []
        self._size, self._needed = left, whole


class ToWorker(IntEnum):
    """Messages of the gateway, with the rest of their headers."""

    COMPLETE = 1
    """`{model_config, model_name, path, backend_path}`; answered by COMPLETED or FAILED.

    The config is JSON text. `path` is the version folder; `backend_path` the folder of the
    Python-based backend whose model.py is used, "" if the model has its own.
    """
    LOAD = 2
    """`{args: those of initialize, path, backend_path, decoupled}`; LOADED or FAILED."""
    EXECUTE = 3
    """`execution, [request, ...]`; answered by any number of RESPONSE, and one EXECUTED."""
    FINALIZE = 4
    """Nothing; answered by FINALIZED, and the worker ends."""
    CANCEL = 5
    """`number, ...`: these requests are cancelled."""
    RELEASED = 6
    """`freed, dropped`: the worker's segments to reuse; the gateway's segments to unmap."""
    PING = 7
    """`call`; PONG."""
    IS_READY = 8
    """`call`; READY."""
    INFERRED = 9
    """`call, response, final`: an answer to INFER, over the socket that it named."""
    DONE = 10
    """`call, error, value`: the answer to any call of the worker but INFER.

    The error is null or the server's text, to which the worker adds a prefix such as
    `Failed to load model: `; value is of MODEL_READY and METRIC_VALUE.
    """
    HOLD = 11
    """`number, ...`: sends for these requests block, since much of their execution is unread."""
    GO_ON = 12
    """`number, ...`: sends for these requests continue."""


class ToGateway(IntEnum):
    """Messages of the worker, with the rest of their headers."""

    COMPLETED = 1
    """`model_config` as JSON text, null if the model does not complete its config."""
    LOADED = 2
    """`{checks_readiness}`: whether the model has `is_ready`."""
    FAILED = 3
    """`message, trace, code`: the failure of COMPLETE or LOAD; the trace is for the server's log.

    The worker ends when its sockets close.
    """
    RESPONSE = 4
    """`number, response, final`: from a response sender; response null for the flag alone."""
    EXECUTED = 5
    """`execution, error, [[number, response, final, rescheduled], ...], infer_ns`.

    `execute` has returned: error null or `[message, trace]` for all requests not done; then the
    returned responses. A null response with final false and rescheduled true asks for another
    execution. Requests that are neither named nor done are answered later by RESPONSE.
    """
    FINALIZED = 6
    """`error`: null, or the exception of `finalize`."""
    RELEASED = 7
    """`freed, dropped`, over any socket: gateway's segments to reuse, worker's to unmap."""
    PONG = 8
    """`call`."""
    READY = 9
    """`call, ready, error`: ready true or false, or null with the error's text."""
    INFER = 10
    """`call, request, decoupled, served, over_work`: a request to another model.

    It is answered over `control`, or over `work` if the thread that reads `work` waits for it: no
    other thread must wake it then. The request's number is that of the request with its trace, 0
    for none. `served` are the numbers of the requests that cause it (none: unknown); it is
    cancelled when all of them are.
    """
    CANCEL_INFER = 11
    """`call, dropped`: the called model should stop; its answers are still sent.

    Dropped: no answer is read. One is sent all the same, an error if the call was not over.
    """
    LOAD_MODEL = 12
    """`call, name, config, [[file, size], ...]`: the files' bytes stand in the body."""
    UNLOAD_MODEL = 13
    """`call, name, unload_dependents`."""
    MODEL_READY = 14
    """`call, name, version`."""
    LOG = 15
    """`level, message, file, line`: INFO, WARNING, ERROR or VERBOSE."""
    METRIC_FAMILY = 16
    """`call, family, name, description, kind`: counter, gauge or histogram; family a number."""
    METRIC = 17
    """`call, family, metric, labels, buckets`: a series; only histograms have buckets."""
    METRIC_CHANGE = 18
    """`metric, operation, value`: increment, set or observe; the worker has checked it."""
    METRIC_VALUE = 19
    """`call, metric`."""
    METRIC_GONE = 20
    """`family, metric`: a series has been deleted; metric 0 for the whole family."""


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
        self.dropped: list[int] = []
        """Segments that the other end should unmap; taken by `take_dropped`."""

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
        with self._lock:
            dropped, self.dropped = self.dropped, []
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
            self.dropped.append(number)
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
        self.released: deque[int] = deque()
        """The numbers of released segments; taken by `take_released`."""

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
        finalizer = self._views[number] = weakref.finalize(found, self.released.append, number)
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
        while self.released:
            numbers.append(self.released.popleft())
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
