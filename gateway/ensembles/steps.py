"""A loaded ensemble: its steps with the members they call, shared by all its requests."""

from gateway.config import ModelConfig
from gateway.ensembles.gate import StepGate
from gateway.ensembles.graph import Graph, Plan, Step
from gateway.ensembles.member import Member, Members
from gateway.ensembles.tensors import Answers, StepRequests
from gateway.messages import InferRequest

MAX_PLANS = 64
"""Choices of outputs that are kept; clients rarely make more than two."""


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
