"""What a runtime of tensors in, tensors out implements: one blocking method."""

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
"""After so much time on the event loop the next run lets others have their turn first."""
NONE: Set[str] = frozenset()


class TensorInstance(Instance):
    """Stacks the inputs of an execution, runs it on a thread of its own, splits the outputs.

    Subclasses write `run`, `abort` if a run can be cut short, and `release` if they hold what
    must be freed. Those with `steady` set may also run on the event loop, while that is measured
    to be so short that a thread would cost more (see `short_runs.py`).
    """

    steady = False
    """Whether a run only computes, never waits, and takes as long as others of as many rows."""
    gpu: int | None = None
    """The GPU that runs compute on, if inputs may lie there and outputs may be left there."""

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
        """Compute the named outputs, in that order; blocks, without the interpreter's lock.

        The data of those `staying` is to be left on the GPU, as DeviceMemory: it is copied before
        the next run. Shapes have the leading batch dimension if the model batches.

        Raises InferenceError. The data of one request may be what made a batch fail: its halves
        are run again, and theirs, until only requests that fail alone are left with the error.
        """

    def abort(self) -> None:
        """Ask the run under way, if there is one, to end early: nobody waits for it any more.

        Called on the event loop, beside `run`. Without it a run just goes on to its end.
        """

    def release(self) -> None:
        """Free what `run` uses; called once, on the same thread, after the last run."""

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
        """Wait for the last run, and free everything."""
        released = self._thread.call(self.release)
        self._thread.stop()
        await released

    async def _answer_on_loop(self, requests: Sequence[InferRequest], rows: int) -> list[Answer]:
        if self._held_ns > HOLD_NS:  # a backlog of short runs must not keep all others waiting
            self._held_ns = 0
            await asyncio.sleep(0)
        # The processor's clock is dear, and asked only once a run has seemed long: others may have
        # had the processor meanwhile.
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
        """Whether no run that somebody left is still under way: two at once there must not be."""
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
        """Answers to a part of an execution; unless that was left, what fails is halved."""
        try:
            return [*self._responses(part)]
        except InferenceError as error:
            if self._executing is not execution:
                raise
            if part is execution:
                log.warning("batch failed, its halves are tried", extra={"reason": error.reason})
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
    """How long the execution took, from its first answer; 0 if that failed."""
    _, response = answers[0]
    phases = response.phases if isinstance(response, InferResponse) else None
    return phases.input_ns + phases.infer_ns + phases.output_ns if phases else 0


def _nothing() -> None:
    """What is called to learn that the thread has come so far."""


def staying(gpu: int | None, requests: Sequence[InferRequest]) -> Set[str]:
    """The names of the outputs that are wanted on that GPU; `gpu` is None on the host."""
    if gpu is None or len(requests) > 1:
        return NONE
    return {name for name, region in _regions(requests[0]).items() if _is_on(gpu, region)}


def delivered(
    outputs: Mapping[str, Tensor], names: Set[str], request: InferRequest
) -> Mapping[str, Tensor]:
    """The outputs, with those of these names where the request wants them; blocks.

    One that is larger than its place stays where it is: whoever encodes the response refuses it.
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
        return tensor  # a runtime may have made it on the host
    if len(data) > region.byte_size:
        return tensor
    there = memory.part(region.offset, len(data))
    there.take(data)
    return replace(tensor, data=there)
