"""Encoding of requests and responses between processes of Sluice, as MessagePack.

The structs are arrays. They grow at the end only, with defaults: a release reads the messages of
the release before it, and of the one after it. A message that does not fit is refused as a whole.
"""

from collections.abc import Sequence
from math import prod
from struct import Struct
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from gateway.cuda_driver import DeviceMemory
from gateway.errors import Code, InferenceError
from gateway.messages import (
    NO_PARAMETERS,
    EngineStamps,
    InferRequest,
    InferResponse,
    Parameter,
    Phases,
    Usage,
)
from gateway.policy.caller import Caller
from gateway.processes.error_messages import ErrorMessage, error_of, written_error
from gateway.processes.malformed import UNREADABLE, malformed
from gateway.processes.request_terms import (
    Array,
    Routing,
    Size,
    Terms,
    read_terms,
    written_terms,
)
from gateway.tensor import (
    LENGTH_BYTES,
    SIZES,
    Buffer,
    Datatype,
    Tensor,
    element_runs,
    format_shape,
)

MOST_DIMS = 64
"""Dims of a tensor, as numpy has them; the product of any number would block this process."""

BYTES = Datatype.BYTES
BUFFERS = frozenset((bytes, bytearray, memoryview))

LargeData = Buffer | DeviceMemory | tuple[bytes, ...]
"""Data of a tensor that is sent apart from its message, which has its number instead."""
LARGE_BYTES, LARGE_COUNT = 256 << 10, 16_384
"""The bytes, and the elements, from which data is large."""

read_length = Struct("<I").unpack_from
"""The length of the first element in the wire form of BYTES, in a tuple."""

_Shape = Annotated[tuple[Size, ...], Meta(max_length=MOST_DIMS)]
_RequestParameter = bool | int | float | str | list[Any] | dict[str, Any] | None


class _Tensor(Array):
    name: str
    datatype: Datatype
    shape: _Shape
    data: bytes | tuple[bytes, ...] | Size


class _Request(Array):
    model: str
    version: str
    id: str
    inputs: tuple[_Tensor, ...]
    parameters: dict[str, _RequestParameter]
    tenant: str
    terms: Terms | None = None


class _Response(Array):
    final: bool
    outputs: tuple[_Tensor, ...]
    parameters: dict[str, Parameter] | None
    usage: tuple[Size, Size, str] | None
    phases: tuple[Size, Size, Size] | None = None
    error: ErrorMessage | None = None
    cached_tokens: Size | None = None
    engine: tuple[Size, Size, Size, Size, Size] | None = None


_encode = msgspec.msgpack.Encoder().encode
_decode_request = msgspec.msgpack.Decoder(_Request).decode
_decode_response = msgspec.msgpack.Decoder(_Response).decode

UNWRITABLE = (OverflowError, RecursionError, TypeError, ValueError)
"""The errors of values that MessagePack cannot encode."""


def write_request(
    request: InferRequest,
    waited_us: int = 0,
    large: list[LargeData] | None = None,
    routing: Routing | None = None,
) -> bytes:
    """A request as bytes, without the data that it adds to `large`.

    Fields of `routing` take the place of its own. INVALID_ARG if a parameter has no encoding.
    Its timeout is sent as the time left after `waited_us`, at least 1, and its deadline as the time
    left now, because clocks of machines differ. Of its caller only the tenant is sent: the sender
    has checked the rights. Of its trace the `traceparent` is sent, of its outputs no region: the
    sender writes to shared memory.
    """
    caller, parameters, tensors = request.caller, request.parameters, request.inputs
    if routing is None:
        routing = Routing(request.version, request.trace, request.prompt, request.chosen)
    # Most messages have one tensor, and `map` costs 5 % of the time to write or read one.
    written = _Request(
        request.model,
        routing.version,
        request.id,
        (_written(tensors[0], large),)
        if len(tensors) == 1
        else tuple([_written(each, large) for each in tensors]),
        dict(parameters) if parameters else {},
        "" if caller is None else caller.tenant,
        written_terms(request, waited_us, routing),
    )
    try:
        return _encode(written)
    except UNWRITABLE as error:
        raise InferenceError(
            Code.INVALID_ARG,
            f"model '{request.model}': the parameters of the request cannot be read: {error}",
        ) from error


def read_request(
    payload: bytes, large: Sequence[Buffer] | None = (), received_ns: int = 0
) -> InferRequest:
    """The request that `write_request` encoded; its sequence has the tenant of its caller.

    If `large` is None, inputs with large data are left out. The time left of its deadline is from
    `received_ns` on (`time.perf_counter_ns`), 0 for now. Raises InferenceError for other bytes.
    """
    try:
        found = _decode_request(payload)
        tensors = found.inputs
        if large is None:
            tensors = tuple([each for each in tensors if not isinstance(each.data, int)])
        inputs = (
            (_read(tensors[0], large),)
            if len(tensors) == 1
            else tuple([_read(each, large) for each in tensors])
        )
    except UNREADABLE as error:
        raise malformed("request", payload, error) from error
    fields: dict[str, Any] = {
        "model": found.model,
        "version": found.version,
        "id": found.id,
        "inputs": inputs,
        "parameters": found.parameters,
    }
    if found.tenant:
        fields["caller"] = Caller(tenant=found.tenant)
    if found.terms is not None:
        fields |= read_terms(found.terms, found.tenant, received_ns)
    return InferRequest(**fields)


