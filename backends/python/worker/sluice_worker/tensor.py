"""Tensors of model.py."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from . import dlpack
from .datatypes import (
    NUMBERS,
    NUMPY_TYPES,
    deserialize_bytes_tensor,
    name_of,
    serialize_byte_tensor,
)
from .errors import TritonModelException

Buffer = bytes | memoryview


class Tensor:
    """A named array; an arrived one is a view until model.py needs to write."""

    __slots__ = ("__weakref__", "_array", "_data", "_datatype", "_name", "_shape", "_source")

    _name: str
    _datatype: str
    _shape: list[int]
    _array: Any
    _data: Buffer | None
    _source: Any

    def __init__(self, name: str, numpy_array: Any) -> None:
        if not isinstance(name, str) or not isinstance(numpy_array, np.ndarray):
            kinds = f"{type(name).__name__} and {type(numpy_array).__name__}"
            raise TypeError(f"Tensor needs a name (str) and a numpy.ndarray, found {kinds}")
        if not name:
            raise TritonModelException("Tensor name cannot be an empty string.")
        datatype = name_of(numpy_array.dtype)
        if datatype is None:
            raise TritonModelException("NumPy dtype is not supported.")
        self._name, self._datatype, self._array = name, datatype, numpy_array
        self._shape = list(numpy_array.shape)
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
        return np.frombuffer(self._writable(), dtype).reshape(self._shape)

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


def _elements(data: Buffer, shape: list[int]) -> Any:
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
