"""Requests, responses and tensors in the frames of a worker."""

import asyncio
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import orjson

from backends.python.worker.sluice_worker.protocol import (
    SHARED_FROM_BYTES,
    BrokenFrame,
    IncomingSegments,
    OutgoingSegments,
)
from gateway.config import ModelConfig
from gateway.errors import AnsweredError, Code, InferenceError
from gateway.messages import (
    NO_PARAMETERS,
    InferRequest,
    InferResponse,
    Parameter,
    Phases,
    RequestedOutput,
    SequenceTag,
)
from gateway.policy.caller import Caller, tenant_of
from gateway.tensor import CONVERTED, Datatype, Tensor

DATATYPES = {datatype.value: datatype for datatype in Datatype}
MUCH_BYTES = 4 << 20
"""Tensors of this total size are copied into segments in a thread."""
INLINE_BYTES = 16 << 20
"""Bytes of large tensors that a frame may hold if no further segment can be made."""

T = TypeVar("T")


class TensorWriter:
    """Describes tensors for a header; `body` collects the bytes of small ones."""

    __slots__ = ("_placed", "_segments", "body")

    def __init__(self, segments: OutgoingSegments) -> None:
        self._segments = segments
        self._placed: list[int] = []
        self.body: list[memoryview] = []

    def write(self, tensors: Sequence[Tensor]) -> list[list[Any]]:
        """`[name, datatype, shape, size, segment]` of each; OSError if no memory can be shared."""
        described: list[list[Any]] = []
        for tensor in tensors:
            held = tensor.data
            data = memoryview(tensor.raw() if isinstance(held, CONVERTED) else held)
            size, segment = data.nbytes, 0
            if size >= SHARED_FROM_BYTES:
                segment = self._place(data)
            elif size:
                self.body.append(data)
            described.append([tensor.name, tensor.datatype, tensor.shape, size, segment])
        return described

    def _place(self, data: memoryview) -> int:
        try:
            segment = self._segments.place(data)
        except OSError:
            # The worker must receive earlier segments first, or no file descriptor is free: a few
            # tensors go into the frame.
            if sum([each.nbytes for each in self.body]) + data.nbytes > INLINE_BYTES:
                raise
            self.body.append(data)
            return 0
        self._placed.append(segment)
        return segment

    def give_back(self) -> None:
        """Free the segments: no message has named them."""
        self._segments.freed(self._placed)


class TensorReader:
    """Reads the tensors of one frame, in the order of its header; they are views.

    Of the `size_bytes` of the tensors read so far, `shared_bytes` are in `segments`. If a segment
    cannot be mapped now, another reader can read the frame again from its beginning.
    """

    __slots__ = ("_at", "_body", "_incoming", "segments", "shared_bytes", "size_bytes")

    def __init__(self, body: memoryview, incoming: IncomingSegments) -> None:
        self._body = body
        self._incoming = incoming
        self._at = 0
        self.segments: list[int] = []
        self.size_bytes = self.shared_bytes = 0

    def read(self, described: Sequence[list[Any]]) -> tuple[Tensor, ...]:
        """The next tensors; NOT_UNDERSTOOD of `connection.py`, OSError if one cannot be mapped."""
        found: list[Tensor] = []
        for name, datatype, shape, size, segment in described:
            if segment:
                data = self._view(segment, size)
            else:
                start = self._at
                self._at = end = start + size
                data = self._body[start:end]
                if len(data) != size:
                    raise BrokenFrame(f"body of {len(self._body)} bytes, expected {end}")
            self.size_bytes += size
            found.append(Tensor(name, DATATYPES[datatype], tuple(shape), data))
        return tuple(found)

    def _view(self, segment: int, size: int) -> memoryview:
        try:
            data = self._incoming.view(segment, size)
        except OSError:
            self._incoming.forget(self.segments)
            raise
        self.segments.append(segment)
        self.shared_bytes += size
        return data


async def write_in_thread(write: Callable[[], T], tensors: TensorWriter) -> T:
    """Write in a thread; segments are freed if this is cancelled meanwhile."""
    writing = asyncio.get_running_loop().run_in_executor(None, write)
    try:
        return await asyncio.shield(writing)
    except asyncio.CancelledError:
        writing.add_done_callback(lambda _: tensors.give_back())
        raise


START, END = 1, 2
ANY_VERSION = -1
NOT_NUMBERED = 0


