"""Tensors as JSON values: reading and writing of each datatype."""

import codecs
import json
import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import orjson

from gateway.errors import Code, InferenceError
from gateway.frontends.http.large_json import LargeArray, LongString
from gateway.tensor import (
    LENGTH_BYTES,
    SIZES,
    Datatype,
    Tensor,
    batched_elements,
    format_shape,
    join_elements,
)
from gateway.threads import LARGE_BYTES

PART_BYTES = 1 << 18
"""Bytes of a string that are written by one call."""
PART_ELEMENTS = 1 << 15
"""Elements of a large tensor that one call writes."""

MAX_DEPTH = 100
"""Levels of nested arrays in `data` (protocol: JSON data rules)."""

MAX_SIZE = 2**63 - 1
"""Elements, or bytes, of one tensor."""

TYPE_CODES: Mapping[Datatype, str] = {
    Datatype.UINT8: "B",
    Datatype.UINT16: "H",
    Datatype.UINT32: "I",
    Datatype.UINT64: "Q",
    Datatype.INT8: "b",
    Datatype.INT16: "h",
    Datatype.INT32: "i",
    Datatype.INT64: "q",
    Datatype.FP32: "f",
    Datatype.FP64: "d",
}
"""Type codes of the module `array` for the datatypes that JSON has numbers for."""

BUFFERS = (bytes, bytearray, memoryview)
SIGNED = frozenset({Datatype.INT8, Datatype.INT16, Datatype.INT32, Datatype.INT64})
FLOATS = frozenset({Datatype.FP32, Datatype.FP64})


def pack(datatype: Datatype, values: Sequence[Any], name: str) -> bytes | tuple[bytes, ...]:
    """JSON values as the data of a tensor; integers are stored modulo 2^N, as Triton does.

    Raises InferenceError with Triton's texts: INTERNAL for a value of the wrong kind, INVALID_ARG
    for a datatype without a JSON form.
    """
    kinds = set(map(type, values))
    if datatype is Datatype.BYTES:
        return _pack_strings(kinds, values)
    if datatype is Datatype.BOOL:
        _expect(kinds <= {bool}, "boolean as boolean")
        return bytes(values)
    code = TYPE_CODES.get(datatype)
    if code is None:
        raise InferenceError(
            Code.INVALID_ARG,
            f"receiving {datatype} data via JSON is not supported. Please use the binary data "
            f"format for input {name}",
        )
    if datatype in FLOATS:
        _expect(kinds <= {float, int}, "number as double")
        return array(code, values).tobytes()
    return _pack_integers(datatype, code, kinds, values)


def _pack_strings(kinds: set[type], values: Sequence[Any]) -> tuple[bytes, ...]:
    if not kinds <= {str, LongString}:
        raise InferenceError(
            Code.INTERNAL,
            "Unable to parse JSON bytes array: attempt to access JSON non-string as string",
        )
    return tuple([value.encode("utf-8", "surrogatepass") for value in values])


def _pack_integers(datatype: Datatype, code: str, kinds: set[type], values: Sequence[Any]) -> bytes:
    signed = datatype in SIGNED
    text = "signed-integer as signed-integer" if signed else "unsigned-integer as unsigned-integer"
    _expect(kinds <= {int}, text)
    try:
        return array(code, values).tobytes()
    except OverflowError:
        least, most = (-(2**63), 2**63 - 1) if signed else (0, 2**64 - 1)
        _expect(least <= min(values) and max(values) <= most, text)
        mask = (1 << 8 * SIZES[datatype]) - 1
        return array(code.upper(), [value & mask for value in values]).tobytes()


def _expect(fits: bool, text: str) -> None:
    if not fits:
        raise InferenceError(
            Code.INTERNAL, f"Unable to parse 'data': attempt to access JSON non-{text}"
        )


def flatten(values: list[Any]) -> list[Any]:
    """The values of nested arrays in order; INVALID_ARG beyond MAX_DEPTH levels."""
    if list not in set(map(type, values)):
        return values
    found: list[Any] = []
    _flatten_into(found, values, MAX_DEPTH)
    return found


