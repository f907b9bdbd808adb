"""Guardrails: the members of rollout.json, and the requests in which each event happens."""

import math
from typing import Any

import pytest

from gateway.errors import Code, InferenceError
from gateway.rollouts.evidence import Evidence
from gateway.rollouts.guardrails import Guardrails, read_guardrails, read_proofs
from gateway.rollouts.observation import Arm, Observation

MS = 1_000_000


def observation(**fields: Any) -> Observation:
    """A request that took 10 ms, first response after 5 ms, with these fields."""
    made = Observation(Evidence(Guardrails()), Arm.CANDIDATE)
    made.received_ns = 1000 * MS
    made.first_ns = made.received_ns + 5 * MS
    made.last_ns = made.ended_ns = made.received_ns + 10 * MS
    made.complete = made.has_content = True
    for name, value in fields.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize(
    ("name", "limit", "fields", "other"),
    [
        ("errors", 0, {"failed": True}, {}),
        ("slow_first_response", 4 * MS, {}, {"first_ns": 1003 * MS}),
        ("slow_first_response", 4 * MS, {"first_ns": 0}, {"first_ns": 1002 * MS}),
        ("slow", 9 * MS, {}, {"ended_ns": 1008 * MS}),
        ("slow_tokens", 0.5 * MS, {"tokens": 8}, {"tokens": 20}),
        ("slow_tokens", 0.5 * MS, {"tokens": 8}, {"tokens": 7}),
        ("slow_tokens", 0.5 * MS, {"tokens": 8}, {"tokens": 8, "ended_ns": 0}),
        ("finish:length", 0, {"finish_reason": "length"}, {"finish_reason": "stop"}),
        ("long_output", 9, {"tokens": 10}, {"tokens": 9}),
        ("short_output", 9, {"tokens": 8}, {"tokens": 8, "complete": False}),
        ("empty", 0, {"has_content": False}, {"has_content": False, "complete": False}),
        ("nan", 0, {"has_nan": True}, {}),
        ("differs", 0, {"differs": True}, {}),
    ],
)
def test_a_guardrail_counts_its_event(
    name: str, limit: float, fields: dict[str, Any], other: dict[str, Any]
) -> None:
    members = {"max": 0.1} if name == "differs" else {}
    kind = read_guardrails({name: members}, "guardrails").tested[0].kind
    happened = [
        kind.happened(made, limit, made.ended_ns or 1010 * MS)
        for made in (observation(**fields), observation(**other))
    ]
    assert happened == [True, False]


@pytest.mark.parametrize(
    "name", ["slow", "slow_first_response", "slow_tokens", "long_output", "short_output"]
)
def test_without_a_limit_nothing_is_an_event(name: str) -> None:
    kind = read_guardrails({name: {}}, "guardrails").tested[0].kind
    made = observation(tokens=100)
    assert not kind.happened(made, math.nan, made.ended_ns)


def test_the_members_of_a_guardrail_are_read() -> None:
    read = read_guardrails(
        {"slow": {"ms": 250, "min_ratio": 2, "max": 0.05}, "golden": {"every": "90s"}}, "guardrails"
    )
    (slow,) = read.tested
    assert (slow.limit, slow.min_ratio, slow.most) == (250 * MS, 2, 0.05)
    assert read.golden_secs == 90
    defaults = read_guardrails({"slow": {}, "errors": {}, "golden": {}}, "guardrails")
    assert [each.factor for each in defaults.tested] == [1.2, 1.0]
    assert defaults.golden_secs == 300
    assert read_proofs({"errors": 2}, "prove", defaults).proofs == {"errors": 2.0}


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ([], "guardrails is []"),
        ({"error": {}}, "guardrails.error is no guardrail; expected one of errors, "),
        ({"finish:": {}}, "guardrails.finish: is no guardrail"),
        ({"errors": 3}, "guardrails.errors is 3"),
        ({"errors": {"factor": 2}}, "guardrails.errors.factor is no member"),
        ({"slow": {"ms": "1"}}, "guardrails.slow.ms is '1'"),
        ({"slow": {"ms": True}}, "guardrails.slow.ms is True"),
        ({"slow": {"ms": float("nan")}}, "guardrails.slow.ms is nan"),
        ({"slow": {"ms": 1, "factor": 2}}, "guardrails.slow has 'factor' and 'ms'"),
        ({"errors": {"max": 0}}, "guardrails.errors.max is 0"),
        ({"errors": {"min_ratio": 0.5}}, "guardrails.errors.min_ratio is 0.5"),
        ({"differs": {}}, "guardrails.differs lacks 'max'"),
        ({"golden": {"every": "soon"}}, "guardrails.golden.every is 'soon'"),
        ({"golden": {"every": "0s"}}, "guardrails.golden.every is '0s'"),
        ({"golden": {"max": 1}}, "guardrails.golden.max is no member"),
    ],
    ids=str,
)
def test_a_wrong_member_is_refused_by_its_path(given: Any, text: str) -> None:
    with pytest.raises(InferenceError) as refused:
        read_guardrails(given, "guardrails")
    assert refused.value.code is Code.INVALID_ARG
    assert refused.value.message.startswith(text)


def test_only_what_is_compared_with_stable_can_be_proven() -> None:
    read = read_guardrails({"errors": {}, "nan": {"max": 0.1}}, "guardrails")
    for given, text in (({"nan": 2}, "prove.nan is no member"), ({"errors": 1}, "prove.errors is")):
        with pytest.raises(InferenceError) as refused:
            read_proofs(given, "prove", read)
        assert refused.value.message.startswith(text)
