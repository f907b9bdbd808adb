"""Rollouts of three steps without a server, and their places."""

from typing import Any

from gateway.rollouts.plan import PlanStep, RolloutPlan
from gateway.rollouts.rollout import Rollout, RolloutState

WAITING, STEP, BAKING = RolloutState.WAITING, RolloutState.STEP, RolloutState.BAKING
PAUSED, PROMOTED = RolloutState.PAUSED, RolloutState.PROMOTED
ROLLED_BACK, ABORTED = RolloutState.ROLLED_BACK, RolloutState.ABORTED
STEPS = (
    PlanStep(weight=10, lasts="10m", min_requests=3),
    PlanStep(weight=50, lasts="10m", min_requests=3),
    PlanStep(weight=100, lasts="30m", min_requests=0),
)


def rollout(*steps: PlanStep, begun: bool = True, **members: Any) -> Rollout:
    plan = RolloutPlan(steps=steps or STEPS, **members)
    found = Rollout(stable=3, candidate=4, plan=plan)
    if begun:
        found.begin()
    return found


def pass_time(found: Rollout, secs: float, requests: int = 0, *, suspicious: bool = False) -> None:
    """Pass time in which the candidate ends that many requests."""
    found.advance(secs, found.seen + requests, suspicious=suspicious)


def place(found: Rollout) -> tuple[str, int, float]:
    return found.state, found.step, found.weight


def last(found: Rollout) -> tuple[str, str]:
    return found.transitions[-1].by, found.transitions[-1].reason


def dies(found: Rollout) -> None:
    found.dead_on_arrival("its first 5 requests failed")


def breaches(found: Rollout) -> None:
    found.breach("errors", "bad")
