"""An execution context of one profile, and memory for outputs whose size only values define."""

from collections.abc import Mapping
from typing import Any

from backends.tensorrt.cuda import CudaError, GpuStream
from backends.tensorrt.engines import Engine
from backends.tensorrt.library import LibraryLog
from backends.tensorrt.memory import GpuMemory, Staging
from backends.tensorrt.signature import Shape


class BoundProfile:
    """Executes in given memory; contexts of an instance share the memory `scratch`.

    Refusals of TensorRT raise LibraryError. `scratch` holds intermediate results, once for all
    contexts of an instance, which execute one after the other on its stream.
    """

    def __init__(self, engine: Engine, index: int, gpu: GpuStream, library_log: LibraryLog) -> None:
        self._log = library_log
        self._gpu = gpu
        self._names = tuple(engine.signature.outputs)
        strategy = engine.api.ExecutionContextAllocationStrategy.USER_MANAGED
        self._context = engine.plan.create_execution_context(strategy)
        library_log.require(self._context is not None, "create_execution_context")
        done = self._context.set_optimization_profile_async(index, gpu.stream_handle)
        library_log.require(done, f"set_optimization_profile_async of profile {index}")
        gpu.wait()

    def use_scratch(self, scratch: GpuMemory, size: int) -> None:
        """Set the memory for intermediate results."""
        self._context.set_device_memory(scratch.reserve(size), size)

    def set_inputs(self, shapes: Mapping[str, Shape], addresses: Mapping[str, int]) -> None:
        """Set the next inputs; tensors on the host have an address, and no shape."""
        for name, shape in shapes.items():
            self._log.require(self._context.set_input_shape(name, shape), f"set_input_shape {name}")
        for name, address in addresses.items():
            self._set_address(name, address)

    def output_shapes(self) -> dict[str, Shape]:
        """The output shapes for the set inputs; -1 for sizes that only an execution defines."""
        missing = self._context.infer_shapes()
        self._log.require(not missing, f"infer_shapes of {', '.join(missing)}")
        return {name: tuple(self._context.get_tensor_shape(name)) for name in self._names}

    def set_output(self, name: str, address: int) -> None:
        """Set the memory for an output of the next execution."""
        self._set_address(name, address)

    def set_allocator(self, name: str, allocator: Any) -> None:
        """Set the allocator for an output of the next execution."""
        done = self._context.set_output_allocator(name, allocator)
        self._log.require(done, f"set_output_allocator {name}")

    def enqueue(self) -> None:
        """Add an execution to the stream."""
        self._log.require(self._context.execute_async_v3(self._gpu.stream_handle), "execution")

    def _set_address(self, name: str, address: int) -> None:
        done = self._context.set_tensor_address(name, address)
        self._log.require(done, f"set_tensor_address {name}")


class OutputRoom:
    """Allocates memory for TensorRT during an execution, and gets the shape.

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
        # No exception may pass through the library; null reports a failed allocation.
        self.failure = None
        try:
            return self._staging.reserve(size)
        except CudaError as error:
            self.failure = error
            return 0

    def _learn(self, shape: Any) -> None:
        self.shape = tuple(shape)
