"""An execution context of one profile, and memory for outputs whose size only values define."""

from collections.abc import Mapping
from typing import Any

from backends.tensorrt.cuda import CudaError, Gpu
from backends.tensorrt.engines import Engine
from backends.tensorrt.library import Ear
from backends.tensorrt.memory import DeviceMemory, Staging
from backends.tensorrt.signature import Shape


class BoundProfile:
    """Executes in memory that it is given; one execution at a time shares `scratch` with others.

    What TensorRT refuses raises LibraryError. Unlike the engine's own memory for intermediate
    results, `scratch` is there once for all contexts of an instance: they take turns on a stream.
    """

    def __init__(self, engine: Engine, index: int, gpu: Gpu, ear: Ear) -> None:
        self._ear = ear
        self._gpu = gpu
        self._names = tuple(engine.signature.outputs)
        strategy = engine.api.ExecutionContextAllocationStrategy.USER_MANAGED
        self._context = engine.plan.create_execution_context(strategy)
        ear.require(self._context is not None, "create_execution_context")
        done = self._context.set_optimization_profile_async(index, gpu.stream_handle)
        ear.require(done, f"set_optimization_profile_async of profile {index}")
        gpu.wait()

    def use_scratch(self, scratch: DeviceMemory, size: int) -> None:
        """Where intermediate results are."""
        self._context.set_device_memory(scratch.reserve(size), size)

    def set_inputs(self, shapes: Mapping[str, Shape], addresses: Mapping[str, int]) -> None:
        """What the next execution reads; tensors on the host have an address, and no shape."""
        for name, shape in shapes.items():
            self._ear.require(self._context.set_input_shape(name, shape), f"set_input_shape {name}")
        for name, address in addresses.items():
            self._set_address(name, address)

    def output_shapes(self) -> dict[str, Shape]:
        """Those of the inputs that are set; -1 where only an execution tells."""
        missing = self._context.infer_shapes()
        self._ear.require(not missing, f"infer_shapes of {', '.join(missing)}")
        return {name: tuple(self._context.get_tensor_shape(name)) for name in self._names}

    def set_output(self, name: str, address: int) -> None:
        """Where the next execution writes."""
        self._set_address(name, address)

    def set_allocator(self, name: str, allocator: Any) -> None:
        """Who gives the next execution the memory that it writes to."""
        done = self._context.set_output_allocator(name, allocator)
        self._ear.require(done, f"set_output_allocator {name}")

    def enqueue(self) -> None:
        """Give the stream an execution."""
        self._ear.require(self._context.execute_async_v3(self._gpu.stream_handle), "execution")

    def _set_address(self, name: str, address: int) -> None:
        done = self._context.set_tensor_address(name, address)
        self._ear.require(done, f"set_tensor_address {name}")


class OutputRoom:
    """Gives TensorRT the memory that it asks for while it executes, and learns the shape.

    `base` is the library's `IOutputAllocator`.
    """

    def __init__(self, base: Any, staging: Staging) -> None:
        self._staging = staging
        self.shape: Shape = ()
        self.failure: CudaError | None = None
        members = {
            "reallocate_output": lambda _, name, memory, size, alignment: self._reserve(size),
            "reallocate_output_async": (
                lambda _, name, memory, size, alignment, stream: self._reserve(size)
            ),
            "notify_shape": lambda _, name, shape: self._learn(shape),
        }
        self.allocator = type("OutputAllocator", (base,), members)()

    def _reserve(self, size: int) -> int:
        # No exception may pass through the library; null tells it that there is no room.
        self.failure = None
        try:
            return self._staging.reserve(size)
        except CudaError as error:
            self.failure = error
            return 0

    def _learn(self, shape: Any) -> None:
        self.shape = tuple(shape)
