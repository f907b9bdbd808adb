"""Changes of rollouts that persons ask for, with the members that each request has."""

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, TypeVar

import msgspec

from gateway.errors import Code, InferenceError
from gateway.rollouts.plan import RolloutPlan
from gateway.rollouts.rollouts import Rollouts

PLAN_MEMBERS = frozenset(RolloutPlan.__struct_fields__) - {"start", "labels"}
"""The members of `rollout.json` that a request may replace for its rollout."""


class RolloutAction(StrEnum):
    """The changes."""

    START = "start"
    PAUSE = "pause"
    RESUME = "resume"
    PROMOTE = "promote"
    ABORT = "abort"
    WEIGHT = "weight"


class RolloutChange(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The members of every change."""

    reason: str = ""


class RolloutBeginning(RolloutChange, frozen=True, kw_only=True):
    """The members of `start`, those of the plan left out."""

    version: int
    again: bool = False


class RolloutWeight(RolloutChange, frozen=True, kw_only=True):
    """The members of `weight`."""

    weight: float


SIMPLE: Mapping[RolloutAction, Callable[[Rollouts, str, str, str], None]] = {
    RolloutAction.PAUSE: Rollouts.pause,
    RolloutAction.RESUME: Rollouts.resume,
    RolloutAction.PROMOTE: Rollouts.promote,
    RolloutAction.ABORT: Rollouts.abort,
}
"""The changes without members of their own."""

T = TypeVar("T", bound=RolloutChange)


async def change_rollout(
    rollouts: Rollouts, name: str, action: RolloutAction, members: Mapping[str, Any], by: str
) -> dict[str, Any]:
    """Change the rollout of a model; returns its new state. InferenceError as `Rollouts`."""
    if action is RolloutAction.START:
        plan = {key: value for key, value in members.items() if key in PLAN_MEMBERS}
        rest = {key: value for key, value in members.items() if key not in PLAN_MEMBERS}
        begun = _read(rest, RolloutBeginning)
        await rollouts.start(
            *(name, begun.version, by), members=plan, reason=begun.reason, again=begun.again
        )
    elif action is RolloutAction.WEIGHT:
        wanted = _read(members, RolloutWeight)
        rollouts.set_weight(name, wanted.weight, by, wanted.reason)
    else:
        SIMPLE[action](rollouts, name, by, _read(members, RolloutChange).reason)
    return rollouts.describe(name)


def _read(members: Mapping[str, Any], kind: type[T]) -> T:
    try:
        return msgspec.convert(members, kind)
    except msgspec.ValidationError as error:
        raise InferenceError(Code.INVALID_ARG, f"request: {error}") from None