def _flatten_into(found: list[Any], values: list[Any], depth: int) -> None:
    """Add the values of arrays of at most `depth` levels."""
    while list in (kinds := set(map(type, values))):
        depth -= 1
        if depth == 0:
            raise InferenceError(
                Code.INVALID_ARG,
                "Unable to parse 'data': JSON nesting depth exceeds maximum allowed limit "
                f"({MAX_DEPTH})",
            )
        if len(kinds) > 1:
            _flatten_mixed(found, values, depth)
            return
        values = list(chain.from_iterable(values))
    found += values


def _flatten_mixed(found: list[Any], values: list[Any], depth: int) -> None:
    for each in values:
        if type(each) is list:
            _flatten_into(found, each, depth)
        else:
            found.append(each)


def values_of(tensor: Tensor) -> list[Any]:
    """A tensor's elements as JSON values, flat; an FP32 is the exact double of its value.

    BYTES that are not UTF-8 have the replacement character. INVALID_ARG for a datatype without a
    JSON form.
    """
    if tensor.datatype is Datatype.BYTES:
        return [element.decode("utf-8", "replace") for element in tensor.elements()]
    if tensor.datatype is Datatype.BOOL:
        return memoryview(tensor.raw()).cast("B").cast("?").tolist()
    code = TYPE_CODES.get(tensor.datatype)
    if code is None:
        raise InferenceError(
            Code.INVALID_ARG,
            f"sending {tensor.datatype} data via JSON is not supported. Please use the binary "
            "data format for output",
        )
    return memoryview(tensor.raw()).cast("B").cast(code).tolist()  # type: ignore[call-overload, no-any-return] # the code is no literal


def is_large(outputs: Iterable[Tensor]) -> bool:
    """Whether these tensors are written as JSON in a thread."""
    size = 0
    for output in outputs:
        data = output.data
        if isinstance(data, BUFFERS):
            size += len(data)
        elif isinstance(data, tuple):
            size += len(data[0]) + 1 if len(data) == 1 else sum(map(len, data)) + len(data)
    return size > LARGE_BYTES


def written(tensor: Tensor) -> orjson.Fragment | list[Any]:
    """A tensor's elements for `orjson.dumps`, with Python's literals for NaN and infinities.

    A large tensor is written in parts, since each call holds the interpreter lock.
    """
    data = tensor.data
    if (isinstance(data, BUFFERS) and len(data) <= LARGE_BYTES) or not is_large((tensor,)):
        values = values_of(tensor)
        return values if all_finite(values) else orjson.Fragment(_literals(values))
    return orjson.Fragment(b"[%b]" % b",".join([_written_part(part) for part in _parts(tensor)]))