def write_response(response: InferResponse, large: list[LargeData] | None = None) -> bytes:
    """A response as bytes, without the data that it adds to `large`."""
    parameters, usage = response.parameters, response.usage
    phases, error, tensors = response.phases, response.error, response.outputs
    return _encode(
        _Response(
            response.final,
            (_written(tensors[0], large),)
            if len(tensors) == 1
            else tuple([_written(each, large) for each in tensors]),
            dict(parameters) if parameters else None,
            None
            if usage is None
            else (usage.prompt_tokens, usage.completion_tokens, usage.finish_reason),
            None if phases is None else (phases.input_ns, phases.infer_ns, phases.output_ns),
            None if error is None else written_error(error),
            None if usage is None else usage.cached_tokens,
            None if response.engine is None else stamps_of(response.engine),
        )
    )


def read_response(payload: bytes, large: Sequence[Buffer] = ()) -> InferResponse:
    """The response that `write_response` encoded; InferenceError for other bytes."""
    try:
        found = _decode_response(payload)
        tensors = found.outputs
        outputs = (
            (_read(tensors[0], large),)
            if len(tensors) == 1
            else tuple([_read(each, large) for each in tensors])
        )
    except UNREADABLE as error:
        raise malformed("response", payload, error) from error
    usage, phases, failed, engine = found.usage, found.phases, found.error, found.engine
    return InferResponse(
        outputs=outputs,
        parameters=found.parameters or NO_PARAMETERS,
        final=found.final,
        usage=None if usage is None else Usage(*usage, found.cached_tokens),
        phases=None if phases is None else Phases(*phases),
        error=None if failed is None else error_of(failed),
        engine=None if engine is None else EngineStamps(*engine),
    )


def stamps_of(engine: EngineStamps) -> tuple[int, int, int, int, int]:
    """The stamps of an engine as a tuple, in the order of their class."""
    return (
        *(engine.queued_ns, engine.scheduled_ns, engine.first_token_ns, engine.last_token_ns),
        engine.preemptions,
    )


def _written(tensor: Tensor, large: list[LargeData] | None) -> _Tensor:
    data: Any = tensor.data
    # The usual form first: a further call is a tenth of the time of a message.
    if type(data) in BUFFERS and len(data) <= LARGE_BYTES:
        return _Tensor(tensor.name, tensor.datatype, tensor.shape, data)
    if large is not None and _is_large(data):
        large.append(data)
        data = len(large) - 1
    elif isinstance(data, DeviceMemory):
        data = data.read()
    return _Tensor(tensor.name, tensor.datatype, tensor.shape, data)


def _is_large(data: LargeData) -> bool:
    if isinstance(data, tuple):
        return len(data) > LARGE_COUNT or sum(map(len, data)) > LARGE_BYTES
    return len(data) > LARGE_BYTES


def _read(found: _Tensor, large: Sequence[Buffer] | None) -> Tensor:
    datatype, shape = found.datatype, found.shape
    data: Any = found.data
    if isinstance(data, int):
        data = _large_data(found, data, large or ())
    count = prod(shape)
    # Only the usual forms are checked here: a further call is a tenth of the time of a request.
    if datatype is not BYTES:
        fits = isinstance(data, bytes) and len(data) == count * SIZES[datatype]
    elif isinstance(data, tuple):
        fits = len(data) == count
    else:
        size = len(data) - LENGTH_BYTES
        fits = count == 1 and size >= 0 and read_length(data)[0] == size
    if not fits:
        _check(found, data)
    return Tensor(found.name, datatype, shape, data)


def _large_data(tensor: _Tensor, number: int, large: Sequence[Buffer]) -> Buffer:
    if number >= len(large):
        raise ValueError(
            f"tensor '{tensor.name}' has large data {number}, expected less than {len(large)}"
        )
    return large[number]


def _check(tensor: _Tensor, data: Buffer | tuple[bytes, ...]) -> None:
    """Raise ValueError unless the data has the elements of the shape."""
    shape, size = tensor.shape, SIZES.get(tensor.datatype, 0)
    found = _size(tensor, data)
    unit = "bytes" if size else "elements"
    expected = prod(shape) * (size or 1)
    if found == expected:
        return
    if shape and not shape[0] and found == prod(shape[1:]) * (size or 1):
        return  # On some models Triton expects the data of one item for an empty batch.
    raise ValueError(
        f"tensor '{tensor.name}' of {tensor.datatype} has {found} {unit}, expected {expected} by "
        f"its shape {format_shape(shape)}"
    )


def _size(tensor: _Tensor, data: Buffer | tuple[bytes, ...]) -> int:
    """The number of elements of BYTES, or of bytes of numbers."""
    if tensor.datatype is BYTES:
        return len(data) if isinstance(data, tuple) else _count(tensor.name, data)
    if isinstance(data, tuple):
        raise ValueError(
            f"tensor '{tensor.name}' of {tensor.datatype} has elements of BYTES, expected bytes"
        )
    return len(data)


def _count(name: str, data: Buffer) -> int:
    """The number of elements in the wire form of BYTES."""
    size, found = len(data), 0
    for _, end, count in element_runs(data):
        if end > size:
            raise ValueError(
                f"tensor '{name}' of BYTES has {size} bytes, expected {end} by the length of its "
                f"element {found}"
            )
        found += count
    return found
