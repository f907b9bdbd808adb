"""A CUDA driver whose GPU has memory of the host, so that what is copied there can be looked at."""

import ctypes
from typing import Any

from gateway.cuda_driver import DeviceMemory, DeviceRegion

INVALID_DEVICE, INVALID_HANDLE, OUT_OF_ORDER = 101, 400, 999


class Region(DeviceRegion):
    """A client's memory on a GPU."""

    def __init__(self, memory: DeviceMemory, gpu: int = 0) -> None:
        self.memory = memory
        self.gpu = gpu

    def part(self, offset: int, byte_size: int) -> DeviceMemory:
        return DeviceMemory(self.gpu, self.memory.address + offset, byte_size, self)


class HostGpu:
    """The driver of a machine with one GPU. `calls` counts; those in `broken` fail."""

    def __init__(self) -> None:
        self.allocated: list[DeviceMemory] = []
        self.handles: dict[bytes, int] = {}
        self.closed: list[int] = []
        self.calls: dict[str, int] = {}
        self.broken: set[str] = set()

    # What tests do.

    def allocate(self, content: bytes, align: int = 256) -> DeviceMemory:
        """Memory of the GPU with that content, at a multiple of `align`."""
        block = ctypes.create_string_buffer(len(content) + align)
        address = -(-ctypes.addressof(block) // align) * align
        ctypes.memmove(address, content, len(content))
        self.allocated.append(DeviceMemory(0, address, len(content), block))
        return self.allocated[-1]

    def share(self, handle: bytes, memory: DeviceMemory) -> None:
        """Let the memory be opened by a handle."""
        self.handles[handle] = memory.address

    # What the driver does.

    def __getattr__(self, name: str) -> Any:
        found = getattr(type(self), f"_{name}", None)
        if found is None:
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            self.calls[name] = self.calls.get(name, 0) + 1
            return OUT_OF_ORDER if name in self.broken else found(self, *arguments) or 0

        return call

    def _cuCtxSetCurrent(self, context: Any) -> None:
        pass

    def _cuDeviceGet(self, device: Any, ordinal: Any) -> int:
        return 0 if ordinal == 0 else INVALID_DEVICE

    def _cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> None:
        pass

    def _cuIpcOpenMemHandle_v2(self, address: Any, handle: Any, flags: int) -> int:
        if bytes(handle) not in self.handles:
            return INVALID_HANDLE
        put(address, self.handles[bytes(handle)])
        return 0

    def _cuIpcCloseMemHandle(self, address: Any) -> None:
        self.closed.append(address.value)

    def _cuMemGetAddressRange_v2(self, start: Any, size: Any, address: Any) -> int:
        for memory in self.allocated:
            if 0 <= address.value - memory.address < len(memory):
                put(start, memory.address)
                put(size, len(memory))
                return 0
        return INVALID_HANDLE

    def _cuMemcpyDtoH_v2(self, data: Any, address: Any, size: Any) -> None:
        ctypes.memmove(data, address.value, size.value)

    def _cuMemcpyHtoDAsync_v2(self, address: Any, data: bytes, size: Any, stream: Any) -> None:
        ctypes.memmove(address.value, data, size.value)

    def _cuMemcpyDtoDAsync_v2(self, there: Any, here: Any, size: Any, stream: Any) -> None:
        ctypes.memmove(there.value, here.value, size.value)

    def _cuStreamSynchronize(self, stream: Any) -> None:
        pass


def put(reference: Any, value: int) -> None:
    """Write a number where a reference leads, as C does."""
    ctypes.cast(reference, ctypes.POINTER(ctypes.c_uint64)).contents.value = value
