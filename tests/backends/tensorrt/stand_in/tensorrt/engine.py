"""Engines of the stand-in, and their execution contexts."""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from cuda.bindings.world import TEXTS, Refused, world
from stand_in_plans import Plan, PlannedTensor

from . import operations
from .enums import (
    DataType,
    ExecutionContextAllocationStrategy,
    TensorFormat,
    TensorIOMode,
    TensorLocation,
)
from .interfaces import IOutputAllocator, Logging


class ICudaEngine:
    """Has its weights in the memory of the device that was current when it was made."""

    def __init__(self, plan: Plan, logging: Logging) -> None:
        self.plan = plan
        self.log = logging
        self.device = world.device
        self._weights = world.allocate(plan.weights, world.device)
        self.tensors = {each.name: each for each in plan.tensors}
        self.num_io_tensors = len(plan.tensors)
        self.num_optimization_profiles = len(plan.profiles)
        self.device_memory_size_v2 = max(plan.scratch)
        world.counts["engine"] += 1

    def __del__(self) -> None:
        if hasattr(self, "_weights") and self._weights in world.blocks:
            world.free(self._weights, self.device)
            world.counts["engine"] -= 1

    def get_tensor_name(self, index: int) -> str:
        return self.plan.tensors[index].name

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return TensorIOMode.OUTPUT if self.tensors[name].operation else TensorIOMode.INPUT

    def get_tensor_shape(self, name: str) -> Sequence[int]:
        return list(self.tensors[name].dims)

    def get_tensor_dtype(self, name: str) -> DataType:
        return DataType[self.tensors[name].type]

    def get_tensor_format(self, name: str) -> TensorFormat:
        return TensorFormat[self.tensors[name].format]

    def get_tensor_location(self, name: str) -> TensorLocation:
        return TensorLocation.HOST if self.tensors[name].host else TensorLocation.DEVICE

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> Sequence[Sequence[int]]:
        if self.tensors[name].operation or self.tensors[name].host:
            raise RuntimeError(f"{name} is no input with a shape")
        fixed = [list(self.tensors[name].dims)] * 3
        return self.plan.profiles[profile_index].get(name, fixed)

    def get_device_memory_size_for_profile_v2(self, profile_index: int) -> int:
        return self.plan.scratch[min(profile_index, len(self.plan.scratch) - 1)]

    def create_execution_context(
        self,
        strategy: ExecutionContextAllocationStrategy = ExecutionContextAllocationStrategy.STATIC,
    ) -> "IExecutionContext | None":
        if not isinstance(strategy, ExecutionContextAllocationStrategy):
            raise TypeError("create_execution_context(): incompatible function arguments")
        if world.device != self.device or self.plan.extra.get("no_context"):
            self.log.error("[executionContext.cpp::init::12] Error Code 2: OutOfMemory (no room)")
            return None
        with_memory = strategy is not ExecutionContextAllocationStrategy.USER_MANAGED
        return IExecutionContext(self, with_memory=with_memory)


