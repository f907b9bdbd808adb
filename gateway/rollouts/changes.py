"""Changes of rollouts that persons ask for, with the members that each request has."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, NamedTuple, TypeVar

import msgspec

from gateway.errors import Code, InferenceError
from gateway.rollouts.plan import RolloutPlan, explained, members_of
from gateway.rollouts.rollout import Rollout

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


class ReadBeginning(NamedTuple):
    """A request to start a rollout, and its members of the plan."""

    beginning: RolloutBeginning
    plan: Mapping[str, Any]


T = TypeVar("T", bound=RolloutChange)


class ChangeableRollouts(ABC):
    """The changes of open rollouts by the names of their models; each raises InferenceError."""

    def pause(self, name: str, by: str, reason: str = "") -> None:
        """Keep the present weight until `resume`."""
        self._change(name, lambda rollout: rollout.pause(by, reason))

    def resume(self, name: str, by: str, reason: str = "") -> None:
        """Continue a paused rollout."""
        self._change(name, lambda rollout: rollout.resume(by, reason))

    def promote(self, name: str, by: str, reason: str = "") -> None:
        """Make the candidate stable now."""
        self._change(name, lambda rollout: rollout.promote(by, reason))

    def abort(self, name: str, by: str, reason: str = "") -> None:
        """Return every request to stable now."""
        self._change(name, lambda rollout: rollout.abort(by, reason))

    def set_weight(self, name: str, weight: float, by: str, reason: str = "") -> None:
        """Set the candidate's percentage of requests, and pause."""
        self._change(name, lambda rollout: rollout.set_weight(weight, by, reason))

    def change(self, name: str, action: RolloutAction, members: Mapping[str, Any], by: str) -> None:
        """Carry out any change but a start."""
        if action is RolloutAction.WEIGHT:
            wanted = _read(members, RolloutWeight)
            self.set_weight(name, wanted.weight, by, wanted.reason)
        else:
            SIMPLE[action](self, name, by, _read(members, RolloutChange).reason)

    @abstractmethod
    def _change(self, name: str, change: Callable[[Rollout], None]) -> None:
        """Change the rollout of a model."""


SIMPLE: Mapping[RolloutAction, Callable[[ChangeableRollouts, str, str, str], None]] = {
    RolloutAction.PAUSE: ChangeableRollouts.pause,
    RolloutAction.RESUME: ChangeableRollouts.resume,
    RolloutAction.PROMOTE: ChangeableRollouts.promote,
    RolloutAction.ABORT: ChangeableRollouts.abort,
}
"""The changes without members of their own."""


def read_beginning(members: Mapping[str, Any]) -> ReadBeginning:
    """The members of `start`; INVALID_ARG for a wrong one."""
    plan = {key: value for key, value in members.items() if key in PLAN_MEMBERS}
    rest = {key: value for key, value in members.items() if key not in PLAN_MEMBERS}
    return ReadBeginning(_read(rest, RolloutBeginning), plan)


def _read(members: Mapping[str, Any], kind: type[T]) -> T:
    try:
        return msgspec.convert(members, kind)
    except msgspec.ValidationError as error:
        more = sorted(PLAN_MEMBERS) if kind is RolloutBeginning else ()
        text = explained(error, [*members_of(kind), *more])
        raise InferenceError(Code.INVALID_ARG, f"request: {text}") from None
