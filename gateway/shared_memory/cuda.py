"""CUDA regions: GPU memory of another process, opened by its CUDA IPC handle."""

import ctypes
import weakref
from dataclasses import dataclass

from gateway.cuda_driver import CudaFailed, Device, DeviceMemory, DeviceRegion, device, load_driver
from gateway.errors import Code, InferenceError
from gateway.tensor import Buffer

HANDLE_BYTES = 64
"""The size of a cudaIpcMemHandle_t."""

LAZY_PEER_ACCESS = 1


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


@dataclass(frozen=True, slots=True)
class OpenedHandle:
    """Memory of another process, mapped at an address of this process."""

    device: Device
    address: int

    @classmethod
    def of(cls, device: Device, raw_handle: bytes) -> "OpenedHandle":
        """Open a handle; CudaFailed if it is invalid."""
        address = ctypes.c_uint64()
        handle = _IpcHandle.from_buffer_copy(raw_handle)
        device.call("cuIpcOpenMemHandle_v2", ctypes.byref(address), handle, LAZY_PEER_ACCESS)
        return cls(device, address.value)

    def close(self) -> None:
        """Unmap the memory."""
        self.device.call("cuIpcCloseMemHandle", ctypes.c_uint64(self.address))

    def size(self) -> int:
        """The number of bytes allocated from this address on."""
        size = ctypes.c_size_t()
        start = ctypes.c_uint64()
        self.device.call(
            *("cuMemGetAddressRange_v2", ctypes.byref(start), ctypes.byref(size)),
            ctypes.c_uint64(self.address),
        )
        return start.value + size.value - self.address


class CudaRegion(DeviceRegion):
    """`byte_size` bytes of a GPU's memory; models on that GPU read and write them directly.

    For other models tensors are copied.
    """

    def __init__(self, name: str, device_id: int, byte_size: int, memory: OpenedHandle) -> None:
        self.name = name
        self.device_id = self.gpu = device_id
        self.byte_size = byte_size
        self._memory = memory
        weakref.finalize(self, memory.close)

    def part(self, offset: int, byte_size: int) -> DeviceMemory:
        return DeviceMemory(self.gpu, self._memory.address + offset, byte_size, self)

    def write(self, offset: int, data: Buffer) -> None:
        """Copy bytes of the host to the region; INTERNAL if the GPU fails."""
        try:
            self._memory.device.write(self._memory.address + offset, bytes(data))
        except CudaFailed as error:
            raise InferenceError(
                Code.INTERNAL, f"cannot write CUDA shared memory region '{self.name}': {error}"
            ) from None


def open_cuda(name: str, raw_handle: bytes, device_id: int, byte_size: int) -> CudaRegion:
    """Open the memory of a handle; INVALID_ARG if the GPU or the memory does not exist."""
    if len(raw_handle) != HANDLE_BYTES:
        raise InferenceError(
            Code.INVALID_ARG, "'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t"
        )
    if load_driver() is None:
        raise InferenceError(
            Code.INVALID_ARG,
            f"failed to register CUDA shared memory region: '{name}', GPUs not supported",
        )
    try:
        memory = OpenedHandle.of(device(device_id), raw_handle)
        region = CudaRegion(name, device_id, byte_size, memory)
        allocated = memory.size()
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
