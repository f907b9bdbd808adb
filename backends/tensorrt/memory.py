"""Memory of tensors, on the GPU and on the host."""

import ctypes
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from backends.tensorrt.cuda import GpuStream
from backends.tensorrt.engines import Binding, EngineSignature, Shape, size_bytes
from gateway.config.data_type import DataType
from gateway.cuda_driver import DeviceMemory
from gateway.tensor import Datatype, Tensor

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


class Tensors:
    """The memory of all inputs and outputs, by name; close it when no copy is in progress."""

    def __init__(self, signature: EngineSignature, gpu: GpuStream) -> None:
        self._gpu = gpu
        self._bindings = {**signature.inputs, **signature.outputs}
        self.staging = {n: Staging(gpu) for n, each in self._bindings.items() if not each.on_host}
        self._host: dict[str, npt.NDArray[Any]] = {}

    def binding(self, name: str) -> Binding:
        """The engine's binding of that name."""
        return self._bindings[name]

    def engine_shape(self, tensor: Tensor) -> Shape:
        """The shape for the engine, where a scalar has no dimension."""
        return tensor.shape if self._bindings[tensor.name].dims else ()

    def send(self, tensor: Tensor, shape: Shape) -> int:
        """Copy its data to the engine, padded with zeros to a shape; returns the address."""
        binding, memory = self._bindings[tensor.name], tensor.data
        if binding.on_host:
            return self._keep(tensor.name, _bytes(tensor).copy())
        size, staging = size_bytes(binding, shape), self.staging[tensor.name]
        if isinstance(memory, DeviceMemory) and self._can_take(memory, binding):
            return staging.take(memory.address, len(memory), size)
        return staging.send(_bytes(tensor), size)

    def send_zeros(self, name: str, shape: Shape) -> int:
        """The same for zeros."""
        size = size_bytes(self._bindings[name], shape)
        return self.staging[name].send(np.empty(0, dtype=np.uint8), size)

    def reserve(self, name: str, shape: Shape) -> int:
        """The address of memory for an output of that shape."""
        size = size_bytes(self._bindings[name], shape)
        if self._bindings[name].on_host:
            return self._keep(name, np.zeros(size, dtype=np.uint8))
        return self.staging[name].reserve(size)

    def address(self, name: str) -> int:
        """Its present address on the GPU."""
        return self.staging[name].reserve(0)

    def fetch(self, name: str, shape: Shape) -> None:
        """Copy it from the GPU, if it is there."""
        if name in self.staging:
            self.staging[name].fetch(size_bytes(self._bindings[name], shape))

    def staying(self, name: str, shape: Shape) -> Tensor:
        """The output in the memory of the GPU, until the next execution."""
        binding = self._bindings[name]
        size = size_bytes(binding, shape)
        memory = DeviceMemory(self._gpu.device, self.staging[name].reserve(size), size, self)
        return Tensor(name, binding.data_type.datatype, shape or (1,), memory)

    def fetched(self, name: str, shape: Shape) -> Tensor:
        """The fetched output, with data of its own."""
        binding = self._bindings[name]
        size = size_bytes(binding, shape)
        there = self.staging[name].fetched(size) if name in self.staging else self._host[name]
        return Tensor(name, binding.data_type.datatype, shape or (1,), there[:size].data)

    def close(self) -> None:
        """Free all; later calls allocate again."""
        for each in self.staging.values():
            each.close()

    def _can_take(self, memory: DeviceMemory, binding: Binding) -> bool:
        """Whether it is on this GPU and not BOOL, which is normalised on the host."""
        return memory.gpu == self._gpu.device and binding.data_type is not DataType.TYPE_BOOL

    def _keep(self, name: str, data: npt.NDArray[Any]) -> int:
        room = data if data.size else np.zeros(1, dtype=np.uint8)
        self._host[name] = room
        return int(room.ctypes.data)


def _bytes(tensor: Tensor) -> npt.NDArray[Any]:
    if tensor.datatype is Datatype.BOOL:
        return tensor.array().reshape(-1).view(np.uint8)
    return np.frombuffer(tensor.raw(), dtype=np.uint8)


def with_rows(shapes: Iterable[tuple[str, Shape]], rows: int) -> dict[str, Shape]:
    """The same shapes for another batch."""
    return {name: (rows, *shape[1:]) for name, shape in shapes}
