"""Frames and messages between the gateway and a worker: both ends use this module.

A worker is started as `PYTHON backends/python/worker WORK CONTROL DESCRIPTORS`: the folder, and
the numbers of its ends of three pairs of stream sockets. `work` carries the messages of
`ToWorker.COMPLETE, LOAD, EXECUTE, FINALIZE` and all that the worker sends of requests and of
itself. `control` carries messages that must not wait for an execution: the rest of `ToWorker`, and
the answers `PONG` and `READY`. The third carries file descriptors (`segments.py`).

A frame is a prefix (two little-endian integers: the sizes of header and body), a header (JSON) and
a body (the bytes of tensors, one after the other). A header is a list that begins with the kind of
message; `ToWorker` and `ToGateway` define the rest of it.

A tensor in a header is `[name, datatype, shape, size, segment]`: datatype as the v2 protocol
spells it, size in bytes. With segment 0 its bytes are in the frame's body, in the order of the
header. BYTES tensors are serialised as in the protocol's binary extension.

A request is `[number, model, version, id, correlation, flags, timeout_us, priority, parameters,
outputs, inputs]`: number identifies it from here on; correlation is an integer, a text or null;
flags 1 START and 2 END; outputs are names; inputs tensors.

A response is `[outputs, error, parameters]`: error null or `[code, message]` with the code's name
(`INVALID_ARG`, ...).

A call carries a number of its sender; the answer repeats it.
"""

import struct
from collections.abc import Iterator, Sequence
from enum import IntEnum

PREFIX = struct.Struct("<IQ")
MAX_HEADER_BYTES = 64 << 20
MAX_BODY_BYTES = 1 << 34
RECEIVE_BYTES = 1 << 18
"""How much an end should ask the socket for at once."""


class BrokenFrame(Exception):
    """What came from the other end is not a frame; nothing after it can be understood."""


def frame(header: bytes, buffers: Sequence[memoryview | bytes] = ()) -> bytes:
    """A whole frame as bytes."""
    size = sum([len(each) for each in buffers])
    return b"".join((PREFIX.pack(len(header), size), header, *buffers))


class FrameReader:
    """Cuts what comes from a socket into frames. Bodies are views of what was fed."""

    __slots__ = ("_needed", "_parts", "_size")

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0
        self._needed = PREFIX.size

    def feed(self, data: bytes) -> Iterator[tuple[bytes, memoryview]]:
        """The frames that are whole now, as header and body; BrokenFrame if one cannot be."""
        self._parts.append(data)
        self._size += len(data)
        if self._size < self._needed:
            return
        if len(self._parts) > 1:
            data = b"".join(self._parts)
        yield from self._cut(memoryview(data))

    def _cut(self, view: memoryview) -> Iterator[tuple[bytes, memoryview]]:
        start = 0
        while True:
            left = len(view) - start
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
            yield bytes(view[start + PREFIX.size : body]), view[body:end]
            start = end
        self._parts = [bytes(view[start:])] if left else []
        self._size, self._needed = left, whole


class ToWorker(IntEnum):
    """What the gateway says, and what follows in the header."""

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
    """`number, ...`: nobody waits for these requests any more."""
    RELEASED = 6
    """`freed, dropped`: segments of the worker's that are free again; of the gateway's, gone."""
    PING = 7
    """`call`; PONG."""
    IS_READY = 8
    """`call`; READY."""
    INFERRED = 9
    """`call, response, final`: an answer to INFER, over the socket it named; the last is final."""
    DONE = 10
    """`call, error, value`: the answer to any call but INFER and those of ToWorker.

    The error is null or the core's text, which the worker puts behind `Failed to load model: ` and
    the like; value is of MODEL_READY and METRIC_VALUE.
    """
    HOLD = 11
    """`number, ...`: senders of these should wait, since much that was sent is not taken yet."""
    GO_ON = 12
    """`number, ...`: they need not any more."""


class ToGateway(IntEnum):
    """What the worker says, and what follows in the header."""

    COMPLETED = 1
    """`model_config` as JSON text, null if the model does not complete its config."""
    LOADED = 2
    """`{checks_readiness}`: whether the model has `is_ready`."""
    FAILED = 3
    """`message, trace`: why COMPLETE or LOAD failed; the trace is for the server's log.

    The worker stays; it ends when its sockets close.
    """
    RESPONSE = 4
    """`number, response, final`: from a response sender; response null for the flag alone."""
    EXECUTED = 5
    """`execution, error, [[number, response, final, rescheduled], ...], infer_ns`.

    `execute` has returned: error null or `[message, trace]` for all requests not done; then what
    it returned for each request that has something: a null response with final false and
    rescheduled true asks for another round. Requests that are not named and not done will still
    be answered by RESPONSE.
    """
    FINALIZED = 6
    """`error`: null, or what `finalize` raised."""
    RELEASED = 7
    """`freed, dropped`: segments of the gateway's that are free again; of the worker's, gone.

    It may come over either socket.
    """
    PONG = 8
    """`call`."""
    READY = 9
    """`call, ready, error`: ready true or false, or null with the error's text."""
    INFER = 10
    """`call, request, decoupled, served, over_work`: business logic asks another model.

    It is answered over `control`, or over `work` if it says so: then whoever reads that waits for
    the answer, and need not be woken by another thread.
    The request's number is that of the one whose trace it belongs to, 0 for none. `served` are
    the numbers of those on whose behalf it is made: once nobody waits for any of them, it is
    cancelled. None are said where that is not known.
    """
    CANCEL_INFER = 11
    """`call, dropped`: the model that was asked should end early, and its answers still come.

    Dropped: no answer is read any more; one comes all the same, an error if it was not over.
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
    """`call, family, metric, labels, buckets`: a series; buckets of histograms only."""
    METRIC_CHANGE = 18
    """`metric, operation, value`: increment, set or observe; the worker has checked it."""
    METRIC_VALUE = 19
    """`call, metric`."""
    METRIC_GONE = 20
    """`family, metric`: a series has been deleted; metric 0 for the whole family."""
