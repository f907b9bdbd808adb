"""One request on its way through an ensemble: start what is due, take what comes, end once."""

import asyncio
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

from gateway.ensembles.graph import Step
from gateway.ensembles.steps import Call, Pass, Stage, Stages
from gateway.ensembles.tensors import Value, given, made
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest, InferResponse, Phases, request_prefix


class Run:
    """Everything but `change` is plain. Whoever makes a run calls `cancel` at its end.

    A step starts once its inputs are there, those that do not need each other side by side. What
    streams of members tell is only noted; `work` deals with it, in the task of the request.
    """

    def __init__(self, stages: Stages, request: InferRequest) -> None:
        self._stages = stages
        self.request = request
        self._plan = stages.plan(request)
        self._calls: set[Call] = set()
        self._parked: dict[_Turn, None] = {}
        self._notes: deque[Call | _Turn] = deque()
        self._ready: list[InferResponse] = []
        self._phases = Phases()
        self._failure: InferenceError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def begin(self) -> None:
        """Start the steps that need the ensemble's inputs only; InferenceError if one cannot."""
        self._advance(Pass(self._plan), given(self._stages.config, self.request))

    @property
    def over(self) -> bool:
        """Whether nothing is running, and nothing waits to."""
        return not self._calls and not self._parked and self._failure is None

    def waits_for(self) -> Iterator[str]:
        """The models whose answers, or whose turns, it waits for."""
        yield from (call.stage.step.model for call in self._calls)
        yield from (turn.stage.step.model for turn in self._parked)

    def work(self) -> list[InferResponse]:
        """Deal with all that has come; the ensemble's responses so far, the last one final.

        Raises InferenceError for the first step that fails, after the responses before it.
        """
        if self._failure is not None:
            raise self._failure
        try:
            self._work_off()
        except InferenceError as error:
            if not (self._ready and self._stages.config.decoupled):
                raise
            self._failure = error
        return self._responses()

    async def change(self) -> None:
        """Wait until there may be work."""
        if not self._notes and self._failure is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def cancel(self) -> None:
        """Stop every step; idempotent."""
        for turn in self._parked:
            turn.withdraw()
        self._parked.clear()
        for call in self._calls:
            call.stream.cancel()
            call.stage.leave()
        self._calls.clear()

    # Starting.

    def _advance(self, within: Pass[Call], found: Iterable[tuple[str, Value]]) -> None:
        complete = within.complete
        for step in within.add(found):
            self._enter(within, step)
        if within.complete and not complete:
            self._ready.append(self._stages.answers.make(self._plan, within.values))

    def _enter(self, within: Pass[Call], step: Step) -> None:
        within.open += 1
        stage = self._stages.of(step)
        if stage.gate is None:
            self._begin(within, stage)
            return
        turn = _Turn(self, within, stage)
        if stage.gate.enter(turn.come):
            self._begin(within, stage)
            return
        self._parked[turn] = None
        if within.origin is not None:
            within.origin.parked += 1

    def _unpark(self, turn: "_Turn") -> None:
        del self._parked[turn]
        origin = turn.within.origin
        if origin is not None:
            origin.parked -= 1
            self._relieve(origin)
        self._begin(turn.within, turn.stage)

    def _begin(self, within: Pass[Call], stage: Stage) -> None:
        request = stage.requests.make(self.request, within.values)
        try:
            stream = stage.member.call(request)
        except InferenceError:
            stage.leave()
            raise
        call = Call(stage, within, request, stream)
        self._calls.add(call)
        stream.listen(partial(self.note, call))

    def note(self, changed: "Call | _Turn") -> None:
        """Something has happened to it; may be called at any time."""
        if isinstance(changed, Call):
            if changed.noted:
                return
            changed.noted = True
        self._notes.append(changed)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # Taking what comes.

    def _work_off(self) -> None:
        while self._notes:
            noted = self._notes.popleft()
            if isinstance(noted, Call):
                noted.noted = False
                self._take(noted)
            else:
                self._unpark(noted)

    def _take(self, call: Call) -> None:
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

    def _accept(self, call: Call, response: InferResponse) -> None:
        if response.error is not None:
            raise response.error  # as on Triton the first error of a member fails the ensemble
        call.phases = response.phases or call.phases
        decoupled = call.stage.decoupled
        if response.final and not response.outputs and (decoupled or call.answered):
            return
        found = made(call.stage.step, response, call.rows, call.tag)
        if decoupled:
            self._follow(call, found)
        elif call.answered:
            raise InferenceError(
                Code.INTERNAL,
                f"expected a single response of model '{call.stage.step.model}', got more",
            )
        else:
            call.answered = True
            self._advance(call.within, found)

    def _follow(self, call: Call, found: Iterable[tuple[str, Value]]) -> None:
        """One more of several responses goes its own way."""
        call.passes += 1
        within = Pass(self._plan, call)
        self._advance(within, found)
        if not within.open:
            call.passes -= 1

    def _end(self, call: Call) -> None:
        self._calls.discard(call)
        call.stage.leave()
        self._phases = _sum(self._phases, call.spent())
        if not call.passes:
            self._close(call.within)

    def _close(self, within: Pass[Call]) -> None:
        """One step of a pass, and all that follows from it, has ended."""
        within.open -= 1
        origin = within.origin
        if within.open or origin is None:
            return
        origin.passes -= 1
        self._relieve(origin)
        if origin not in self._calls and not origin.passes:
            self._close(origin.within)

    def _relieve(self, call: Call) -> None:
        if call.held_back and not call.full:
            call.held_back = False
            self.note(call)

    # Answering.

    def _responses(self) -> list[InferResponse]:
        decoupled = self._stages.config.decoupled
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


class _Turn:
    """A step that waits at a gate for its turn."""

    __slots__ = ("_run", "came", "stage", "within")

    def __init__(self, run: Run, within: Pass[Call], stage: Stage) -> None:
        self._run = run
        self.within = within
        self.stage = stage
        self.came = False

    def come(self) -> None:
        """There is room for it from now on."""
        self.came = True
        self._run.note(self)

    def withdraw(self) -> None:
        """It is not wanted any more."""
        if self.came:
            self.stage.leave()
        elif self.stage.gate is not None:
            self.stage.gate.withdraw(self.come)


def _sum(one: Phases, other: Phases) -> Phases:
    return Phases(
        one.input_ns + other.input_ns,
        one.infer_ns + other.infer_ns,
        one.output_ns + other.output_ns,
    )
