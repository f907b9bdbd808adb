"""Instances of runtimes that compute output tensors from input tensors."""

import asyncio
import logging
import time
from abc import abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial

from gateway.backend import Answer, Instance
from gateway.batches.extra_inputs import with_sequence_tensors
from gateway.batches.shapes import as_model_sees
from gateway.batches.stacking import Stacking
from gateway.config import ModelConfig
from gateway.device_memory import DeviceMemory, DeviceRegion
from gateway.errors import InferenceError
from gateway.messages import InferRequest, InferResponse, Phases, SharedRegion
from gateway.tensor import Tensor
from gateway.tensor_runtime.thread import LIMIT_NS, OwnThread, ShortExecutions

log = logging.getLogger("sluice.tensors")
HOLD_NS = 500_000
"""Time on the event loop after which the next execution yields a turn first."""
NONE: Set[str] = frozenset()


class TensorInstance(Instance):
    """Stacks the inputs of an execution, computes on a thread of its own, splits the outputs.

    Subclasses implement `run`, `abort` if a run can be aborted, and `release` if they hold
    memory or handles. With `steady`, executions that are shorter than the switch to the thread
    run on the event loop (`ShortExecutions`).
    """

    steady = False
    """Whether `run` only computes, never waits, and takes the same time for the same rows."""
    gpu: int | None = None
    """The GPU of the runtime, if inputs and outputs may be in its memory."""

    def __init__(self, config: ModelConfig, name: str) -> None:
        self._batching = config.batching
        self._stacking = Stacking(as_model_sees(with_sequence_tensors(config)))
        self._short_executions = ShortExecutions()
        self._held_ns = 0
        self._seemed_long = False
        self._executing: Sequence[InferRequest] | None = None
        self._left: asyncio.Future[None] | None = None
        self._thread = OwnThread(name)

    @abstractmethod
    def run(
        self, inputs: Mapping[str, Tensor], outputs: Sequence[str], staying: Set[str]
    ) -> Mapping[str, Tensor]:
        """Compute the named outputs, in that order; blocks, without the interpreter lock.

        The data of outputs in `staying` remains on the GPU, as DeviceMemory: it is copied before
        the next run. Shapes have the leading batch dimension if the model batches.

        Raises InferenceError. A batch that fails is halved and run again, and its halves, until
        only requests that fail alone have the error.
        """

    def abort(self) -> None:
        """Ask the current run, if any, to end early: its execution was cancelled.

        Called on the event loop during `run`. By default the run continues to its end.
        """

    def release(self) -> None:
        """Free memory and handles; called once, on the same thread, after the last run."""

    async def execute(self, requests: Sequence[InferRequest]) -> AsyncGenerator[Answer, None]:
        rows = self._rows(requests)
        self._executing = requests
        if self.steady and self._short_executions.on_loop(rows) and self._thread_is_idle():
            answers = await self._answer_on_loop(requests, rows)
        else:
            answers = await self._answer_on_thread(requests, rows)
        for answer in answers:
            yield answer

    async def close(self) -> None:
        """Wait for the last run, then release."""
        released = self._thread.call(self.release)
        self._thread.stop()
        await released

    async def _answer_on_loop(self, requests: Sequence[InferRequest], rows: int) -> list[Answer]:
        if self._held_ns > HOLD_NS:  # a backlog of short executions must not block the loop
            self._held_ns = 0
            await asyncio.sleep(0)
        # The thread's clock is slow: it is read only after an execution that seemed long, since
        # other threads may have used the processor meanwhile.
        processor_began_ns = time.thread_time_ns() if self._seemed_long else 0
        began_ns = time.perf_counter_ns()
        try:
            return self._answer(requests)
        finally:
            spent_ns = time.perf_counter_ns() - began_ns
            if self._seemed_long:
                spent_ns = min(spent_ns, time.thread_time_ns() - processor_began_ns)
            self._held_ns += spent_ns
            if self._seemed_long or spent_ns <= LIMIT_NS:
                self._short_executions.ran_on_loop(rows, spent_ns)
            self._seemed_long = spent_ns > LIMIT_NS

    async def _answer_on_thread(self, requests: Sequence[InferRequest], rows: int) -> list[Answer]:
        call = self._thread.call(partial(self._answer, requests))
        try:
            answers = await call
        finally:
            if call.cancelled():
                self._executing = None
                self.abort()
                self._left = self._thread.call(_nothing)
        if duration_ns := _duration_ns(answers):
            self._short_executions.ran_on_thread(rows, duration_ns)
        return answers

    def _rows(self, requests: Sequence[InferRequest]) -> int:
        if not self._batching:
            return len(requests)
        return sum(request.inputs[0].shape[0] for request in requests if request.inputs)

    def _thread_is_idle(self) -> bool:
        """Whether no cancelled run is still in progress; runs must not overlap."""
        return self._left is None or self._left.done()

    def _answer(self, requests: Sequence[InferRequest]) -> list[Answer]:
        if len(requests) == 1:
            return [(0, self._responses(requests)[0])]
        parts = [requests] if self._batching else [[request] for request in requests]
        answers = [answer for part in parts for answer in self._divided(part, requests)]
        return list(enumerate(answers))

    def _divided(
        self, part: Sequence[InferRequest], execution: Sequence[InferRequest]
    ) -> list[InferResponse | InferenceError]:
        """Answers to a part of an execution; a part that fails is halved, unless cancelled."""
        try:
            return [*self._responses(part)]
        except InferenceError as error:
            if self._executing is not execution:
                raise
            if part is execution:
                log.warning("batch failed, halves retried", extra={"reason": error.reason})
            if len(part) == 1:
                return [error]
        middle = len(part) // 2
        return [*self._divided(part[:middle], execution), *self._divided(part[middle:], execution)]

    def _responses(self, requests: Sequence[InferRequest]) -> list[InferResponse]:
        began = time.perf_counter_ns()
        inputs = self._stacking.gather(requests)
        gathered = time.perf_counter_ns()
        on_gpu = staying(self.gpu, requests)
        outputs = self.run(inputs, self._stacking.wanted(requests), on_gpu)
        if on_gpu:
            outputs = delivered(outputs, on_gpu, requests[0])
        ran = time.perf_counter_ns()
        scattered = list(self._stacking.scatter(outputs, requests))
        ended = time.perf_counter_ns()
        phases = Phases(gathered - began, ran - gathered, ended - ran)
        return [InferResponse(outputs=found, final=True, phases=phases) for found in scattered]


