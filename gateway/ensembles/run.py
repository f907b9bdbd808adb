"""Execution of one request by an ensemble: starting steps, collecting responses, cancelling."""

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

from gateway.ensembles.graph import Step
from gateway.ensembles.steps import DataFlow, LoadedEnsemble, LoadedStep, StepCall
from gateway.ensembles.tensors import EnsembleTensor, given, made
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest, InferResponse, Phases, request_prefix


class EnsembleRun:
    """One request in progress; its creator calls `cancel` at the end.

    A step starts once all of its inputs exist; independent steps execute concurrently. Events of
    the members' streams are queued; `work` handles them in the task of the request. `calls` counts
    those of members so far. All methods but `change` are synchronous.
    """

    def __init__(self, ensemble: LoadedEnsemble, request: InferRequest) -> None:
        self._ensemble = ensemble
        self.request = request
        self.calls = 0
        self._plan = ensemble.plan(request)
        self._calls: set[StepCall] = set()
        self._queued: dict[_QueuedStep, None] = {}
        self._notes: deque[StepCall | _QueuedStep] = deque()
        self._ready: list[InferResponse] = []
        self._phases = Phases()
        self._failure: InferenceError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def begin(self) -> None:
        """Start the steps that need only the ensemble's inputs. Raises InferenceError."""
        self._advance(DataFlow(self._plan), given(self._ensemble.config, self.request))

    @property
    def over(self) -> bool:
        """Whether no call is running or queued."""
        return not self._calls and not self._queued and self._failure is None

    @property
    def waits_for(self) -> Iterator[str]:
        """The models whose responses or limits it waits for."""
        yield from (call.loaded.step.model for call in self._calls)
        yield from (queued.loaded.step.model for queued in self._queued)

    def work(self) -> list[InferResponse]:
        """Handle all events; return the ensemble's responses since the last call.

        The last response is final. Raises the error of the first step that fails, after the
        responses before it.
        """
        if self._failure is not None:
            raise self._failure
        try:
            self._work_off()
        except InferenceError as error:
            if not (self._ready and self._ensemble.config.decoupled):
                raise
            self._failure = error
        return self._responses()

    async def change(self) -> None:
        """Wait for an event."""
        if not self._notes and self._failure is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def cancel(self) -> None:
        """Cancel every call; idempotent."""
        for queued in self._queued:
            queued.cancel()
        self._queued.clear()
        for call in self._calls:
            call.stream.cancel()
            call.loaded.release()
        self._calls.clear()

    # Calls.

    def _advance(self, flow: DataFlow, found: Iterable[tuple[str, EnsembleTensor]]) -> None:
        complete = flow.complete
        for step in flow.add(found):
            self._enter(flow, step)
        if flow.complete and not complete:
            self._ready.append(self._ensemble.responses.make(self._plan, flow.values))

    def _enter(self, flow: DataFlow, step: Step) -> None:
        flow.open += 1
        loaded = self._ensemble.loaded(step)
        if loaded.limit is None:
            self._begin(flow, loaded)
            return
        queued = _QueuedStep(self, flow, loaded)
        if loaded.limit.acquire(queued.start):
            self._begin(flow, loaded)
            return
        self._queued[queued] = None
        if flow.origin is not None:
            flow.origin.queued += 1

    def _dequeue(self, queued: "_QueuedStep") -> None:
        del self._queued[queued]
        origin = queued.flow.origin
        if origin is not None:
            origin.queued -= 1
            self._relieve(origin)
        self._begin(queued.flow, queued.loaded)

    def _begin(self, flow: DataFlow, loaded: LoadedStep) -> None:
        request = loaded.requests.make(self.request, flow.values)
        if self.request.receipt is not None:
            request.receipt = self.request.receipt.member(request)  # type: ignore[misc]  # made here
        self.calls += 1
        try:
            stream = loaded.member.call(request)
        except InferenceError:
            loaded.release()
            raise
        call = StepCall(loaded, flow, request, stream)
        self._calls.add(call)
        stream.listen(partial(self.note, call))

    def note(self, changed: "StepCall | _QueuedStep") -> None:
        """Queue an event of a call or a queued step; called by streams and limits."""
        if isinstance(changed, StepCall):
            if changed.noted:
                return
            changed.noted = True
        self._notes.append(changed)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # Responses of members.

    def _work_off(self) -> None:
        while self._notes:
            noted = self._notes.popleft()
            if isinstance(noted, StepCall):
                noted.noted = False
                self._take(noted)
            else:
                self._dequeue(noted)

    def _take(self, call: StepCall) -> None:
        while call in self._calls:
            if call.full:
                call.held_back = True
                return
            responses = call.stream.take()
            if responses is None:
                return
            for response in responses:
                self._accept(call, response)
            if not responses:
                self._end(call)

    def _accept(self, call: StepCall, response: InferResponse) -> None:
        if response.error is not None:
            raise response.error  # as on Triton the first error of a member fails the ensemble
        call.phases = response.phases or call.phases
        decoupled = call.loaded.decoupled
        if response.final and not response.outputs and (decoupled or call.answered):
            return
        found = made(call.loaded.step, response, call.rows, call.tag)
        if decoupled:
            self._follow(call, found)
        elif call.answered:
            raise InferenceError(
                Code.INTERNAL,
                f"expected a single response of model '{call.loaded.step.model}', got more",
            )
        else:
            call.answered = True
            self._advance(call.flow, found)

    def _follow(self, call: StepCall, found: Iterable[tuple[str, EnsembleTensor]]) -> None:
        """A response of a decoupled step begins a flow of its own."""
        call.flows += 1
        flow = DataFlow(self._plan, call)
        self._advance(flow, found)
        if not flow.open:
            call.flows -= 1

    def _end(self, call: StepCall) -> None:
        self._calls.discard(call)
        call.loaded.release()
        self._phases = _sum(self._phases, call.spent())
        if not call.flows:
            self._close(call.flow)

    def _close(self, flow: DataFlow) -> None:
        """A call of a flow and all flows that it began have ended."""
        flow.open -= 1
        origin = flow.origin
        if flow.open or origin is None:
            return
        origin.flows -= 1
        self._relieve(origin)
        if origin not in self._calls and not origin.flows:
            self._close(origin.flow)

    def _relieve(self, call: StepCall) -> None:
        if call.held_back and not call.full:
            call.held_back = False
            self.note(call)

    # Responses of the ensemble.

    def _responses(self) -> list[InferResponse]:
        decoupled = self._ensemble.config.decoupled
        if not (self.over or decoupled):
            return []
        ready, self._ready = self._ready, []
        if not self.over:
            return ready
        if not ready:
            if not decoupled:
                raise InferenceError(Code.INVALID_ARG, self._deadlock())
            return [InferResponse(final=True, phases=self._phases)]
        ready[-1] = replace(ready[-1], final=True, phases=self._phases)
        return ready

    def _deadlock(self) -> str:
        return (
            f"{request_prefix(self.request.id)}unexpected deadlock, at least one output is not "
            "set while no more ensemble steps can be made"
        )


class _QueuedStep:
    """A step that waits in the queue of its limit."""

    __slots__ = ("_run", "flow", "loaded", "started")

    def __init__(self, run: EnsembleRun, flow: DataFlow, loaded: LoadedStep) -> None:
        self._run = run
        self.flow = flow
        self.loaded = loaded
        self.started = False

    def start(self) -> None:
        """The limit has room for it."""
        self.started = True
        self._run.note(self)

    def cancel(self) -> None:
        """Return its place in the limit, or in the queue."""
        if self.started:
            self.loaded.release()
        elif self.loaded.limit is not None:
            self.loaded.limit.cancel(self.start)


def _sum(one: Phases, other: Phases) -> Phases:
    return Phases(
        one.input_ns + other.input_ns,
        one.infer_ns + other.infer_ns,
        one.output_ns + other.output_ns,
    )
