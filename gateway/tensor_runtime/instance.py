"""Instances of runtimes that compute output tensors from input tensors."""

import asyncio
import logging
import threading
import time
from abc import abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Generic, TypeVar

from gateway.backend import Answer, Begun, Instance, Reader
from gateway.batches.shapes import as_model_sees
from gateway.batches.stacking import Stacking, with_sequence_tensors
from gateway.config import ModelConfig
from gateway.errors import InferenceError
from gateway.messages import NO_PARAMETERS, InferRequest, InferResponse, Phases
from gateway.tensor import Tensor
from gateway.tensor_runtime.device_outputs import NONE, delivered, staying

log = logging.getLogger("sluice.tensors")
HOLD_NS = 500_000
"""Time on the event loop after which the next execution waits for another turn."""


class TensorInstance(Instance):
    """Stacks the inputs of an execution, computes on a thread of its own, splits the outputs.

    Subclasses implement `run`, `abort` if a run can be aborted, and `release` if they hold
    memory or handles. With `steady`, executions that are shorter than the switch to the thread
    run on the event loop (`ShortExecutions`), and it has `singles` while they do.
    """

    steady = False
    """Whether `run` only computes, never waits, and takes the same time for the same rows."""
    gpu: int | None = None
    """The GPU of the runtime, if inputs and outputs may be in its memory."""

    def __init__(self, config: ModelConfig, name: str) -> None:
        self._batching = config.batching
        self._stacking = Stacking(as_model_sees(with_sequence_tensors(config)))
        self._short_executions = ShortExecutions()
        self._seemed_long = False
        self._accepted: RowClass | None = None
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
        """Free memory and handles; called once, on the same thread, after the last run.

        An instance whose load was cancelled has no run, and is released where it was loaded.
        """

    async def execute(self, requests: Sequence[InferRequest]) -> AsyncGenerator[Answer, None]:
        rows = self._rows(requests)
        self._executing = requests
        kind = self._on_loop(rows) if self.steady else None
        if kind is not None:
            if TURN.spent_ns > HOLD_NS:  # a backlog of short executions must not block the loop
                await asyncio.sleep(0)
            self.singles = self
            answers = self._answer_on_loop(requests, kind)
        else:
            self.singles = None
            answers = await self._answer_on_thread(requests, rows)
        self._executing = None
        for answer in answers:
            yield answer

    def accepts(self, request: InferRequest) -> bool:
        """Whether a single request is executed on the event loop, which has time for it."""
        self._accepted = self._on_loop(self._rows((request,)))
        return self._accepted is not None and TURN.spent_ns <= HOLD_NS

    def begin(self, request: InferRequest, reader: Reader) -> Begun:
        """Execute the request that was accepted last, and have its reader take the answer."""
        kind = self._accepted
        assert kind is not None  # noqa: S101 - the request was accepted
        ((_, answer),) = self._answer_on_loop((request,), kind)
        began_ns = time.perf_counter_ns()
        reader.take(answer)
        reader.over(None)
        TURN.spend(time.perf_counter_ns() - began_ns)
        return self

    def abandon(self) -> None:
        """No effect: what `begin` executes has ended."""

    async def close(self) -> None:
        """Wait for the last run, then release."""
        self.singles = None
        released = self._thread.call(self.release)
        self._thread.stop()
        await released

    def discard(self) -> None:
        """Release instead of `close`, in any thread: the load was cancelled."""
        self.singles = None
        self._thread.stop()
        self.release()

    def _on_loop(self, rows: int) -> "RowClass | None":
        """The class of an execution on the event loop; None if it has to run on the thread."""
        # Runs must not overlap: a cancelled one may be in progress on the thread.
        is_idle = self._left is None or self._left.done()
        return self._short_executions.on_loop(rows) if is_idle else None

    def _answer_on_loop(self, requests: Sequence[InferRequest], kind: "RowClass") -> list[Answer]:
        # The thread's clock is slow: it is read only after an execution that seemed long, since
        # other threads may have used the processor meanwhile.
        processor_began_ns = time.thread_time_ns() if self._seemed_long else 0
        began_ns = time.perf_counter_ns()
        try:
            return self._answer(requests)
        finally:
            spent_ns = time.perf_counter_ns() - began_ns
            TURN.spend(spent_ns)
            if self._seemed_long:
                spent_ns = min(spent_ns, time.thread_time_ns() - processor_began_ns)
            if self._seemed_long or spent_ns <= LIMIT_NS:
                kind.ran_on_loop(spent_ns)
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
        rows = 0
        for request in requests:
            if request.inputs:
                rows += request.inputs[0].shape[0]
        return rows

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
        on_gpu = NONE if self.gpu is None else staying(self.gpu, requests)
        outputs = self.run(inputs, self._stacking.wanted(requests), on_gpu)
        if on_gpu:
            outputs = delivered(outputs, on_gpu, requests[0])
        ran = time.perf_counter_ns()
        scattered = self._stacking.scatter(outputs, requests)
        ended = time.perf_counter_ns()
        phases = Phases(gathered - began, ran - gathered, ended - ran)
        responses: list[InferResponse] = []
        for found in scattered:  # in Python 3.11 a comprehension is a call
            one = InferResponse(outputs=found, parameters=NO_PARAMETERS, final=True, phases=phases)
            responses += (one,)
        return responses


