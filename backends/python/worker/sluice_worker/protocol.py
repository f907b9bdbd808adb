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
"""Bytes to read from the socket at once."""


class BrokenFrame(Exception):
    """Bytes of the other end are no frame; nothing after them can be read."""


def frame(header: bytes, buffers: Sequence[memoryview | bytes] = ()) -> bytes:
    """A whole frame as bytes."""
    size = sum([len(each) for each in buffers])
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
    """`message, trace`: the failure of COMPLETE or LOAD; the trace is for the server's log.

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
    """`freed, dropped`: the gateway's segments to reuse; the worker's segments to unmap.

    It may be sent over either socket.
    """
    PONG = 8
    """`call`."""
    READY = 9
    """`call, ready, error`: ready true or false, or null with the error's text."""
    INFER = 10
    """`call, request, decoupled, served, over_work`: a request to another model.

    It is answered over `control`, or over `work` if the thread that reads `work` waits for the
    answer: no other thread must wake it then.
    The request's number is that of the request with its trace, 0 for none. `served` are the
    numbers of the requests that cause it: it is cancelled when all of them are. An empty list
    means that they are not known.
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
