"""The data of one input given as JSON, checked against its shape and the limit of its size."""

from typing import Any

from gateway.errors import Code, InferenceError
from gateway.frontends.http.json_tensors import flatten, pack
from gateway.frontends.http.large_json import LargeArray
from gateway.tensor import LENGTH_BYTES, SIZES, Datatype, Tensor, format_shape, join_elements

MAX_SIZE = 2**63 - 1
"""Elements, or bytes, of one tensor."""


def read_json_input(
    name: str, datatype: Datatype, shape: tuple[int, ...], data: list[Any] | LargeArray, limit: int
) -> Tensor:
    """An input whose `data` may be nested in any way; `limit` is the most bytes it may have.

    Raises InferenceError with Triton's texts (protocol: JSON data rules). How many elements a
    BYTES input has is for validation to check.
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
    """The same, packed part by part; BYTES are in the wire form."""
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
    """How many elements the shape announces; a product of many large dims is never computed."""
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