def written_string(element: bytes) -> bytes:
    """A large element of BYTES as JSON, written in parts as large tensors are."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    size = len(element)
    parts = [
        orjson.dumps(decoder.decode(element[at : at + PART_BYTES], at + PART_BYTES >= size))[1:-1]
        for at in range(0, size, PART_BYTES)
    ]
    return b'"%b"' % b"".join(parts)


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """The elements of a large tensor in parts: freeing many objects at once takes long."""
    data: Any = tensor.data
    if tensor.datatype is not Datatype.BYTES:
        data = memoryview(tensor.raw()).cast("B")
        step = PART_ELEMENTS * SIZES[tensor.datatype]
    elif isinstance(data, tuple):
        step = PART_ELEMENTS
    else:
        for part in batched_elements(data, tensor.name, PART_ELEMENTS):
            yield replace(tensor, shape=(), data=part)
        return
    for at in range(0, len(data), step):
        yield replace(tensor, shape=(), data=data[at : at + step])


def _written_part(part: Tensor) -> bytes:
    if part.datatype is Datatype.BYTES:
        elements = list(part.elements())
        if max(map(len, elements), default=0) > PART_BYTES:
            return b",".join(map(written_string, elements))
    values = values_of(part)
    return (orjson.dumps(values) if all_finite(values) else _literals(values))[1:-1]


def _literals(values: Sequence[Any]) -> bytes:
    # JSON has no NaN or infinity; as Triton, the server writes Python's literals.
    return json.dumps(values, ensure_ascii=False, separators=(",", ":")).encode()


def all_finite(values: Sequence[Any]) -> bool:
    """Whether these elements of one tensor have no NaN and no infinity."""
    if not values or type(values[0]) is not float:
        return True
    # A sum that is finite has only finite terms; one that overflows decides nothing.
    return math.isfinite(sum(values)) or all(map(math.isfinite, values))


def read_json_input(
    name: str, datatype: Datatype, shape: tuple[int, ...], data: list[Any] | LargeArray, limit: int
) -> Tensor:
    """An input with flat or nested `data`, of at most `limit` bytes.

    Raises InferenceError with Triton's texts (protocol: JSON data rules). Validation checks the
    number of elements of BYTES.
    """
    count = _count(name, shape)
    if count == 0:
        return Tensor(name, datatype, shape, b"")
    if isinstance(data, LargeArray):
        return _read_large(name, datatype, shape, data, limit)
    if datatype is Datatype.BYTES:
        elements = pack(datatype, flatten(data), name)
        _check_limit(name, sum(map(len, elements)) + LENGTH_BYTES * len(elements), limit)  # type: ignore[arg-type] # they are strings
        return Tensor(name, datatype, shape, elements)
    _check_size(name, count, SIZES[datatype])
    _check_limit(name, count * SIZES[datatype], limit)
    return Tensor(name, datatype, shape, _pack_exactly(name, datatype, count, flatten(data)))


def _read_large(
    name: str, datatype: Datatype, shape: tuple[int, ...], data: LargeArray, limit: int
) -> Tensor:
    """The same, packed in parts; BYTES have their wire form."""
    if datatype is Datatype.BYTES:
        return Tensor(name, datatype, shape, _joined(name, data, limit))
    count = _count(name, shape)
    _check_size(name, count, SIZES[datatype])
    _check_limit(name, count * SIZES[datatype], limit)
    packed: list[Any] = []
    found = 0
    for part in data.parts():
        values = flatten(part)
        packed.append(pack(datatype, values[: max(count - found, 0)], name))
        found += len(values)
    _check_count(count, found)
    return Tensor(name, datatype, shape, b"".join(packed))


def _joined(name: str, data: LargeArray, limit: int) -> bytes:
    packed: list[bytes] = []
    size = 0
    for part in data.parts():
        packed.append(join_elements(pack(Datatype.BYTES, flatten(part), name)))  # type: ignore[arg-type] # they are strings
        size += len(packed[-1])
    _check_limit(name, size, limit)
    return b"".join(packed)


def _pack_exactly(
    name: str, datatype: Datatype, count: int, values: list[Any]
) -> bytes | tuple[bytes, ...]:
    packed = pack(datatype, values[:count], name)
    _check_count(count, len(values))
    return packed


def _check_count(count: int, found: int) -> None:
    if found > count:
        raise InferenceError(
            Code.INTERNAL,
            "Unable to parse 'data': Shape does not match true shape of 'data' field",
        )
    if found < count:
        raise InferenceError(
            Code.INTERNAL, "Failed to parse 'data' field: shape does not match true shape"
        )


def _count(name: str, shape: tuple[int, ...]) -> int:
    """The number of elements of a shape; INVALID_ARG beyond MAX_SIZE."""
    if 0 in shape:
        return 0
    count = 1
    for dim in shape:
        count *= dim
        if count > MAX_SIZE:
            raise InferenceError(
                Code.INVALID_ARG,
                f"invalid shape for input '{name}': shape {format_shape(shape)} causes total "
                f"element count to exceed maximum size of {MAX_SIZE}",
            )
    return count


def _check_size(name: str, count: int, size: int) -> None:
    if count * size > MAX_SIZE:
        raise InferenceError(
            Code.INVALID_ARG,
            f"byte size overflow for input '{name}': element count ({count}) * data type size "
            f"({size}) exceeds maximum allowed size ({MAX_SIZE})",
        )


def _check_limit(name: str, byte_size: int, limit: int) -> None:
    if byte_size > limit:
        raise InferenceError(
            Code.INVALID_ARG,
            f"JSON input '{name}' has a byte_size ({byte_size} bytes) that exceeds the maximum "
            f"allowed value of {limit} bytes. Use --http-max-input-size to increase the limit.",
        )
