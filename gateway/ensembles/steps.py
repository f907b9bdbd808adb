"""Steps of a loaded ensemble: members, calls, limits and the flow of tensors between them."""

import time
from collections.abc import Callable, Iterable

from gateway.config import ModelConfig
from gateway.ensembles.graph import EnsembleGraph, Member, Members, Step, StepPlan
from gateway.ensembles.tensors import (
    NO_SEQUENCE,
    EnsembleResponses,
    EnsembleTensor,
    StepRequests,
)
from gateway.messages import InferRequest, Phases
from gateway.stream import ResponseStream

MAX_PLANS = 64
"""Plans that are kept, one per choice of outputs; clients rarely make more than two choices."""
MAX_FLOWS = 64
"""Responses of one call in progress at once; beyond that its member is held back."""

Start = Callable[[], None]


class LoadedStep:
    """A step with its member, ready to be called; `limit` is None if its calls are not limited."""

    __slots__ = ("decoupled", "limit", "member", "requests", "step")

    def __init__(self, step: Step, member: Member, limit: int) -> None:
        self.step = step
        self.member = member
        self.decoupled = member.config.decoupled
        self.requests = StepRequests(step, member.config)
        self.limit = StepLimit(limit) if limit else None

    def release(self) -> None:
        """End a call, or a call that could not be made."""
        if self.limit is not None:
            self.limit.release()


class LoadedEnsemble:
    """The steps of one ensemble, shared by all of its requests; `config` is complete."""

    def __init__(self, config: ModelConfig, members: Members) -> None:
        assert config.ensemble_scheduling is not None  # noqa: S101 - it is an ensemble
        self.config = config
        self.responses = EnsembleResponses(config)
        self._graph = EnsembleGraph.of(config.ensemble_scheduling)
        limit = config.ensemble_scheduling.max_inflight_requests
        self._loaded = {
            step: LoadedStep(step, members[step.member], limit) for step in self._graph.steps
        }
        self._outputs = tuple(each.name for each in config.output)
        self._plans: dict[tuple[str, ...], StepPlan] = {}

    def loaded(self, step: Step) -> LoadedStep:
        """The step with its member."""
        return self._loaded[step]

    def plan(self, request: InferRequest) -> StepPlan:
        """The steps for the outputs that a request names; for all outputs if it names none."""
        wanted = [output.name for output in request.outputs]
        names = self._outputs
        if wanted and len(wanted) < len(names):
            names = tuple(name for name in names if name in wanted)
        if (plan := self._plans.get(names)) is None:
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            plan = self._plans[names] = self._graph.plan(names)
        return plan


class DataFlow:
    """The tensors that exist so far, and the steps that they start.

    The inputs of the ensemble begin the first flow. Each response of a decoupled step begins
    another flow: the steps after it need no tensor of another flow (checked at load time).
    `origin` is the call of that response, None for the first flow. `open` counts calls of this
    flow that have not ended, or whose own flows have not.
    """

    __slots__ = ("_missing", "_plan", "_unmade", "open", "origin", "values")

    def __init__(self, plan: StepPlan, origin: "StepCall | None" = None) -> None:
        self.values: dict[str, EnsembleTensor] = {}
        self.origin = origin
        self.open = 0
        self._plan = plan
        self._missing: dict[Step, int] = {}
        self._unmade = len(plan.outputs)

    @property
    def complete(self) -> bool:
        """Whether every requested output exists."""
        return not self._unmade

    def add(self, found: Iterable[tuple[str, EnsembleTensor]]) -> list[Step]:
        """Add tensors, each once; return the steps that have all of their inputs now."""
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


class StepCall:
    """One call of a member, within a flow.

    `tag` is the request's place in its sequence, `rows` its batch size. `flows` counts flows of
    its responses that have not ended, `queued` the steps in these flows that wait for a limit.
    """

    __slots__ = (
        "_began_ns",
        "answered",
        "flow",
        "flows",
        "held_back",
        "loaded",
        "noted",
        "phases",
        "queued",
        "rows",
        "stream",
        "tag",
    )

    def __init__(
        self, loaded: LoadedStep, flow: DataFlow, request: InferRequest, stream: ResponseStream
    ) -> None:
        self.loaded = loaded
        self.flow = flow
        self.stream = stream
        self.rows = loaded.requests.rows(request)
        self.tag = request.sequence or NO_SEQUENCE
        self.answered = False
        self.noted = False
        self.held_back = False
        self.flows = 0
        self.queued = 0
        self.phases: Phases | None = None
        self._began_ns = time.perf_counter_ns()

    @property
    def full(self) -> bool:
        """Whether its responses so far must progress before more are read."""
        return self.queued > 0 or self.flows >= MAX_FLOWS

    def spent(self) -> Phases:
        """The phases of its execution; all of its time if the member does not measure them."""
        return self.phases or Phases(infer_ns=time.perf_counter_ns() - self._began_ns)


class StepLimit:
    """`max_inflight_requests` of one step, for all requests of an ensemble together: a FIFO queue.

    Every call that has acquired the limit, at once or later, releases it once. All methods are
    synchronous.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._calls = 0
        self._queue: dict[Start, None] = {}

    def acquire(self, start: Start) -> bool:
        """Whether the call may start now; otherwise `start` is called later, in order."""
        if self._limit and self._calls >= self._limit:
            self._queue[start] = None
            return False
        self._calls += 1
        return True

    def release(self) -> None:
        """End a call; the first call in the queue starts."""
        if self._queue:
            start = next(iter(self._queue))
            del self._queue[start]
            start()
        else:
            self._calls -= 1

    def cancel(self, start: Start) -> None:
        """Remove a call from the queue; no effect if it is not queued."""
        self._queue.pop(start, None)
