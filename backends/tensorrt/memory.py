"""Memory for tensors on their way, kept between executions and growing on demand."""

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from backends.tensorrt.cuda import GpuStream

SMALLEST = 256
"""Least size in bytes: addresses must not be null, even of tensors without elements."""
STEP = 2 << 20
"""Sizes above this are multiples of it; below they are powers of two."""


class _Growing:
    """Memory with spare room, so that it seldom grows."""

    def __init__(self, allocate: Callable[[int], int], free: Callable[[int], None]) -> None:
        self._allocate = allocate
        self._free = free
        self._size = 0
        self._memory = 0

    def reserve(self, size: int) -> int:
        """Its address, with room for `size` bytes; growing drops its content."""
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


class GpuMemory:
    """Memory of a GPU, in the order of its stream."""

    def __init__(self, gpu: GpuStream) -> None:
        cuda = gpu.cuda
        self._memory = _Growing(
            lambda size: cuda.allocate(size, gpu.stream),
            lambda memory: cuda.free(memory, gpu.stream),
        )

    def reserve(self, size: int) -> int:
        """Its address, with room for `size` bytes; growing drops its content."""
        return self._memory.reserve(size)

    def close(self) -> None:
        """Free it, in the order of the stream."""
        self._memory.close()


class PinnedMemory:
    """Pinned host memory, which a GPU reads and writes by itself."""

    def __init__(self, gpu: GpuStream) -> None:
        self._memory = _Growing(gpu.cuda.allocate_pinned, gpu.cuda.free_pinned)

    def reserve(self, size: int) -> int:
        """As of `GpuMemory`; no copy may be in progress when it grows."""
        return self._memory.reserve(size)

    def bytes(self, size: int) -> npt.NDArray[Any]:
        """A view of the first `size` bytes, which must have been reserved."""
        whole = (ctypes.c_ubyte * size).from_address(self._memory.reserve(size))
        return np.frombuffer(memoryview(whole), dtype=np.uint8)

    def close(self) -> None:
        """Free it; views must not be used afterwards."""
        self._memory.close()


class Staging:
    """The memory of one tensor: pinned on the host, and on the GPU."""

    def __init__(self, gpu: GpuStream) -> None:
        self._gpu = gpu
        self._host = PinnedMemory(gpu)
        self._device = GpuMemory(gpu)

    def reserve(self, size: int) -> int:
        """Its address on the GPU, with room for `size` bytes."""
        return self._device.reserve(size)

    def send(self, data: npt.NDArray[Any], size: int) -> int:
        """Have these bytes copied to the GPU, and return where; the data is free at once.

        Zeros follow up to `size`: old contents could be an index outside of a table.
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
        """The same for bytes on the GPU, which must stay until the stream has copied them."""
        memory = self._device.reserve(size)
        if given:
            self._gpu.cuda.within_device(memory, address, given, self._gpu.stream)
        if size > given:
            self._gpu.cuda.zero(memory + given, size - given, self._gpu.stream)
        return memory

    def fetch(self, size: int) -> None:
        """Copy `size` bytes from the GPU; `fetched` returns them after a wait for the stream."""
        if size:
            memory = self._device.reserve(size)
            host = self._host.reserve(size)
            self._gpu.cuda.to_host(host, memory, size, self._gpu.stream)

    def fetched(self, size: int) -> npt.NDArray[Any]:
        """The fetched bytes, as a copy: the memory is used again."""
        return self._host.bytes(size).copy() if size else np.empty(0, dtype=np.uint8)

    def close(self) -> None:
        """Free both; no copy may be in progress."""
        self._host.close()
        self._device.close()
