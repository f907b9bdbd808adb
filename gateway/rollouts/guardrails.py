"""Guardrails: predicates on requests, and the member `guardrails` of rollout.json."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from gateway.durations import read_seconds
from gateway.errors import Code, InferenceError
from gateway.rollouts.observation import Observation

NS_PER_MS = 1_000_000
LEAST_TOKENS = 8
"""Tokens of a request whose gaps are judged."""
DEFAULT_FACTOR = 1.2
DEFAULT_MIN_RATIO = 1.2
DEFAULT_EVERY_SECS = 300.0
GOLDEN = "golden"
FINISH = "finish:"
DIFFERS = "differs"

Happened = Callable[[Observation, float, int], bool]
"""Whether the event has happened in a request by a time, with this limit; false if that is NaN."""
Measure = Callable[[Observation, int], float]
"""The value of a request at a time."""


def _at_its_end(request: Observation, limit: float, now: int) -> bool:
    return bool(request.ended_ns)


class Kind(NamedTuple):
    """The predicate of a guardrail.

    `measure` is the value whose quantile is its limit. One `of_time` is not judged on copies.
    `decided`: whether the request is, while it runs; by default it is at its end.
    """

    happened: Happened
    measure: Measure | None = None
    quantile: float = 0.0
    of_time: bool = False
    decided: Happened = _at_its_end


@dataclass(frozen=True, slots=True)
class Guardrail:
    """One member of `guardrails`.

    `factor` is that of stable's quantile, `limit` a limit instead of it (nanoseconds). With `most`
    the rate of events is compared with this rate instead of stable's. A breach needs the observed
    ratio `min_ratio`.
    """

    name: str
    kind: Kind
    factor: float = 1.0
    limit: float | None = None
    most: float | None = None
    min_ratio: float = DEFAULT_MIN_RATIO


@dataclass(frozen=True, slots=True)
class Guardrails:
    """The guardrails of a rollout.

    `golden_secs` are between golden requests, None without them. `proofs`: by the name of a
    guardrail the ratio of the rates that is to be refuted before a step is passed.
    """

    tested: tuple[Guardrail, ...] = ()
    golden_secs: float | None = None
    proofs: Mapping[str, float] = field(default_factory=dict)


def _failed(request: Observation, limit: float, now: int) -> bool:
    return request.failed


def _first_response(request: Observation, now: int) -> float:
    return (request.first_ns or now) - request.received_ns


def _first_response_is_late(request: Observation, limit: float, now: int) -> bool:
    return (request.first_ns or now) - request.received_ns > limit


def _duration(request: Observation, now: int) -> float:
    return now - request.received_ns


def _first_is_decided(request: Observation, limit: float, now: int) -> bool:
    return bool(request.first_ns) or now - request.received_ns > limit


def _end_is_late(request: Observation, limit: float, now: int) -> bool:
    return now - request.received_ns > limit


def _gap(request: Observation, now: int) -> float:
    """The mean time between tokens; NaN if there are few."""
    if request.tokens < LEAST_TOKENS:
        return math.nan
    return (request.last_ns - request.first_ns) / (request.tokens - 1)


def _tokens_are_late(request: Observation, limit: float, now: int) -> bool:
    return bool(request.ended_ns) and _gap(request, now) > limit


def _length(request: Observation, now: int) -> float:
    return request.tokens


def _is_long(request: Observation, limit: float, now: int) -> bool:
    return request.tokens > limit


def _is_short(request: Observation, limit: float, now: int) -> bool:
    return request.complete and request.tokens < limit


def _is_empty(request: Observation, limit: float, now: int) -> bool:
    return request.complete and not request.has_content


def _has_nan(request: Observation, limit: float, now: int) -> bool:
    return request.has_nan


def _differs(request: Observation, limit: float, now: int) -> bool:
    return request.differs


def finished_by(reason: str) -> Kind:
    """The kind of `finish:REASON`."""
    return Kind(lambda request, limit, now: request.finish_reason == reason)


EMPTY, NAN = "empty", "nan"
KINDS: Mapping[str, Kind] = {
    "errors": Kind(_failed),
    "slow_first_response": Kind(
        *(_first_response_is_late, _first_response, 0.95),
        of_time=True,
        decided=_first_is_decided,
    ),
    "slow": Kind(_end_is_late, _duration, 0.95, of_time=True, decided=_end_is_late),
    "slow_tokens": Kind(_tokens_are_late, _gap, 0.95, of_time=True),
    "long_output": Kind(_is_long, _length, 0.95),
    "short_output": Kind(_is_short, _length, 0.05),
    EMPTY: Kind(_is_empty),
    NAN: Kind(_has_nan),
    DIFFERS: Kind(_differs),
}


def read_duration(value: object, where: str) -> float:
    """Seconds of a duration such as "30s", "10m" or "1h"; INVALID_ARG names the place."""
    found = read_seconds(value) if isinstance(value, str) else None
    if found is None:
        raise refused(where, value, 'a duration such as "30s", "10m" or "1h"')
    return found


def refused(where: str, found: object, expected: str) -> InferenceError:
    """The error of a member of rollout.json."""
    return InferenceError(Code.INVALID_ARG, f"{where} is {found!r}, expected {expected}")


def read_guardrails(given: object, where: str) -> Guardrails:
    """The member `guardrails`; `where` is its path for errors. InferenceError INVALID_ARG."""
    if not isinstance(given, Mapping):
        raise refused(where, given, "an object of guardrails by name")
    tested = [
        _read_tested(name, members, f"{where}.{name}")
        for name, members in given.items()
        if name != GOLDEN
    ]
    golden_secs = None
    if GOLDEN in given:
        members = _members(given[GOLDEN], f"{where}.{GOLDEN}", {"every"})
        every = members.get("every")
        at = f"{where}.{GOLDEN}.every"
        golden_secs = DEFAULT_EVERY_SECS if every is None else read_duration(every, at)
        if not golden_secs:
            raise refused(at, every, "a duration of more than 0")
    return Guardrails(tuple(tested), golden_secs)


def read_proofs(given: object, where: str, guardrails: Guardrails) -> Guardrails:
    """The guardrails with the member `prove`, such as {"errors": 2.0}. InferenceError INVALID_ARG.

    A guardrail with `max` has no rate of stable to compare with.
    """
    compared = {each.name for each in guardrails.tested if each.most is None}
    members = _members(given, where, compared)
    proofs = {
        name: _number(ratio, f"{where}.{name}", *PROOF_BOUNDS) for name, ratio in members.items()
    }
    return replace(guardrails, proofs=proofs)


def _read_tested(name: str, given: object, where: str) -> Guardrail:
    kind = KINDS.get(name)
    if kind is None and name.startswith(FINISH) and name != FINISH:
        kind = finished_by(name.removeprefix(FINISH))
    if kind is None:
        known = ", ".join((*KINDS, f"{FINISH}REASON", GOLDEN))
        raise InferenceError(Code.INVALID_ARG, f"{where} is no guardrail; expected one of {known}")
    times = {"factor", "ms"} if kind.of_time else set[str]()
    members = _members(given, where, {"max", "min_ratio", *times})
    numbers = {
        member: _number(value, f"{where}.{member}", *BOUNDS[member])
        for member, value in members.items()
    }
    if name == DIFFERS and "max" not in numbers:
        raise InferenceError(
            Code.INVALID_ARG,
            f"{where} lacks 'max', the share of copies that may differ: stable has no rate of it",
        )
    if "factor" in numbers and "ms" in numbers:
        raise InferenceError(Code.INVALID_ARG, f"{where} has 'factor' and 'ms'; expected one")
    return Guardrail(
        name,
        kind,
        factor=numbers.get("factor", DEFAULT_FACTOR if times else 1.0),
        limit=numbers["ms"] * NS_PER_MS if "ms" in numbers else None,
        most=numbers.get("max"),
        min_ratio=numbers.get("min_ratio", DEFAULT_MIN_RATIO),
    )


BOUNDS: Mapping[str, tuple[float, float]] = {
    "factor": (1.0, 1000.0),
    "ms": (0.001, 86_400_000.0),
    "max": (0.000001, 0.99),
    "min_ratio": (1.0, 1000.0),
}
"""The least and the largest value of each member that is a number."""
PROOF_BOUNDS = (1.1, 1000.0)


def _members(given: object, where: str, known: set[str]) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise refused(where, given, "an object")
    expected = f"one of {', '.join(sorted(known))}" if known else "none without guardrails"
    for member in given:
        if member not in known:
            raise InferenceError(
                Code.INVALID_ARG,
                f"{where}.{member} is no member; expected {expected}",
            )
    return given


def _number(value: object, where: str, least: float, most: float) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not least <= float(value) <= most:  # type: ignore[arg-type]
        raise refused(where, value, f"a number from {least:g} to {most:g}")
    return float(value)  # type: ignore[arg-type]
