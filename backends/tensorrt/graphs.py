"""CUDA graphs: the shapes to capture, execution contexts of profiles, and captured executions."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from backends.tensorrt.cuda import CudaError, GpuStream
from backends.tensorrt.engines import Engine, Profile, Shape
from backends.tensorrt.library import LibraryError, LibraryLog
from backends.tensorrt.memory import GpuMemory, Staging
from backends.tensorrt.parameters import cuda_hints
from gateway.config import ModelConfig
from gateway.config.optimization import GraphLowerBound, GraphSpec
from gateway.errors import Code, InferenceError

SMALL = (1, 2, 3, 4, 6, 8, 12, 16)
"""The default batch sizes: graphs help most for these."""


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


@dataclass(frozen=True, slots=True)
class Capture:
    """The inputs' shapes of one graph.

    It also serves shapes of fewer rows, from `least_rows` on; if that is None, its own shapes only.
    """

    shapes: Mapping[str, Shape]
    least_rows: int | None = None

    @property
    def rows(self) -> int:
        """The batch of the capture; 0 if an input is a scalar."""
        return min((shape[0] if shape else 0 for shape in self.shapes.values()), default=0)

    def serves(self, shapes: Mapping[str, Shape]) -> bool:
        """Whether these shapes are its own, or become so with more rows."""
        if shapes == self.shapes:
            return True
        rows = {shape[:1] for shape in shapes.values()}
        if self.least_rows is None or len(rows) != 1:
            return False
        grown = {name: (self.rows, *shape[1:]) for name, shape in shapes.items()}
        return grown == self.shapes and all(
            self.least_rows <= each <= self.rows for (each,) in rows
        )


def find(captures: Iterable[Capture], shapes: Mapping[str, Shape]) -> Capture | None:
    """The smallest capture that serves them; None without one."""
    serving = [each for each in captures if each.serves(shapes)]
    return min(serving, key=lambda each: each.rows, default=None)


def captures(config: ModelConfig, profile: Profile) -> list[Capture]:
    """The captures of the config for a profile; the profile may not allow them.

    Raises InferenceError INVALID_ARG, in Triton's words, for an invalid `graph_spec`, and
    UNSUPPORTED for bounds on other dimensions than the batch.
    """
    hints = cuda_hints(config)
    if not hints.graphs:
        return []
    specs = hints.graph_spec or tuple(_default_specs(config))
    for spec in specs:
        if problem := next(_problems(spec, config), ""):
            raise InferenceError(Code.INVALID_ARG, f"model '{config.name}': {problem}")
        _require_same_dims(spec, config)
    found = [_capture(spec, config, profile) for spec in specs]
    return [each for number, each in enumerate(found) if each not in found[:number]]


def _default_specs(config: ModelConfig) -> Iterator[GraphSpec]:
    if not config.batching:
        yield GraphSpec()
        return
    preferred = _preferred(config)
    sizes = {1, *(SMALL if preferred is None else preferred), config.max_batch_size}
    for size in sorted(sizes):
        if size <= config.max_batch_size:
            yield GraphSpec(batch_size=size)


def _preferred(config: ModelConfig) -> Sequence[int] | None:
    """The preferred sizes of the scheduler; None if it has none."""
    if config.dynamic_batching is not None:
        return config.dynamic_batching.preferred_batch_size
    batching = config.sequence_batching
    if batching is not None and batching.oldest is not None:
        return batching.oldest.preferred_batch_size
    return None


def _capture(spec: GraphSpec, config: ModelConfig, profile: Profile) -> Capture:
    bound = spec.graph_lower_bound if _has_rows_alone(config) else None
    least = bound.batch_size if bound else None
    if not spec.input:
        shapes = {name: _with_rows(each.best, spec.batch_size) for name, each in profile.items()}
        return Capture(shapes, least)
    unbatched = {each.name for each in config.input if each.allow_ragged_batch}
    unbatched.update(name for each in config.batch_input for name in each.target_name)
    shapes = {}
    for name in profile:
        if name not in spec.input:
            raise InferenceError(
                Code.INVALID_ARG,
                f"model '{config.name}': graph spec names {_quoted(spec.input)}, expected a shape "
                f"for each input of the engine, and for '{name}'",
            )
        rows = (spec.batch_size,) if spec.batch_size and name not in unbatched else ()
        shapes[name] = (*rows, *spec.input[name].dim)
    return Capture(shapes, least)


def _has_rows_alone(config: ModelConfig) -> bool:
    """Whether the first dimension of every tensor is the batch."""
    ragged = any(each.allow_ragged_batch for each in config.input)
    return config.batching and not (ragged or config.batch_input or config.batch_output)


def _with_rows(shape: Shape, rows: int) -> Shape:
    return (rows, *shape[1:]) if rows and shape else shape


def _least(spec: GraphSpec) -> GraphLowerBound:
    exact = GraphLowerBound(batch_size=spec.batch_size, input=spec.input)
    return spec.graph_lower_bound or exact


def _problems(spec: GraphSpec, config: ModelConfig) -> Iterator[str]:
    least, largest = _least(spec), config.max_batch_size
    sizes = (spec.batch_size, least.batch_size)
    if not largest and sizes != (0, 0):
        yield "graph spec expects 'batch_size' to be 0 if 'max_batch_size' is 0"
    if largest and not all(1 <= size <= largest for size in sizes):
        yield f"graph spec expects 'batch_size' to be >= 1 and <= {largest}"
    if least.batch_size > spec.batch_size:
        yield "graph lower bound spec expects 'batch_size' to be <= graph spec 'batch_size'"
    for name, shape in spec.input.items():
        if name not in least.input:
            yield f"graph lower bound spec expects shape for input '{name}'"
            return
        yield from _dims_problems(name, shape.dim, least.input[name].dim)


def _dims_problems(name: str, dims: Shape, least: Shape) -> Iterator[str]:
    if len(least) != len(dims):
        yield (f"graph lower bound spec expects to have '{len(dims)}' dimensions, got {len(least)}")
    for size, bound in zip(dims, least, strict=False):
        if size < 0 or bound < 0:
            yield f"graph spec expects input '{name}' to have dimension >= 0"
        if bound > size:
            yield f"graph lower bound spec expects input '{name}' to have dimension <= {size}"


def _require_same_dims(spec: GraphSpec, config: ModelConfig) -> None:
    least = _least(spec).input
    for name, shape in spec.input.items():
        if least[name].dim != shape.dim:
            raise InferenceError(
                Code.UNSUPPORTED,
                f"model '{config.name}': graph_lower_bound of input '{name}' has dims "
                f"{list(least[name].dim)}, expected {list(shape.dim)} as in its graph_spec: only "
                "batches of fewer rows are filled up, since other dims would change the outputs",
            )


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)


class CapturedGraph:
    """A graph and the context of its capture, which has no other user.

    It reads and writes at the `addresses` of the capture.
    """

    def __init__(
        self,
        capture: Capture,
        bound: BoundProfile,
        gpu: GpuStream,
        addresses: Mapping[str, int],
    ) -> None:
        self.capture = capture
        self.addresses = addresses
        self.output_shapes: Mapping[str, Shape] = bound.output_shapes()
        self._bound: BoundProfile | None = bound
        self._gpu = gpu
        self._graph: Any = _captured(bound, gpu)

    def launch(self) -> None:
        """Add one execution to the stream."""
        self._gpu.cuda.launch(self._graph, self._gpu.stream)

    def close(self) -> None:
        """Destroy the graph, then its context; no execution may be in progress."""
        self._gpu.cuda.end_graph(self._graph)
        self._bound = None


def _captured(bound: BoundProfile, gpu: GpuStream) -> Any:
    bound.enqueue()  # one-time work of TensorRT must not become part of the graph
    gpu.wait()
    gpu.cuda.begin_capture(gpu.stream)
    try:
        bound.enqueue()
    except (CudaError, LibraryError):
        gpu.cuda.abandon_capture(gpu.stream)
        raise
    return gpu.cuda.end_capture(gpu.stream)
