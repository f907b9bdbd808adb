"""Datatypes by name, by Triton's number and as numpy types; the wire form of BYTES."""

import struct
from typing import Any

import numpy as np

TRITON_STRING_TO_NUMPY: dict[str, Any] = {
    "TYPE_BOOL": bool,
    "TYPE_UINT8": np.uint8,
    "TYPE_UINT16": np.uint16,
    "TYPE_UINT32": np.uint32,
    "TYPE_UINT64": np.uint64,
    "TYPE_INT8": np.int8,
    "TYPE_INT16": np.int16,
    "TYPE_INT32": np.int32,
    "TYPE_INT64": np.int64,
    "TYPE_FP16": np.float16,
    "TYPE_FP32": np.float32,
    "TYPE_FP64": np.float64,
    "TYPE_STRING": np.object_,
}
NAMES = (
    *("BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64"),
    *("FP16", "FP32", "FP64", "BYTES", "BF16"),
)
NUMBERS = {name: number for number, name in enumerate(NAMES, 1)}
"""Triton's numbers of datatypes."""
NUMPY_TYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(TRITON_STRING_TO_NUMPY[f"TYPE_{name}"]) for name in NAMES[:12]
}
"""Datatypes of fixed size that numpy has."""
OF_NUMPY = {dtype: name for name, dtype in NUMPY_TYPES.items()}
BF16_BITS = np.dtype(np.uint16)
LENGTH = struct.Struct("<I")


def triton_string_to_numpy(triton_type_string: str) -> Any:
    """The numpy type of a config's data type; KeyError without one."""
    return TRITON_STRING_TO_NUMPY[triton_type_string]


def triton_to_numpy_type(data_type: int) -> Any:
    """The numpy type of a numbered datatype; None without one."""
    if data_type == NUMBERS["BYTES"]:
        return np.object_
    if not 1 <= data_type <= len(NUMPY_TYPES):
        return None
    return NUMPY_TYPES[NAMES[data_type - 1]].type


def numpy_to_triton_type(data_type: Any) -> int | None:
    """The number of a numpy type's datatype; None without one."""
    name = name_of(np.dtype(data_type))
    return None if name is None else NUMBERS[name]


def name_of(dtype: np.dtype[Any]) -> str | None:
    """The datatype of an array's elements."""
    return OF_NUMPY.get(dtype) or ("BYTES" if dtype.kind in "OS" else None)


def serialize_byte_tensor(input_tensor: Any) -> Any:
    """The wire form of BYTES elements, each after its length.

    () for an empty array, None for an array of another type, as on Triton.
    """
    if input_tensor.size == 0:
        return ()
    if input_tensor.dtype.kind not in "OS":
        return None
    parts: list[bytes] = []
    for value in input_tensor.ravel().tolist():
        element = value if type(value) is bytes else str(value).encode()
        parts.append(LENGTH.pack(len(element)))
        parts.append(element)
    return b"".join(parts)


def deserialize_bytes_tensor(encoded_tensor: Any) -> Any:
    """The elements in the wire form of BYTES; struct.error if one is truncated."""
    elements: list[bytes] = []
    start, size = 0, len(encoded_tensor)
    while start < size:
        (length,) = LENGTH.unpack_from(encoded_tensor, start)
        start += LENGTH.size
        (element,) = struct.unpack_from(f"{length}s", encoded_tensor, start)
        start += length
        elements.append(element)
    array = np.empty(len(elements), dtype=np.object_)
    array[:] = elements
    return array
