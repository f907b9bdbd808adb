"""Plans of rollouts: the file `rollout.json` of a model, and the members of a start request."""

import re
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

import msgspec
from msgspec import field

from gateway.errors import Code, InferenceError
from gateway.models.labels import MOST_LABELS, check_label
from gateway.models.model_folder import HIGHEST, PLAN_FILE
from gateway.rollouts.guardrails import (
    Guardrails,
    read_duration,
    read_guardrails,
    read_proofs,
    refused,
)
from gateway.strict_json import parse

ALL = 100.0
"""The weight of a version that gets every request (percent)."""
KEY = re.compile(r"(header|parameter|openai):(.+)")
OPENAI_KEYS = ("user", "safety_identifier", "prompt_cache_key")
MOST_STEPS = 100
MIN_REQUESTS = 100
"""Requests of the candidate in a step, by default."""


class PlanStart(StrEnum):
    """The beginning of rollouts: at each new highest version, or on request only."""

    AUTOMATIC = "automatic"
    MANUAL = "manual"


class Reaction(StrEnum):
    """The end of a rollout that cannot continue."""

    ROLL_BACK = "roll_back"
    PAUSE = "pause"


class KeyPlace(NamedTuple):
    """A part of a request that may be its key: `kind` is header, parameter or openai."""

    kind: str
    name: str