def _duration_ns(answers: Sequence[Answer]) -> int:
    """The duration in the first answer; 0 if that is an error."""
    _, response = answers[0]
    phases = response.phases if isinstance(response, InferResponse) else None
    return phases.input_ns + phases.infer_ns + phases.output_ns if phases else 0


def _nothing() -> None:
    """A call that ends after all earlier calls of the thread."""


T = TypeVar("T")
LIMIT_NS = 200_000
"""The longest execution on the event loop."""
TRIALS = 8
TOLERATED = 3
FIRST_PAUSE = 256
LAST_PAUSE = 1 << 20


class OwnThread:
    """A thread for blocking calls, one after the other; its owner calls `stop`.

    A queue and the wake-up of the loop take three quarters of the time of `run_in_executor`. The
    thread does not delay the exit of the process.
    """

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[_Call[Any] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """A future of the function's result or exception; calls are in order.

        A call is dropped if its future is cancelled before it begins; a running call continues,
        and its result is dropped.
        """
        loop = asyncio.get_running_loop()
        call = _Call(function, loop, loop.create_future())
        self._calls.put(call)
        return call.future

    def stop(self) -> None:
        """End the thread after the queued calls; no call may follow."""
        self._calls.put(None)

    def _run(self) -> None:
        while self._made_next():
            pass

    def _made_next(self) -> bool:
        # A separate function, so that no call is referenced during the wait for the next one.
        call = self._calls.get()
        if call is not None and not call.future.cancelled():
            call.make()
        return call is not None


class _Call(Generic[T]):
    """One call and its future; as a context it catches the exception of its block."""

    __slots__ = ("_function", "_loop", "future")

    def __init__(
        self,
        function: Callable[[], T],
        loop: asyncio.AbstractEventLoop,
        future: asyncio.Future[T],
    ) -> None:
        self._function = function
        self._loop = loop
        self.future = future

    def make(self) -> None:
        with self:
            self._deliver(_set_result, self._function())

    def __enter__(self) -> None:
        """The block is the call."""

    def __exit__(
        self, kind: object, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if error is not None:
            self._deliver(_set_exception, error)
        return True

    def _deliver(self, settle: Callable[[asyncio.Future[Any], Any], None], outcome: object) -> None:
        try:
            self._loop.call_soon_threadsafe(settle, self.future, outcome)
        except RuntimeError:
            """The loop is closed."""


def _set_result(future: asyncio.Future[Any], result: object) -> None:
    if not future.done():
        future.set_result(result)


def _set_exception(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)


class TurnTime(threading.local):
    """The time of executions in this turn of the event loop, those of all instances together.

    A thread has one loop.
    """

    def __init__(self) -> None:
        self.spent_ns = 0

    def spend(self, spent_ns: int) -> None:
        """Add the time of an execution; it is forgotten in the next turn."""
        if not self.spent_ns:
            asyncio.get_running_loop().call_soon(self._next_turn)
        self.spent_ns += max(1, spent_ns)

    def _next_turn(self) -> None:
        self.spent_ns = 0


TURN = TurnTime()
"""The time of the running event loop."""


class ShortExecutions:
    """Decides which executions run on the event loop, by numbers of rows.

    A switch to a thread costs about 25 us on an idle machine, and 90 us of processor time per
    request in a server with one client. Numbers of rows form classes of powers of two. A class
    runs on the thread first, and on the loop if its fastest trial was short. It returns to the
    thread if executions on the loop are longer, immediately if one takes five times the limit; each
    time it then stays on the thread for twice as many executions.
    """

    def __init__(self) -> None:
        self._classes: dict[int, RowClass] = {}

    def on_loop(self, rows: int) -> "RowClass | None":
        """The class of an execution of that many rows; None if it runs on the thread."""
        known = self._classes.get(rows.bit_length())
        return known if known is not None and known.on_loop else None

    def ran_on_thread(self, rows: int, wall_ns: int) -> None:
        """Record the wall-clock time of an execution on the thread."""
        self._classes.setdefault(rows.bit_length(), RowClass()).ran_on_thread(wall_ns)


@dataclass(slots=True)
class RowClass:
    """The executions of a class of numbers of rows."""

    on_loop: bool = False
    fastest_ns: int = 0
    trials: int = 0
    slow: int = 0
    pause: int = 0
    next_pause: int = FIRST_PAUSE

    def ran_on_thread(self, wall_ns: int) -> None:
        """Record the wall-clock time of an execution on the thread."""
        if self.pause:
            self.pause -= 1
            return
        self.fastest_ns = min(self.fastest_ns, wall_ns) if self.trials else wall_ns
        self.trials += 1
        if self.trials < TRIALS:
            return
        self.trials = 0
        self.on_loop = self.fastest_ns <= LIMIT_NS
        if not self.on_loop:
            self._rest()

    def ran_on_loop(self, processor_ns: int) -> None:
        """Record the processor time of an execution on the loop."""
        self.slow = self.slow + 1 if processor_ns > LIMIT_NS else max(0, self.slow - 1)
        if self.slow == TOLERATED or processor_ns > 5 * LIMIT_NS:
            self.on_loop = False
            self.slow = 0
            self._rest()

    def _rest(self) -> None:
        self.pause = self.next_pause
        self.next_pause = min(2 * self.next_pause, LAST_PAUSE)
