"""Datatypes and tensors of model.py; the wire form of BYTES."""

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import dlpack
from .errors import TritonModelException

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

Buffer = bytes | memoryview


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


class Tensor:
    """A named array; an arrived one is a view until model.py needs to write."""

    __slots__ = ("__weakref__", "_array", "_data", "_datatype", "_name", "_shape", "_source")

    _name: str
    _datatype: str
    _shape: Sequence[int]
    _array: Any
    _data: Buffer | None
    _source: Any

    def __init__(self, name: str, numpy_array: Any) -> None:
        if not isinstance(name, str) or not isinstance(numpy_array, np.ndarray):
            kinds = f"{type(name).__name__} and {type(numpy_array).__name__}"
            raise TypeError(f"Tensor needs a name (str) and a numpy.ndarray, found {kinds}")
        if not name:
            raise TritonModelException("Tensor name cannot be an empty string.")
        datatype = OF_NUMPY.get(numpy_array.dtype) or name_of(numpy_array.dtype)
        if datatype is None:
            raise TritonModelException("NumPy dtype is not supported.")
        self._name, self._datatype, self._array = name, datatype, numpy_array
        self._shape = numpy_array.shape
        self._source = None
        self._data = _serialized(numpy_array) if datatype == "BYTES" else None

    @classmethod
    def received(cls, name: str, datatype: str, shape: list[int], data: Buffer) -> "Tensor":
        """A tensor over its wire form."""
        self = cls.__new__(cls)
        self._name, self._datatype, self._shape, self._data = name, datatype, shape, data
        self._array = self._source = None
        return self

    def name(self) -> str:
        """Its name in the config."""
        return self._name

    def shape(self) -> list[int]:
        """Its dimensions, with that of the batch."""
        return list(self._shape)

    def triton_dtype(self) -> int:
        """Its datatype, by Triton's number."""
        return NUMBERS[self._datatype]

    def is_cpu(self) -> bool:
        """Whether its data is in host memory."""
        return self._source is None

    def as_numpy(self) -> Any:
        """Its elements in place; BYTES as an array of `bytes` objects."""
        if self._array is None:
            self._array = self._as_array()
        return self._array

    def to_dlpack(self) -> Any:
        """A DLPack capsule over its memory."""
        return self.__dlpack__()

    @staticmethod
    def from_dlpack(name: str, tensor: Any) -> "Tensor":
        """A tensor over the memory of a capsule or of an object with `__dlpack__`."""
        if not name:
            raise TritonModelException("Tensor name cannot be an empty string.")
        if isinstance(tensor, np.ndarray):
            _check_numeric(name_of(tensor.dtype))
            if not tensor.flags.c_contiguous:
                raise TritonModelException(dlpack.NOT_CONTIGUOUS)
            return Tensor(name, tensor)
        return _foreign(name, dlpack.take(tensor))

    def __dlpack__(self, stream: Any = None, **_newer: Any) -> Any:
        """DLPack's protocol before 1.0, which every library reads."""
        if self._source is not None:
            return self._source.capsule()
        _check_numeric(self._datatype)
        if self._datatype == "BF16":
            bits = np.frombuffer(self._writable(), np.uint16).reshape(self._shape)
            return dlpack.give(bits, dlpack.BFLOAT16)
        array = self.as_numpy()
        if self._datatype == "BOOL":
            return dlpack.give(array.view(np.uint8), dlpack.BOOL)
        return dlpack.give(array)

    def __dlpack_device__(self) -> tuple[int, int]:
        """DLPack's protocol: the kind and number of its device."""
        return self._source.device if self._source is not None else (dlpack.CPU, 0)

    def wire(self) -> tuple[str, Sequence[int], Buffer]:
        """Datatype, shape and wire form; copied only if small or not contiguous."""
        if self._source is not None:
            return self._datatype, self._shape, self._source.copied()
        # model.py may have changed a numeric array in place, but not BYTES.
        if self._array is None or self._datatype == "BYTES":
            return self._datatype, self._shape, self._data or b""
        array = self._array
        if array.nbytes < SMALL_BYTES:
            return self._datatype, array.shape, array.tobytes()
        flat = np.ascontiguousarray(array).reshape(-1)
        return self._datatype, array.shape, flat.view(np.uint8).data

    def _as_array(self) -> Any:
        if self._source is not None:
            raise TritonModelException("Tensor is stored in GPU and cannot be converted to NumPy.")
        if self._datatype == "BYTES":
            return _elements(self._data or b"", self._shape)
        dtype = NUMPY_TYPES.get(self._datatype)
        if dtype is None:
            raise TritonModelException(
                "Tensor dtype is BF16 and cannot be converted to NumPy. Use to_dlpack() and "
                "from_dlpack() instead."
            )
        data = self._data or b""
        if isinstance(data, bytes) or data.readonly:
            # In memory that model.py may change, as on Triton.
            return np.ndarray(self._shape, dtype, bytearray(data))
        return np.frombuffer(data, dtype).reshape(self._shape)

    def _writable(self) -> Any:
        """The wire form in memory that model.py may change, as on Triton."""
        data = self._data or b""
        if isinstance(data, bytes) or data.readonly:
            self._data = data = memoryview(bytearray(data))
        return data


SMALL_BYTES = 4096
"""Smaller arrays are copied faster than viewed."""


def _serialized(array: Any) -> bytes:
    return serialize_byte_tensor(array) or b""


def _elements(data: Buffer, shape: Sequence[int]) -> Any:
    return deserialize_bytes_tensor(data).reshape(shape)


def _check_numeric(datatype: str | None) -> None:
    if datatype == "BYTES":
        raise TritonModelException("DLPack does not have support for string tensors.")


def _foreign(name: str, memory: "dlpack.Memory") -> Tensor:
    if memory.on_device:
        tensor = Tensor.received(name, memory.datatype, memory.shape, b"")
        tensor._source = memory  # noqa: SLF001 - made here, for the class above
        return tensor
    if memory.datatype == "BF16":
        bits = memory.array(np.dtype(np.uint16)).reshape(-1).view(np.uint8)
        return Tensor.received(name, "BF16", memory.shape, bits.data)
    return Tensor(name, memory.array(NUMPY_TYPES[memory.datatype]))
