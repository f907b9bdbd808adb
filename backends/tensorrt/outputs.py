"""Room for outputs whose size only their values tell, such as the indices of what is not zero."""

from typing import Any

from backends.tensorrt.cuda import CudaError
from backends.tensorrt.memory import Staging
from backends.tensorrt.signature import Shape


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
