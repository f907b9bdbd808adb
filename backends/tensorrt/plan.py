"""One copy of a plan on a GPU: its contexts, graphs, stream and memory."""

import logging
from collections.abc import Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass

from backends.tensorrt.cuda import CudaError, GpuStream
from backends.tensorrt.engines import Engine, Shape, closest, refusals
from backends.tensorrt.graphs import BoundProfile, Capture, CapturedGraph, OutputRoom, find
from backends.tensorrt.library import LibraryError, LibraryLog
from backends.tensorrt.memory import GpuMemory, Tensors, with_rows
from backends.tensorrt.parameters import Allocation
from gateway.tensor import Tensor

log = logging.getLogger("sluice.tensorrt")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Options of an instance for its engine; `captures` are by profile."""

    name: str
    captures: Mapping[int, Sequence[Capture]]
    allocation: Allocation
    urgency: int
    spins: bool


class PlanOnGpu:
    """Executes on a stream of its own, for one thread at a time.

    Opening and executing raise CudaError and LibraryError; a failed opening closes everything. All
    contexts share the memory for intermediate results.
    """

    def __init__(
        self, engine: Engine, gpu: GpuStream, library_log: LibraryLog, options: PlanOptions
    ) -> None:
        self._engine = engine
        self._gpu = gpu
        self._log = library_log
        signature = engine.signature
        self._profiles = {index: signature.profiles[index] for index in options.captures}
        self._rooms: dict[str, OutputRoom] = {}
        self._bound: dict[int, BoundProfile] = {}
        self._graphs: dict[int, list[CapturedGraph]] = {}
        with ExitStack() as opened:
            self._scratch = GpuMemory(gpu)
            opened.callback(self._scratch.close)
            self._scratch_size = self._size_of_scratch(options.allocation)
            self._tensors = Tensors(signature, gpu)
            opened.callback(self._tensors.close)
            opened.callback(self._bound.clear)
            for index in self._profiles:
                self._bound[index] = self._bind(index)
            self._capture_all(options, opened)
            self._opened = opened.pop_all()

    def run(
        self, inputs: Mapping[str, Tensor], outputs: Sequence[str], staying: Set[str]
    ) -> dict[str, Tensor]:
        """The named outputs, in that order; InferenceError if no profile allows the inputs.

        Those `staying` remain on the GPU until the next run, if the engine writes them there.
        """
        self._gpu.use()
        self._log.forget()
        shapes = {
            name: self._tensors.engine_shape(tensor)
            for name, tensor in inputs.items()
            if name in self._tensors.staging
        }
        subject = self._engine.subject
        index = closest(self._profiles, shapes, f"model '{subject.model}' on {subject.gpu}")
        found = self._launch(index, inputs, shapes) or self._execute(index, inputs, shapes)
        kept = staying & self._tensors.staging.keys()
        for name in outputs:
            if name not in kept:
                self._tensors.fetch(name, found[name])
        self._gpu.wait()
        tensors = self._tensors
        return {
            name: (tensors.staying if name in kept else tensors.fetched)(name, found[name])
            for name in outputs
        }

    def shrink(self) -> None:
        """Free the memory of tensors, unless graphs use it; no execution may be in progress."""
        if not self._graphs:
            self._tensors.close()

    def close(self) -> None:
        """Free everything but the shared engine, even if the wait fails."""
        with self._opened:
            self._gpu.use().wait()

    def _execute(
        self, index: int, inputs: Mapping[str, Tensor], shapes: Mapping[str, Shape]
    ) -> dict[str, Shape]:
        """Add an execution to the stream; returns the shapes of all outputs."""
        bound = self._bound[index]
        sent = {
            name: self._tensors.send(tensor, shapes.get(name, ()))
            for name, tensor in inputs.items()
        }
        bound.set_inputs(shapes, sent)
        found = bound.output_shapes()
        rooms = self._make_room(bound, found)
        try:
            bound.enqueue()
        except LibraryError as error:
            raise next((room.failure for room in rooms.values() if room.failure), error) from error
        if rooms:
            self._gpu.wait()
            found.update({name: room.shape for name, room in rooms.items()})
        return found

    def _make_room(
        self, bound: BoundProfile, shapes: Mapping[str, Shape]
    ) -> Mapping[str, OutputRoom]:
        """Reserve memory for all outputs; returns the room of those of unknown shape."""
        rooms: dict[str, OutputRoom] = {}
        for name, shape in shapes.items():
            if -1 in shape:
                rooms[name] = self._room(name)
                bound.set_allocator(name, rooms[name].allocator)
            else:
                bound.set_output(name, self._tensors.reserve(name, shape))
        return rooms

    def _room(self, name: str) -> OutputRoom:
        if name not in self._rooms:
            base = self._engine.api.IOutputAllocator
            self._rooms[name] = OutputRoom(base, self._tensors.staging[name])
        return self._rooms[name]

    # Opening.

    def _size_of_scratch(self, allocation: Allocation) -> int:
        plan = self._engine.plan
        if allocation is Allocation.STATIC:
            return int(plan.device_memory_size_v2)
        sizes = (plan.get_device_memory_size_for_profile_v2(index) for index in self._profiles)
        return int(max(sizes))

    def _bind(self, index: int) -> BoundProfile:
        bound = BoundProfile(self._engine, index, self._gpu, self._log)
        bound.use_scratch(self._scratch, self._scratch_size)
        return bound

    # CUDA graphs.

    def _launch(
        self, index: int, inputs: Mapping[str, Tensor], shapes: Mapping[str, Shape]
    ) -> dict[str, Shape] | None:
        """Add a graph for these shapes to the stream; None without one."""
        graphs = {id(each.capture): each for each in self._graphs.get(index, ())}
        capture = find((each.capture for each in graphs.values()), shapes)
        if capture is None:
            return None
        graph = graphs[id(capture)]
        if any(self._tensors.address(name) != there for name, there in graph.addresses.items()):
            return None  # a tensor has outgrown its memory in the graph
        for name, tensor in inputs.items():
            self._tensors.send(tensor, capture.shapes[name])
        graph.launch()
        if shapes == capture.shapes:
            return dict(graph.output_shapes)
        rows = next(iter(shapes.values()))[0]
        return with_rows(graph.output_shapes.items(), rows)

    def _capture_all(self, options: PlanOptions, opened: ExitStack) -> None:
        """Capture the shapes that the profiles allow; failed captures are logged."""
        if not any(options.captures.values()) or not self._can_be_captured(options):
            return
        for index in self._profiles:
            self._reserve_most(index)
        for index, found in options.captures.items():
            for capture in found:
                self._capture(index, capture, options, opened)

    def _can_be_captured(self, options: PlanOptions) -> bool:
        if not self._engine.signature.has_shape_tensors:
            return True
        log.warning(
            "CUDA graphs not captured: the model has shape tensors",
            extra={"instance": options.name},
        )
        return False

    def _capture(
        self, index: int, capture: Capture, options: PlanOptions, opened: ExitStack
    ) -> None:
        shown = {"instance": options.name, "profile": index, "shapes": str(dict(capture.shapes))}
        if refusals(self._profiles[index], capture.shapes):
            return
        try:
            graph = self._captured(index, capture)
        except (CudaError, LibraryError) as error:
            log.warning("CUDA graph not captured", extra={**shown, "reason": str(error)})
            return
        opened.callback(graph.close)
        self._graphs.setdefault(index, []).append(graph)
        log.debug("CUDA graph captured", extra=shown)

    def _captured(self, index: int, capture: Capture) -> CapturedGraph:
        bound = self._bind(index)
        addresses = {
            name: self._tensors.send_zeros(name, shape) for name, shape in capture.shapes.items()
        }
        bound.set_inputs(capture.shapes, addresses)
        found = bound.output_shapes()
        if any(-1 in shape for shape in found.values()):
            raise LibraryError("the size of an output depends on values")
        for name, shape in found.items():
            addresses[name] = self._tensors.reserve(name, shape)
            bound.set_output(name, addresses[name])
        return CapturedGraph(capture, bound, self._gpu, addresses)

    def _reserve_most(self, index: int) -> None:
        """Reserve memory for the largest tensors of a profile: graphs use fixed addresses."""
        shapes = {name: each.most for name, each in self._profiles[index].items()}
        bound = self._bound[index]
        bound.set_inputs(
            shapes, {name: self._tensors.reserve(name, shapes[name]) for name in shapes}
        )
        for name, shape in bound.output_shapes().items():
            if -1 not in shape:
                self._tensors.reserve(name, shape)
