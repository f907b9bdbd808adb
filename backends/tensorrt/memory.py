"""The memory through which tensors travel: kept between executions, and growing when it must."""

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from backends.tensorrt.cuda import Gpu

SMALLEST = 256
"""Addresses must not be null, even those of tensors without elements."""
STEP = 2 << 20
"""Above this much, memory is had in such steps; below, in powers of two."""


class _Growing:
    """Some memory; more than needed, so that it seldom grows."""

    def __init__(self, allocate: Callable[[int], int], free: Callable[[int], None]) -> None:
        self._allocate = allocate
        self._free = free
        self._size = 0
        self._memory = 0

    def reserve(self, size: int) -> int:
        """Its address, with room for so many bytes; what was in it is lost if it grows."""
        if size > self._size or not self._memory:
            self.close()
            wanted = _rounded(size)
            self._memory = self._allocate(wanted)
            self._size = wanted
        return self._memory

    def close(self) -> None:
        memory, self._memory, self._size = self._memory, 0, 0
        if memory:
            self._free(memory)


def _rounded(size: int) -> int:
    if size > STEP:
        return -(-size // STEP) * STEP
    return max(SMALLEST, 1 << max(0, size - 1).bit_length())


class DeviceMemory:
    """Memory of a GPU, in the order of its stream."""

    def __init__(self, gpu: Gpu) -> None:
        cuda = gpu.cuda
        self._memory = _Growing(
            lambda size: cuda.allocate(size, gpu.stream),
            lambda memory: cuda.free(memory, gpu.stream),
        )

    def reserve(self, size: int) -> int:
        """Its address, with room for so many bytes; what was in it is lost if it grows."""
        return self._memory.reserve(size)

    def close(self) -> None:
        """Free it, once the stream has come so far."""
        self._memory.close()


class PinnedMemory:
    """Memory of the host that a GPU reads and writes by itself."""

    def __init__(self, gpu: Gpu) -> None:
        self._memory = _Growing(gpu.cuda.allocate_pinned, gpu.cuda.free_pinned)

    def reserve(self, size: int) -> int:
        """As of `DeviceMemory`; nothing may be on its way when it grows."""
        return self._memory.reserve(size)

    def bytes(self, size: int) -> npt.NDArray[Any]:
        """A view of the first so many bytes, which must have been reserved."""
        whole = (ctypes.c_ubyte * size).from_address(self._memory.reserve(size))
        return np.frombuffer(memoryview(whole), dtype=np.uint8)

    def close(self) -> None:
        """Free it; no view may be used any more."""
        self._memory.close()


class Staging:
    """The way of one tensor: pinned memory of the host, and memory of the GPU."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._host = PinnedMemory(gpu)
        self._device = DeviceMemory(gpu)

    def reserve(self, size: int) -> int:
        """Where the GPU has it, with room for so many bytes."""
        return self._device.reserve(size)

    def send(self, data: npt.NDArray[Any], size: int) -> int:
        """Have these bytes copied to the GPU, and return where; the data is free at once.

        Zeros follow up to `size`: whatever lay there could be an index that leads out of a table.
        """
        memory = self._device.reserve(size)
        if size:
            host = self._host.reserve(size)
            there = self._host.bytes(size)
            there[: data.size] = data
            there[data.size :] = 0
            self._gpu.cuda.to_device(memory, host, size, self._gpu.stream)
        return memory

    def take(self, address: int, given: int, size: int) -> int:
        """The same for bytes that lie on the GPU, and must until the stream has come so far."""
        memory = self._device.reserve(size)
        if given:
            self._gpu.cuda.within_device(memory, address, given, self._gpu.stream)
        if size > given:
            self._gpu.cuda.zero(memory + given, size - given, self._gpu.stream)
        return memory

    def fetch(self, size: int) -> None:
        """Have so many bytes copied from the GPU; `fetched` has them once it has been waited."""
        if size:
            memory = self._device.reserve(size)
            host = self._host.reserve(size)
            self._gpu.cuda.to_host(host, memory, size, self._gpu.stream)

    def fetched(self, size: int) -> npt.NDArray[Any]:
        """The bytes that have come, as a copy: the memory is used again."""
        return self._host.bytes(size).copy() if size else np.empty(0, dtype=np.uint8)

    def close(self) -> None:
        """Free both; nothing may be on its way."""
        self._host.close()
        self._device.close()