class IExecutionContext:
    """Refuses, with a line in the log, what is not in order: profile, memory, shapes, addresses."""

    def __init__(self, engine: ICudaEngine, *, with_memory: bool) -> None:
        self._engine = engine
        self._with_memory = with_memory
        self._plan = engine.plan
        self._log = engine.log
        self._profile = 0 if with_memory else None
        self._scratch = (0, 0)
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._allocators: dict[str, IOutputAllocator] = {}
        self._last_stream: Any = None
        world.counts["context"] += 1

    def __del__(self) -> None:
        world.counts["context"] -= 1

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        world.stream(_number(stream_handle))
        if not 0 <= profile_index < len(self._plan.profiles):
            return self._log.error(f"profile {profile_index} is out of range")
        self._profile = profile_index
        return True

    def set_device_memory(self, memory: int, size: int) -> None:
        if size < self._plan.scratch[min(self._profile or 0, len(self._plan.scratch) - 1)]:
            raise RuntimeError(f"device memory of {size} bytes is too small")
        self._scratch = (_number(memory), size)

    def set_input_shape(self, name: str, shape: Sequence[int]) -> bool:
        tensor = self._engine.tensors.get(name)
        if tensor is None or tensor.operation or tensor.host:
            return self._log.error(f"{name} is no input with a shape")
        if self._profile is None:
            return self._log.error("no optimization profile is set")
        fixed = [list(tensor.dims)] * 3
        least, _, most = self._plan.profiles[self._profile].get(name, fixed)
        fits = len(shape) == len(least) and all(
            low <= size <= high for low, size, high in zip(least, shape, most, strict=True)
        )
        if not fits:
            return self._log.error(f"Static dimension mismatch: {name} {tuple(shape)}")
        self._shapes[name] = tuple(shape)
        return True

    def set_tensor_address(self, name: str, memory: int) -> bool:
        if name not in self._engine.tensors or not _number(memory):
            return self._log.error(f"no address of {name}")
        self._addresses[name] = memory
        self._allocators.pop(name, None)
        return True

    def set_output_allocator(self, name: str, output_allocator: IOutputAllocator) -> bool:
        if not isinstance(output_allocator, IOutputAllocator) or not output_allocator.made:
            raise TypeError("set_output_allocator(): incompatible function arguments")
        self._allocators[name] = output_allocator
        return True

    def infer_shapes(self) -> list[str]:
        return [
            each.name
            for each in self._inputs
            if each.name not in (self._addresses if each.host else self._shapes)
        ]

    def get_tensor_shape(self, name: str) -> Sequence[int]:
        tensor = self._engine.tensors[name]
        if not tensor.operation:
            return list(self._shapes.get(name, tensor.dims))
        return list(self._shape_of(tensor))

    def execute_async_v3(self, stream_handle: int) -> bool:
        stream = world.stream(_number(stream_handle))
        if self._engine.device in world.lost:
            return self._log.error("Cuda Runtime (unspecified launch failure)")
        if world.last_error:  # the launch of a kernel reads it, and fails with it
            return self._log.error(f"Cuda Runtime ({TEXTS[world.last_error]})")
        if self._plan.extra.get("fails"):
            return self._log.error("[/src/run.cpp::execute::7] Error Code 1: cask (no kernel)")
        if self._plan.extra.get("not_captured") and stream.capturing is not None:
            return self._log.error("operation not permitted when stream is capturing")
        try:
            addresses = self._checked()
        except Refused:
            return self._log.error("an address is not that of enough memory of this device")
        if addresses is None or (room := self._make_room(stream)) is None:
            return False
        shapes = {n: tuple(self.get_tensor_shape(n)) for n in self._engine.tensors}
        stream.give(lambda: self._compute({**addresses, **room}, shapes))
        return True

    # What follows is not of the library.

    @property
    def _inputs(self) -> list[PlannedTensor]:
        return [each for each in self._plan.tensors if not each.operation]

    def _shape_of(self, tensor: PlannedTensor) -> tuple[int, ...]:
        inputs = [self._engine.tensors[name] for name in tensor.of]
        shapes = [self._shapes.get(each.name, tuple(each.dims)) for each in inputs]
        values = [self._value(each) if each.host else None for each in inputs]
        return operations.output_shape(tensor.operation, shapes, values)

    def _value(self, tensor: PlannedTensor) -> Any:
        return _array(self._addresses[tensor.name], tuple(tensor.dims), tensor.type)

    def _checked(self) -> dict[str, int] | None:
        """The addresses; None, with a line in the log, if something is missing."""
        if self.infer_shapes():
            self._log.error("not all inputs have a shape")
            return None
        if not self._with_memory:
            world.require(*self._scratch, self._engine.device)
        for each in self._plan.tensors:
            if each.name in self._allocators:
                continue
            if each.name not in self._addresses:
                self._log.error(f"tensor {each.name} has no address")
                return None
            shape = tuple(self.get_tensor_shape(each.name))
            if not each.host:
                size = int(np.prod(shape)) * operations.NUMPY[each.type].itemsize
                world.require(self._addresses[each.name], max(1, size), self._engine.device)
        return dict(self._addresses)

    def _make_room(self, stream: Any) -> dict[str, int] | None:
        """Ask the allocators for room, whose size only values tell; None if there is none."""
        found = {}
        for name, allocator in self._allocators.items():
            stream.finish()
            tensor = self._engine.tensors[name]
            value = self._result(tensor, self._addresses, self._shapes)
            size = max(1, value.nbytes)
            address = allocator.reallocate_output_async(name, 0, size, 256, 1)
            if not address:
                self._log.error(f"no memory for output {name}")
                return None
            world.require(address, size, self._engine.device)
            allocator.notify_shape(name, list(value.shape))
            found[name] = address
        return found

    def _result(self, tensor: PlannedTensor, addresses: Any, shapes: Any) -> Any:
        inputs = [self._engine.tensors[name] for name in tensor.of]
        arrays = [
            _array(addresses[each.name], tuple(shapes.get(each.name, each.dims)), each.type)
            for each in inputs
        ]
        if tensor.layers:
            return operations.through_layers(*arrays, tensor.layers)
        return operations.COMPUTE[tensor.operation](*arrays)

    def _compute(self, addresses: dict[str, int], shapes: dict[str, tuple[int, ...]]) -> None:
        for each in self._plan.tensors:
            if each.operation:
                value = np.ascontiguousarray(
                    self._result(each, addresses, shapes), dtype=operations.NUMPY[each.type]
                )
                ctypes.memmove(addresses[each.name], value.ctypes.data, value.nbytes)


def _array(address: int, shape: tuple[int, ...], kind: str) -> Any:
    dtype = operations.NUMPY[kind]
    size = int(np.prod(shape)) * dtype.itemsize
    return np.frombuffer(ctypes.string_at(address, size), dtype=dtype).reshape(shape)


def _number(value: Any) -> int:
    if not isinstance(value, int):
        raise TypeError(f"incompatible function arguments: {value!r} is no number")
    return value