class PlanStep(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """One step as it is written: `weight` or `shadow` in percent, and its conditions."""

    weight: float | None = None
    shadow: float | None = None
    lasts: str = field(default="0s", name="for")
    min_requests: int | None = None
    pause: bool = False

    @property
    def secs(self) -> float:
        """The shortest duration."""
        return read_duration(self.lasts, "for")

    @property
    def share(self) -> float:
        """The percentage of requests that the candidate answers."""
        return self.weight or 0.0

    @property
    def least_requests(self) -> int:
        """The requests of the candidate that the step needs; none at weight 0."""
        if self.min_requests is not None:
            return self.min_requests
        return MIN_REQUESTS if self.share or self.shadow else 0


DEFAULT_STEPS = (
    PlanStep(weight=10.0, lasts="10m"),
    PlanStep(weight=50.0, lasts="10m"),
    PlanStep(weight=ALL, lasts="30m"),
)


BAD_CHOICE = re.compile(r"Invalid enum value .* at `\$\.(\w+)`")
CHOICES = {"start": PlanStart, "on_breach": Reaction, "on_silence": Reaction}
"""The values of members that have a few."""


class RolloutPlan(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The members of `rollout.json`; `labels` are names of versions, set at each load.

    With `interrupt` a roll-back ends the open streams and sequences of the candidate.
    """

    steps: tuple[PlanStep, ...] = DEFAULT_STEPS
    start: PlanStart = PlanStart.AUTOMATIC
    key: tuple[str, ...] = ()
    guardrails: dict[str, Any] = field(default_factory=dict)
    prove: dict[str, Any] = field(default_factory=dict)
    alpha: float = 0.01
    on_breach: Reaction = Reaction.ROLL_BACK
    on_silence: Reaction = Reaction.PAUSE
    max_wait: str = "24h"
    labels: dict[str, int] = field(default_factory=dict)
    shadow_in_flight: int = 8
    shadow_side_effects: bool = False
    interrupt: bool = False

    @property
    def max_wait_secs(self) -> float:
        """The longest duration of a step without enough requests."""
        return read_duration(self.max_wait, "max_wait")

    def read_guardrails(self, where: str = PLAN_FILE) -> Guardrails:
        """The members `guardrails` and `prove`; InferenceError INVALID_ARG."""
        found = read_guardrails(self.guardrails, f"{where}: guardrails")
        return read_proofs(self.prove, f"{where}: prove", found)

    @property
    def key_sources(self) -> Sequence[KeyPlace]:
        """The parts of a request that may be its key, in order."""
        return read_keys(self.key)


def read_keys(keys: Iterable[str]) -> Sequence[KeyPlace]:
    """The places of keys such as `header:x-user`."""
    return [KeyPlace(*found.groups()) for each in keys if (found := KEY.fullmatch(each))]


def read_plan(text: str, where: str = PLAN_FILE) -> RolloutPlan:
    """The plan in a file; InferenceError INVALID_ARG names the member that is wrong."""
    try:
        members = parse(text)
    except InferenceError as error:
        raise _invalid(where, error.message) from None
    return _read(members, where)


def changed_plan(plan: RolloutPlan, members: Mapping[str, Any], where: str) -> RolloutPlan:
    """The plan with members of a start request in place of its own; raises as `read_plan`."""
    return _read({**msgspec.to_builtins(plan), **members}, where)


def read_step(text: str) -> Mapping[str, Any]:
    """The members of a step such as `10%:10m`; a step without a duration is `10%`."""
    weight, _, lasts = text.partition(":")
    try:
        share = float(weight.removesuffix("%"))
    except ValueError:
        raise refused("step", text, "a step such as '10%:10m'") from None
    return {"weight": share, "for": lasts or "0s"}


def members_of(kind: type[msgspec.Struct]) -> Sequence[str]:
    """The names of the members of an object, as they are written."""
    return [each.encode_name for each in msgspec.structs.fields(kind)]


def explained(error: msgspec.ValidationError, members: Iterable[str]) -> str:
    """The text of an error, with what is expected of a member; `members` are those of the whole."""
    text = str(error)
    if "unknown field" in text:
        expected = members_of(PlanStep) if "$.steps[" in text else members
        return f"{text}, expected one of {', '.join(expected)}"
    choice = BAD_CHOICE.search(text)
    return text if choice is None else f"{text}, expected {' or '.join(CHOICES[choice[1]])}"


def _read(members: Any, where: str) -> RolloutPlan:
    try:
        plan = msgspec.convert(members, RolloutPlan)
    except msgspec.ValidationError as error:
        raise _invalid(where, explained(error, members_of(RolloutPlan))) from None
    _check_steps(plan.steps, f"{where}: steps")
    read_duration(plan.max_wait, f"{where}: max_wait")
    for number, key in enumerate(plan.key):
        _check_key(key, f"{where}: key[{number}]")
    plan.read_guardrails(where)
    _check_range(plan.alpha, f"{where}: alpha", 1e-9, 0.5)
    _check_range(plan.shadow_in_flight, f"{where}: shadow_in_flight", 1, 1000)
    _check_labels(plan.labels, f"{where}: labels")
    return plan


def _check_steps(steps: Sequence[PlanStep], at: str) -> None:
    if not 0 < len(steps) <= MOST_STEPS:
        raise refused(at, len(steps), f"1 to {MOST_STEPS} steps")
    share = 0.0
    for number, step in enumerate(steps):
        _check_step(step, f"{at}[{number}]")
        if step.share < share:
            raise refused(f"{at}[{number}].weight", step.share, f"{share:g} or more: none falls")
        share = step.share
    if share < ALL and not steps[-1].pause:
        last = f"{at}[{len(steps) - 1}].weight"
        raise refused(last, share, '100 in the last step, or "pause": true')


def _check_step(step: PlanStep, at: str) -> None:
    if (step.weight is None) == (step.shadow is None):
        raise refused(at, msgspec.to_builtins(step), "either 'weight' or 'shadow'")
    name, share = ("shadow", step.shadow) if step.weight is None else ("weight", step.weight)
    _check_range(share or 0.0, f"{at}.{name}", 0, ALL)
    read_duration(step.lasts, f"{at}.for")
    _check_range(step.least_requests, f"{at}.min_requests", 0, 10**9)
    if step.min_requests and not (step.share or step.shadow):
        raise refused(f"{at}.min_requests", step.min_requests, "0: weight 0 gets no requests")


def _check_range(found: float, at: str, least: float, most: float) -> None:
    if not least <= found <= most:
        raise refused(at, found, f"{least:g} to {most:g}")


def _check_key(key: str, at: str) -> None:
    found = KEY.fullmatch(key)
    if found is None:
        raise refused(at, key, "'header:NAME', 'parameter:NAME' or 'openai:NAME'")
    if found[1] == "openai" and found[2] not in OPENAI_KEYS:
        raise refused(at, key, f"one of openai:{', openai:'.join(OPENAI_KEYS)}")


def _check_labels(labels: Mapping[str, int], at: str) -> None:
    if len(labels) > MOST_LABELS:
        raise refused(at, len(labels), f"at most {MOST_LABELS}")
    for label, version in labels.items():
        check_label(label, at)
        if not 0 <= version <= HIGHEST:
            raise refused(f"{at}.{label}", version, "a version number")


def _invalid(where: str, reason: str) -> InferenceError:
    return InferenceError(Code.INVALID_ARG, f"{where}: {reason}")
