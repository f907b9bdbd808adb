"""A part of GPU memory that another process owns, by the handle that CUDA gives for it."""

import ctypes
import weakref
from dataclasses import dataclass
from typing import Any

from gateway.cuda_driver import CudaFailed, call, load_driver
from gateway.errors import Code, InferenceError
from gateway.tensor import Buffer

HANDLE_BYTES = 64
"""The size of a cudaIpcMemHandle_t."""

LAZY_PEER_ACCESS = 1


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """One GPU, through the CUDA driver, which every machine with a GPU has."""

    driver: Any
    context: ctypes.c_void_p

    def open(self, raw_handle: bytes) -> int:
        """The address of another process's memory in this one."""
        address = ctypes.c_uint64()
        handle = _IpcHandle.from_buffer_copy(raw_handle)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), handle, LAZY_PEER_ACCESS)
        return address.value

    def close(self, address: int) -> None:
        """Give the memory back."""
        self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def size(self, address: int) -> int:
        """How many bytes were allocated from there on."""
        size = ctypes.c_size_t()
        start = ctypes.c_uint64()
        self._call(
            *("cuMemGetAddressRange_v2", ctypes.byref(start), ctypes.byref(size)),
            ctypes.c_uint64(address),
        )
        return start.value + size.value - address

    def read(self, address: int, byte_size: int) -> bytes:
        """Copy from the GPU."""
        data = ctypes.create_string_buffer(byte_size)
        self._call(*("cuMemcpyDtoH_v2", data, ctypes.c_uint64(address), ctypes.c_size_t(byte_size)))
        return data.raw

    def write(self, address: int, data: bytes) -> None:
        """Copy to the GPU."""
        self._call(*("cuMemcpyHtoD_v2", ctypes.c_uint64(address), data, ctypes.c_size_t(len(data))))

    def _call(self, function: str, *arguments: Any) -> None:
        call(self.driver, "cuCtxSetCurrent", self.context)
        call(self.driver, function, *arguments)


class CudaRegion:
    """`byte_size` bytes of a GPU's memory; tensors are copied from it and to it."""

    def __init__(self, name: str, device_id: int, byte_size: int, memory: "CudaMemory") -> None:
        self.name = name
        self.device_id = device_id
        self.byte_size = byte_size
        self._memory = memory
        weakref.finalize(self, memory.device.close, memory.address)

    def read(self, offset: int, byte_size: int) -> memoryview:
        """A copy of those bytes."""
        try:
            data = self._memory.device.read(self._memory.address + offset, byte_size)
        except CudaFailed as error:
            raise self._failed("read", error) from None
        return memoryview(data)

    def write(self, offset: int, data: Buffer) -> None:
        """Put bytes there."""
        try:
            self._memory.device.write(self._memory.address + offset, bytes(data))
        except CudaFailed as error:
            raise self._failed("write", error) from None

    def _failed(self, what: str, error: CudaFailed) -> InferenceError:
        return InferenceError(
            Code.INTERNAL, f"cannot {what} CUDA shared memory region '{self.name}': {error}"
        )


@dataclass(frozen=True, slots=True)
class CudaMemory:
    """An opened handle."""

    device: CudaDevice
    address: int


def open_cuda(name: str, raw_handle: bytes, device_id: int, byte_size: int) -> CudaRegion:
    """Open the memory behind a handle; INVALID_ARG if there is no such GPU or memory."""
    if len(raw_handle) != HANDLE_BYTES:
        raise InferenceError(
            Code.INVALID_ARG, "'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t"
        )
    driver = load_driver()
    if driver is None:
        raise InferenceError(
            Code.INVALID_ARG,
            f"failed to register CUDA shared memory region: '{name}', GPUs not supported",
        )
    try:
        device = open_device(driver, device_id)
        memory = CudaMemory(device, device.open(raw_handle))
        region = CudaRegion(name, device_id, byte_size, memory)
        allocated = device.size(memory.address)
    except CudaFailed as error:
        raise InferenceError(
            Code.INVALID_ARG,
            f"failed to register CUDA shared memory region '{name}' of device {device_id}: {error}",
        ) from None
    if not 0 < byte_size <= allocated:
        raise InferenceError(
            Code.INVALID_ARG, f"failed to register shared memory region '{name}': invalid args"
        )
    return region


def open_device(driver: Any, device_id: int) -> CudaDevice:
    """A GPU with its primary context, which the process keeps; CudaFailed if there is none."""
    device = ctypes.c_int()
    call(driver, "cuDeviceGet", ctypes.byref(device), ctypes.c_int(device_id))
    context = ctypes.c_void_p()
    call(driver, "cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    return CudaDevice(driver, context)
