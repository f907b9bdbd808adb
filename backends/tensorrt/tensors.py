"""Memory of an instance's tensors, on the GPU or on the host."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from backends.tensorrt.cuda import GpuStream
from backends.tensorrt.memory import Staging
from backends.tensorrt.signature import Binding, EngineSignature, Shape, size_bytes
from gateway.config.data_type import DataType
from gateway.cuda_driver import DeviceMemory
from gateway.tensor import Datatype, Tensor


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
