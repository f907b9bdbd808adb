"""A loaded ensemble: its steps with the members they call, shared by all its requests."""

import time
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from gateway.config import ModelConfig
from gateway.ensembles.graph import Graph, Member, Members, Plan, Step
from gateway.ensembles.tensors import NO_SEQUENCE, Answers, StepRequests, Value
from gateway.messages import InferRequest, Phases
from gateway.stream import ResponseStream

MAX_PLANS = 64
"""Choices of outputs that are kept; clients rarely make more than two."""
MAX_PASSES = 64
"""Responses of one call that may be on their way at once; then its member is held back."""
Origin = TypeVar("Origin")
Admit = Callable[[], None]


class Stage:
    """A step with its member, ready to be called. It has a gate if its calls are limited."""

    __slots__ = ("decoupled", "gate", "member", "requests", "step")

    def __init__(self, step: Step, member: Member, limit: int) -> None:
        self.step = step
        self.member = member
        self.decoupled = member.config.decoupled
        self.requests = StepRequests(step, member.config)
        self.gate = StepGate(limit) if limit else None

    def leave(self) -> None:
        """A call has ended, or did not come about."""
        if self.gate is not None:
            self.gate.leave()


class Stages:
    """All of them, and the plans for what clients ask; `config` is complete."""

    def __init__(self, config: ModelConfig, members: Members) -> None:
        assert config.ensemble_scheduling is not None  # noqa: S101 - it is an ensemble
        self.config = config
        self.answers = Answers(config)
        self._graph = Graph.of(config.ensemble_scheduling)
        limit = config.ensemble_scheduling.max_inflight_requests
        self._of = {step: Stage(step, members[step.member], limit) for step in self._graph.steps}
        self._outputs = tuple(each.name for each in config.output)
        self._plans: dict[tuple[str, ...], Plan] = {}

    def of(self, step: Step) -> Stage:
        """The stage of a step."""
        return self._of[step]

    def plan(self, request: InferRequest) -> Plan:
        """What to run for the outputs that a request asks for; for all if it names none."""
        wanted = [output.name for output in request.outputs]
        names = self._outputs
        if wanted and len(wanted) < len(names):
            names = tuple(name for name in names if name in wanted)
        if (plan := self._plans.get(names)) is None:
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            plan = self._plans[names] = self._graph.plan(names)
        return plan


class Pass(Generic[Origin]):
    """The tensors that are there so far.

    Each response of a decoupled step begins a pass of its own: what follows from it needs nothing
    else (that is checked when the ensemble is loaded). `origin` is the call that it came from, the
    first pass has none; `open` counts calls within it that, or whose passes, have not ended.
    """

    __slots__ = ("_missing", "_plan", "_unmade", "open", "origin", "values")

    def __init__(self, plan: Plan, origin: Origin | None = None) -> None:
        self.values: dict[str, Value] = {}
        self.origin = origin
        self.open = 0
        self._plan = plan
        self._missing: dict[Step, int] = {}
        self._unmade = len(plan.outputs)

    @property
    def complete(self) -> bool:
        """Whether every output that was asked for is there."""
        return not self._unmade

    def add(self, found: Iterable[tuple[str, Value]]) -> list[Step]:
        """Take tensors, each once; the steps that are due with them."""
        due = []
        for name, value in found:
            self.values[name] = value
            self._unmade -= name in self._plan.wanted
            for step in self._plan.readers.get(name, ()):
                missing = self._missing.get(step, self._plan.reads[step]) - 1
                self._missing[step] = missing
                if not missing:
                    due.append(step)
        return due


class Call:
    """A step that is running within a pass.

    `tag` is the place in its sequence that the request has, `rows` its batch size. `passes` have
    begun with its responses and not ended; `parked` counts steps in them that wait at a gate.
    """

    __slots__ = (
        "_began_ns",
        "answered",
        "held_back",
        "noted",
        "parked",
        "passes",
        "phases",
        "rows",
        "stage",
        "stream",
        "tag",
        "within",
    )

    def __init__(
        self,
        stage: Stage,
        within: "Pass[Call]",
        request: InferRequest,
        stream: ResponseStream,
    ) -> None:
        self.stage = stage
        self.within = within
        self.stream = stream
        self.rows = stage.requests.rows(request)
        self.tag = request.sequence or NO_SEQUENCE
        self.answered = False
        self.noted = False
        self.held_back = False
        self.passes = 0
        self.parked = 0
        self.phases: Phases | None = None
        self._began_ns = time.perf_counter_ns()

    @property
    def full(self) -> bool:
        """Whether what it has answered must get on before it may answer more."""
        return self.parked > 0 or self.passes >= MAX_PASSES

    def spent(self) -> Phases:
        """The phases of its execution; all of its time if the member does not measure them."""
        return self.phases or Phases(infer_ns=time.perf_counter_ns() - self._began_ns)


class StepGate:
    """Shared by all requests of an ensemble: first come, first in. `limit` 0 admits everybody.

    Everything is plain. Whoever has entered, or has been admitted later, leaves once.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._inside = 0
        self._waiting: dict[Admit, None] = {}

    def enter(self, admit: Admit) -> bool:
        """Whether there is room; otherwise `admit` is called once there is."""
        if self._limit and self._inside >= self._limit:
            self._waiting[admit] = None
            return False
        self._inside += 1
        return True

    def leave(self) -> None:
        """Make room for the one who waits longest."""
        if self._waiting:
            admit = next(iter(self._waiting))
            del self._waiting[admit]
            admit()
        else:
            self._inside -= 1

    def withdraw(self, admit: Admit) -> None:
        """Wait no more; no effect on one that does not wait."""
        self._waiting.pop(admit, None)