def _duration_ns(answers: Sequence[Answer]) -> int:
    """The duration in the first answer; 0 if that is an error."""
    _, response = answers[0]
    phases = response.phases if isinstance(response, InferResponse) else None
    return phases.input_ns + phases.infer_ns + phases.output_ns if phases else 0


def _nothing() -> None:
    """A call that ends after all earlier calls of the thread."""


def staying(gpu: int | None, requests: Sequence[InferRequest]) -> Set[str]:
    """The names of the outputs requested in regions on that GPU; `gpu` is None on the host.

    Outputs of a single request are copied within the GPU. Those of a batch are split on the host.
    """
    if gpu is None or len(requests) > 1:
        return NONE
    return {name for name, region in _regions(requests[0]).items() if _is_on(gpu, region)}


def delivered(
    outputs: Mapping[str, Tensor], names: Set[str], request: InferRequest
) -> Mapping[str, Tensor]:
    """The outputs, with the named ones copied into the request's regions; blocks.

    An output that is larger than its region is not copied: encoding the response refuses it.
    """
    regions = _regions(request)
    return {
        name: _placed(tensor, regions[name]) if name in names else tensor
        for name, tensor in outputs.items()
    }


def _regions(request: InferRequest) -> Mapping[str, SharedRegion]:
    return {each.name: each.region for each in request.outputs if each.region and not each.classes}


def _is_on(gpu: int, region: SharedRegion) -> bool:
    return isinstance(region.memory, DeviceRegion) and region.memory.gpu == gpu


def _placed(tensor: Tensor, region: SharedRegion) -> Tensor:
    data, memory = tensor.data, region.memory
    if not isinstance(data, DeviceMemory) or not isinstance(memory, DeviceRegion):
        return tensor  # the runtime may have computed it on the host
    if len(data) > region.byte_size:
        return tensor
    there = memory.part(region.offset, len(data))
    there.take(data)
    return replace(tensor, data=there)
