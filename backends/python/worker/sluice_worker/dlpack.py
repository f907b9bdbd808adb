"""DLPack without a library: capsules to memory, and arrays to capsules."""

import ctypes
from typing import Any

import numpy as np

from .errors import TritonModelException

CUDA, CUDA_MANAGED = 2, 13


def copied(device: tuple[int, int], start: int, size_bytes: int) -> bytes:
    """Copy memory of a GPU to host memory, after pending writes.

    TritonModelException if the device is no CUDA device, or its driver refuses.
    """
    kind, number = device
    if kind not in (CUDA, CUDA_MANAGED):
        raise TritonModelException(f"DLPack tensor is on a device of kind {kind}, not on a GPU.")
    if not size_bytes:
        return b""
    driver = _driver()
    context, target = ctypes.c_void_p(), ctypes.create_string_buffer(size_bytes)
    _check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), number))
    try:
        _check(driver.cuCtxSetCurrent(context))
        _check(driver.cuCtxSynchronize())
        _check(driver.cuMemcpyDtoH_v2(target, ctypes.c_uint64(start), ctypes.c_size_t(size_bytes)))
    finally:
        driver.cuDevicePrimaryCtxRelease_v2(number)
    return target.raw


def _driver() -> ctypes.CDLL:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise TritonModelException("Tensor is stored in GPU, and there is no driver.") from error
    _check(driver.cuInit(0))
    return driver


def _check(status: int) -> None:
    if status:
        raise TritonModelException(f"Tensor is stored in GPU, and CUDA answered error {status}.")


CPU = 1
HOST = {CPU, 3, 11}
"""Device kinds whose memory the CPU can read: CPU, CUDA host, ROCm host."""
INT, UINT, FLOAT, BFLOAT, BOOL_CODE = 0, 1, 2, 4, 6
BFLOAT16 = (BFLOAT, 16)
BOOL = (BOOL_CODE, 8)
DATATYPES = {
    BOOL: "BOOL",
    **{(UINT, bits): f"UINT{bits}" for bits in (8, 16, 32, 64)},
    **{(INT, bits): f"INT{bits}" for bits in (8, 16, 32, 64)},
    **{(FLOAT, bits): f"FP{bits}" for bits in (16, 32, 64)},
    BFLOAT16: "BF16",
}
NAME, USED = b"dltensor", b"used_dltensor"
NOT_CONTIGUOUS = (
    "DLPack tensor is not contiguous. Only contiguous DLPack tensors that are stored in C-Order "
    "are supported."
)


class _Tensor(ctypes.Structure):
    """DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    """DLManagedTensor."""

    _fields_ = (
        ("tensor", _Tensor),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.CFUNCTYPE(None, ctypes.c_void_p)),
    )


_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_IsValid", ctypes.pythonapi)
)
_set_name = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_SetName", ctypes.pythonapi)
)


class Memory:
    """The memory of a tensor of another library, kept alive by this object."""

    def __init__(self, capsule: Any, source: Any) -> None:
        address = _pointer(capsule, NAME)
        self._managed = _Managed.from_address(address)
        self._address, self._source = address, source
        tensor = self._managed.tensor
        self.device = (int(tensor.device_type), int(tensor.device_id))
        self.shape = [int(tensor.shape[each]) for each in range(tensor.ndim)]
        self.datatype = _datatype(tensor)
        _check_contiguous(tensor, self.shape)
        # From here on this object must call the deleter.
        _set_name(capsule, USED)
        self._owned = True

    @property
    def on_device(self) -> bool:
        """Whether the CPU cannot read it."""
        return self.device[0] not in HOST

    def array(self, dtype: "np.dtype[Any]") -> Any:
        """The memory in place."""
        return np.asarray(_Interface(self, dtype, self._start()))

    def copied(self) -> bytes:
        """The bytes of a device's memory."""
        elements = 1
        for size in self.shape:
            elements *= size
        size_bytes = elements * self._managed.tensor.bits // 8
        return copied(self.device, self._start(), size_bytes)

    def capsule(self) -> Any:
        """Another capsule from the same source."""
        if self._source is None:
            raise TritonModelException("a capsule of a GPU's memory cannot be given twice.")
        return self._source.__dlpack__()

    def _start(self) -> int:
        return int(self._managed.tensor.data or 0) + int(self._managed.tensor.byte_offset)

    def __del__(self) -> None:
        if getattr(self, "_owned", False) and self._managed.deleter:
            self._managed.deleter(self._address)


class _Interface:
    """Memory as numpy's array interface; an array over it keeps this object alive."""

    def __init__(self, memory: Memory, dtype: "np.dtype[Any]", start: int) -> None:
        self._memory = memory
        self.__array_interface__ = {
            "version": 3,
            "shape": tuple(memory.shape),
            "typestr": dtype.str,
            "data": (start, False),
        }


def take(tensor: Any) -> Memory:
    """The memory of a capsule, or of an object with `__dlpack__`."""
    if _is_valid(tensor, NAME):
        return Memory(tensor, None)
    if not hasattr(tensor, "__dlpack__") or not hasattr(tensor, "__dlpack_device__"):
        raise TritonModelException(
            "Provided tensor is not supported. Tensor must be a DLPack capsule or have "
            "`__dlpack__` and `__dlpack_device__` attributes"
        )
    return Memory(tensor.__dlpack__(), tensor)


def give(array: Any, kind: tuple[int, int] | None = None) -> Any:
    """A capsule over an array; `kind` is another element type of the same size."""
    if not array.flags.writeable:
        # DLPack before 1.0 has no flag for read-only memory.
        array = array.copy()
    capsule = array.__dlpack__()
    if kind is not None:
        tensor = _Managed.from_address(_pointer(capsule, NAME)).tensor
        tensor.code, tensor.bits = kind
    return capsule


def _datatype(tensor: _Tensor) -> str:
    found = DATATYPES.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    if found is None:
        kind = f"type code {tensor.code} of {tensor.bits} bits with {tensor.lanes} lanes"
        raise TritonModelException(f"DLPack tensor has elements of {kind}, which is not supported.")
    return found


def _check_contiguous(tensor: _Tensor, shape: list[int]) -> None:
    if not tensor.strides or 0 in shape:
        return
    expected = 1
    for dimension in reversed(range(len(shape))):
        if shape[dimension] != 1 and tensor.strides[dimension] != expected:
            raise TritonModelException(NOT_CONTIGUOUS)
        expected *= shape[dimension]