class RequestEncoder:
    """Writes requests of one `model`; a request that names no outputs gets all of them.

    `alone`: no scheduler would add another request to an execution. `decoupled`: a request may
    have any number of responses.
    """

    def __init__(self, config: ModelConfig, version: int) -> None:
        self.model = config.name
        self.alone = _executes_alone(config)
        self.decoupled = config.decoupled
        self._version = version
        self._outputs = [each.name for each in config.output]

    def write(self, requests: Sequence[InferRequest], tensors: TensorWriter) -> list[list[Any]]:
        """The requests for EXECUTE, each to be numbered; OSError if no memory can be shared."""
        described: list[list[Any]] = []
        for request in requests:
            tag, parameters, outputs = request.sequence, request.parameters, request.outputs
            described.append(
                [
                    NOT_NUMBERED,
                    self.model,
                    self._version,
                    request.id,
                    None if tag is None else tag.correlation_id,
                    0 if tag is None else START * tag.start + END * tag.end,
                    request.timeout_us,
                    request.priority,
                    _exact(parameters) if parameters else {},
                    [each.name for each in outputs] if outputs else self._outputs,
                    tensors.write(request.inputs),
                ]
            )
            if request.trace is not None and request.trace.headers:
                described[-1].append(dict(request.trace.headers))
        return described


class _NotFinite(float):
    """A number that orjson would write as null; it refuses a class that it does not know."""


def _exact(parameters: Mapping[str, Parameter]) -> dict[str, Parameter]:
    found = dict(parameters)
    for name, value in parameters.items():
        if type(value) is float and not math.isfinite(value):
            found[name] = _NotFinite(value)
    return found


def _executes_alone(config: ModelConfig) -> bool:
    """Whether no scheduler would add another request to an execution if it waited longer."""
    scheduled = config.dynamic_batching or config.sequence_batching
    limited = any(group.rate_limiter is not None for group in config.instance_group)
    return scheduled is None and not limited


def to_json(header: list[Any]) -> bytes:
    """A header as bytes; any integers and texts are allowed."""
    try:
        return orjson.dumps(header)
    except TypeError:  # integers beyond 64 bits, texts that are not UTF-8, NaN and infinities
        return json.dumps(header).encode()


def read_request(
    found: list[Any], tensors: TensorReader, traced: InferRequest | None, caller: Caller | None
) -> InferRequest:
    """A request of a model to another one; its trace is a part of the trace of `traced`."""
    (
        _,
        model,
        version,
        request_id,
        correlation,
        flags,
        timeout,
        priority,
        parameters,
        outputs,
        inputs,
    ) = found
    return InferRequest(
        model=model,
        version="" if version in (ANY_VERSION, "", None) else str(version),
        id=request_id,
        inputs=tensors.read(inputs),
        outputs=tuple([RequestedOutput(name) for name in outputs]),
        parameters=parameters or {},
        sequence=_sequence(correlation, flags, caller),
        priority=priority or 0,
        timeout_us=timeout or 0,
        trace=None if traced is None else traced.trace,
        caller=caller,
    )


def _sequence(
    correlation: int | str | None, flags: int, caller: Caller | None
) -> SequenceTag | None:
    if not correlation:
        return None
    return SequenceTag(correlation, bool(flags & START), bool(flags & END), tenant_of(caller))


log = logging.getLogger("sluice.python")

CODES = {code.name: code for code in Code}


FLAG = InferResponse(final=True)
"""The final flag alone."""


def read_response(
    found: list[Any] | None, tensors: TensorReader, *, final: bool, phases: Phases | None = None
) -> InferResponse | InferenceError | None:
    """A response of the worker, or the error that ends its request; None if there is none yet.

    A response without outputs is never final: the flag follows alone. More responses may follow
    an error that is not final, as on Triton.
    """
    if found is None:
        return FLAG if final else None
    described, error, parameters = found
    if error is not None:
        failure = AnsweredError(CODES.get(error[0], Code.INTERNAL), error[1])
        return failure if final else InferResponse(error=failure, phases=phases)
    before = tensors.shared_bytes
    outputs = tensors.read(described)
    return InferResponse(
        outputs=outputs,
        shared_bytes=tensors.shared_bytes - before,
        parameters=parameters or NO_PARAMETERS,
        final=final and bool(outputs),
        phases=phases,
    )


def describe_response(response: InferResponse, tensors: TensorWriter) -> list[Any]:
    """`[outputs, error, parameters]` of another model's response."""
    if response.error is not None:
        return describe_error(response.error)
    return [tensors.write(response.outputs), None, dict(response.parameters)]


def expected(error: Exception, failed: str) -> InferenceError:
    """The error for a model; an exception without a code is logged and becomes INTERNAL."""
    if isinstance(error, InferenceError):
        return error
    log.error("request of a Python model failed unexpectedly", exc_info=error)
    return InferenceError(Code.INTERNAL, f"{failed} failed unexpectedly; the server's log says why")


def describe_error(error: InferenceError) -> list[Any]:
    """The same for an error."""
    return [[], [error.code.name, error.message], {}]
