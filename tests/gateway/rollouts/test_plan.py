"""The plan in `rollout.json`: defaults, strict reading, and the members of a start request."""

import json
from typing import Any

import pytest

from gateway.errors import Code, InferenceError
from gateway.rollouts.plan import (
    KeyPlace,
    PlanStart,
    Reaction,
    changed_plan,
    read_plan,
    read_step,
)

TWICE = b'{"alpha": 0.01, "alpha": 0.4}'


def read(**members: Any) -> Any:
    return read_plan(json.dumps(members).encode())


def test_an_empty_plan_has_the_defaults_of_the_table() -> None:
    plan = read()
    steps = [(step.share, step.secs, step.least_requests) for step in plan.steps]
    assert steps == [(10, 600, 100), (50, 600, 100), (100, 1800, 100)]
    assert (plan.start, plan.alpha, plan.key) == (PlanStart.AUTOMATIC, 0.01, ())
    assert (plan.on_breach, plan.on_silence) == (Reaction.ROLL_BACK, Reaction.PAUSE)
    assert plan.max_wait_secs == 24 * 3600


def test_the_example_of_the_page_is_read() -> None:
    steps = [
        {"shadow": 10, "for": "10m"},
        {"weight": 10, "for": "10m", "min_requests": 200},
        {"weight": 99.5, "for": "30m", "pause": True},
        {"weight": 100, "for": "1h"},
    ]
    plan = read(steps=steps, key=["parameter:user_id", "header:x-user"], start="manual")
    assert [(step.share, step.shadow) for step in plan.steps][:2] == [(0, 10), (10, None)]
    assert plan.steps[1].least_requests == 200
    assert plan.key_sources == [KeyPlace("parameter", "user_id"), KeyPlace("header", "x-user")]


def test_a_single_step_that_pauses_is_an_ab_test() -> None:
    assert read(steps=[{"weight": 50, "pause": True}]).steps[0].share == 50


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ({"wieght": 1}, "Object contains unknown field `wieght`, expected one of steps, start"),
        (
            {"steps": [{"wieght": 1}]},
            "unknown field `wieght` - at `$.steps[0]`, expected one of weight, ",
        ),
        ({"steps": []}, "steps is 0, expected 1 to 100 steps"),
        ({"steps": [{"weight": 50}]}, "steps[0].weight is 50.0, expected 100 in the last step"),
        ({"steps": [{"weight": 50}, {"weight": 20}]}, "steps[1].weight is 20.0, expected 50 or"),
        ({"steps": [{"weight": 50}, {"shadow": 9}]}, "steps[1].weight is 0.0, expected 50 or"),
        ({"steps": [{"weight": 101}]}, "steps[0].weight is 101.0, expected 0 to 100"),
        ({"steps": [{"weight": 5, "shadow": 5}]}, "expected either 'weight' or 'shadow'"),
        ({"steps": [{"weight": 100, "for": "10"}]}, "steps[0].for is '10', expected a duration"),
        (
            {"steps": [{"weight": 100, "for": 10}]},
            "Expected `str`, got `int` - at `$.steps[0].for`",
        ),
        ({"steps": [{"weight": 100, "min_requests": -1}]}, "min_requests is -1, expected 0 to"),
        ({"steps": [{"weight": 0, "min_requests": 1}]}, "expected 0: weight 0 gets no requests"),
        ({"alpha": 2}, "alpha is 2.0, expected 1e-09 to 0.5"),
        ({"max_wait": "soon"}, "max_wait is 'soon'"),
        ({"start": "now"}, "Invalid enum value 'now' - at `$.start`, expected automatic or manual"),
        ({"on_silence": "x"}, "value 'x' - at `$.on_silence`, expected roll_back or pause"),
        ({"key": ["cookie:a"]}, "key[0] is 'cookie:a', expected 'header:NAME'"),
        ({"key": ["openai:model"]}, "key[0] is 'openai:model', expected one of openai:user"),
        ({"labels": {"3": 3}}, "labels: found label '3', expected 1 to 32 of a-z"),
        ({"labels": {"stable": 3}}, "labels: label 'stable' is set by rollouts only"),
        ({"labels": {"champion": -3}}, "labels.champion is -3, expected a version number"),
        ({"labels": {"champion": 2**63}}, "labels.champion is 9223372036854775808, expected a ve"),
        ({"shadow_in_flight": 0}, "shadow_in_flight is 0, expected 1 to 1000"),
        ({"guardrails": {"errors": {"mx": 1}}}, "guardrails.errors.mx is no member"),
        ({"guardrails": {"errors": {}}, "prove": {"errors": "2"}}, "prove.errors is '2'"),
        ({"prove": {"nan": 2}}, "prove.nan is no member; expected none without guardrails"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_member_is_refused_with_its_path(members: dict[str, Any], reason: str) -> None:
    with pytest.raises(InferenceError) as caught:
        read(**members)
    assert caught.value.code is Code.INVALID_ARG
    assert caught.value.message.startswith("rollout.json: ")
    assert reason in caught.value.message


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"{", b"\xff", b'{"alpha": NaN}', TWICE], ids=range(6)
)
def test_a_file_that_is_no_object_of_json_is_refused(text: bytes) -> None:
    with pytest.raises(InferenceError, match=r"^rollout\.json: "):
        read_plan(text)


def test_a_start_request_replaces_members_of_the_plan() -> None:
    plan = read(alpha=0.05, max_wait="2h")
    steps = [read_step("10%:10m"), read_step("100%")]
    changed = changed_plan(plan, {"steps": steps}, "request")
    assert [(step.share, step.secs) for step in changed.steps] == [(10, 600), (100, 0)]
    assert (changed.alpha, changed.max_wait_secs) == (0.05, 7200)


@pytest.mark.parametrize("text", ["ten", "10%:soon"])
def test_a_step_of_the_command_line_is_checked(text: str) -> None:
    with pytest.raises(InferenceError, match=text.removeprefix("10%:")):
        changed_plan(read(), {"steps": [read_step(text), read_step("100%")]}, "request")
