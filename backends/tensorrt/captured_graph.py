"""An execution that was written down once as a CUDA graph, to be given to a stream in one call."""

from collections.abc import Mapping
from typing import Any

from backends.tensorrt.bound_profile import BoundProfile
from backends.tensorrt.captures import Capture
from backends.tensorrt.cuda import CudaError
from backends.tensorrt.gpu import Gpu
from backends.tensorrt.listening import LibraryError
from backends.tensorrt.signature import Shape


class CapturedGraph:
    """A graph and the context it was captured from, which nothing else may use.

    It reads and writes where the tensors were when it was captured: `addresses`.
    """

    def __init__(
        self, capture: Capture, bound: BoundProfile, gpu: Gpu, addresses: Mapping[str, int]
    ) -> None:
        self.capture = capture
        self.addresses = addresses
        self.output_shapes: Mapping[str, Shape] = bound.output_shapes()
        self._bound: BoundProfile | None = bound
        self._gpu = gpu
        self._graph: Any = _captured(bound, gpu)

    def launch(self) -> None:
        """Give the stream one execution."""
        self._gpu.cuda.launch(self._graph, self._gpu.stream)

    def close(self) -> None:
        """End the graph, then its context; nothing may be under way."""
        self._gpu.cuda.end_graph(self._graph)
        self._bound = None


def _captured(bound: BoundProfile, gpu: Gpu) -> Any:
    bound.enqueue()  # what TensorRT does only once must not become part of the graph
    gpu.wait()
    gpu.cuda.begin_capture(gpu.stream)
    try:
        bound.enqueue()
    except (CudaError, LibraryError):
        gpu.cuda.abandon_capture(gpu.stream)
        raise
    return gpu.cuda.end_capture(gpu.stream)
