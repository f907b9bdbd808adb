"""Bytes in the memory of a GPU, copied to the host on demand."""

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

from gateway.cuda_driver import CudaFailed, call, find_device, load_driver
from gateway.errors import Code, InferenceError

PER_THREAD_STREAM = 2
"""The driver's CU_STREAM_PER_THREAD, which waits for no other stream."""


class DeviceMemory:
    """`byte_size` bytes from `address` on GPU number `gpu`; `owner` keeps the memory allocated.

    Reads do not wait for the streams of a runtime: all writes must have completed.
    """

    __slots__ = ("_owner", "address", "byte_size", "gpu")

    def __init__(self, gpu: int, address: int, byte_size: int, owner: object) -> None:
        self.gpu = gpu
        self.address = address
        self.byte_size = byte_size
        self._owner = owner

    def __len__(self) -> int:
        return self.byte_size

    def read(self) -> memoryview:
        """A copy on the host, read-only; blocks. INTERNAL if the GPU fails."""
        try:
            return memoryview(device(self.gpu).read(self.address, self.byte_size))
        except CudaFailed as error:
            raise _failed("read", self.gpu, error) from None

    def take(self, other: "DeviceMemory") -> None:
        """Copy memory of the same GPU to the start of this; blocks. INTERNAL if the GPU fails."""
        try:
            device(self.gpu).copy(self.address, other.address, other.byte_size)
        except CudaFailed as error:
            raise _failed("write", self.gpu, error) from None


class DeviceRegion:
    """Registered memory of a GPU; a model on the same GPU can write its outputs there."""

    gpu: int

    def part(self, offset: int, byte_size: int) -> DeviceMemory:
        """Bytes [offset, offset + byte_size), which keep the region allocated."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU by the CUDA driver; the process retains its primary context."""

    driver: Any
    context: ctypes.c_void_p

    def read(self, address: int, byte_size: int) -> bytes:
        """Copy from the GPU."""
        data = ctypes.create_string_buffer(byte_size)
        self.call(*("cuMemcpyDtoH_v2", data, ctypes.c_uint64(address), ctypes.c_size_t(byte_size)))
        return data.raw

    def write(self, address: int, data: bytes) -> None:
        """Copy to the GPU."""
        self.call(*("cuMemcpyHtoD_v2", ctypes.c_uint64(address), data, ctypes.c_size_t(len(data))))

    def copy(self, address: int, source: int, byte_size: int) -> None:
        """Copy within the GPU; blocks."""
        stream = ctypes.c_void_p(PER_THREAD_STREAM)
        places = (ctypes.c_uint64(address), ctypes.c_uint64(source), ctypes.c_size_t(byte_size))
        self.call("cuMemcpyDtoDAsync_v2", *places, stream)
        self.call("cuStreamSynchronize", stream)

    def call(self, function: str, *arguments: Any) -> None:
        """Call a function of the driver in the context of this GPU; CudaFailed if it fails."""
        call(self.driver, "cuCtxSetCurrent", self.context)
        call(self.driver, function, *arguments)


def device(number: int) -> Device:
    """The GPU of that number; CudaFailed if it or the driver is missing."""

    driver = load_driver()
    if driver is None:
        raise CudaFailed("there is no CUDA driver")
    return _open(driver, number)


@cache
def _open(driver: Any, number: int) -> Device:
    found, context = find_device(driver, number), ctypes.c_void_p()
    call(driver, "cuDevicePrimaryCtxRetain", ctypes.byref(context), found)
    return Device(driver, context)


def _failed(what: str, gpu: int, error: CudaFailed) -> InferenceError:
    return InferenceError(Code.INTERNAL, f"cannot {what} memory of GPU {gpu}: {error}")
