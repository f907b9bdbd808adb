"""Requests that end workers are refused; other requests of their batches are served."""

from dataclasses import replace

import pytest

from backends.python.quarantine import Quarantine
from gateway import suspects as module
from gateway.errors import Code
from gateway.suspects import KEPT_SECS
from tests.builders import text_request

CODE = b"code"


class Clock:
    """Seconds that a test lets pass."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def groups(quarantine: Quarantine, *texts: str) -> list[list[int]]:
    plan = quarantine.plan(CODE, [text_request(text) for text in texts])
    return [list(each) for each in plan.groups]


def refused(quarantine: Quarantine, *texts: str) -> list[int]:
    plan = quarantine.plan(CODE, [text_request(text) for text in texts])
    return [index for index, _ in plan.refused]


def test_without_suspects_all_requests_execute_together() -> None:
    assert groups(Quarantine(), "a", "b") == [[0, 1]]


def test_a_suspect_executes_alone() -> None:
    quarantine = Quarantine()
    quarantine.died(CODE, [text_request("a"), text_request("b")])
    assert groups(quarantine, "a", "c", "b", "d") == [[1, 3], [0], [2]]


def test_the_second_end_proves_the_guilty_request() -> None:
    quarantine = Quarantine()
    quarantine.died(CODE, [text_request("a"), text_request("b")])
    quarantine.survived(CODE, [text_request("a")])
    quarantine.died(CODE, [text_request("b")])
    assert groups(quarantine, "a", "b") == [[0]]
    assert refused(quarantine, "a", "b") == [1]


def test_a_refusal_names_the_model_and_says_for_how_long() -> None:
    quarantine = Quarantine()
    for _ in range(2):
        quarantine.died(CODE, [text_request()])
    ((_, error),) = quarantine.plan(CODE, [text_request()]).refused
    assert error.code is Code.INVALID_ARG
    assert "model 'text'" in error.message
    assert "10 minutes" in error.message


def test_the_id_of_a_request_does_not_matter_but_all_that_a_model_reads_does() -> None:
    quarantine = Quarantine()
    for _ in range(2):
        quarantine.died(CODE, [text_request("a", id="one", parameters={"n": 1})])
    same = text_request("a", id="two", parameters={"n": 1})
    others = [text_request("a", parameters={"n": 2}), text_request("b", parameters={"n": 1})]
    (tensor,) = same.inputs
    others.append(replace(same, inputs=(replace(tensor, name="other"),)))
    others.append(replace(same, inputs=(replace(tensor, shape=(1, 1)),)))
    plan = quarantine.plan(CODE, [same, *others])
    assert [index for index, _ in plan.refused] == [0]


def test_changed_code_clears_the_quarantine() -> None:
    quarantine = Quarantine()
    for _ in range(2):
        quarantine.died(CODE, [text_request()])
    assert quarantine.plan(b"changed", [text_request()]).refused == []


def test_ten_minutes_later_all_is_forgotten() -> None:
    clock = Clock()
    quarantine = Quarantine(clock)
    for _ in range(2):
        quarantine.died(CODE, [text_request()])
    clock.now = KEPT_SECS - 1
    assert refused(quarantine, "hello") == [0]
    clock.now = KEPT_SECS
    assert refused(quarantine, "hello") == []


def test_the_number_of_suspects_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST", 2)
    quarantine = Quarantine()
    for text in ("a", "b", "c"):
        quarantine.died(CODE, [text_request(text)])
    assert groups(quarantine, "a", "b", "c") == [[0], [1], [2]]
    assert groups(quarantine, "a", "d") == [[0, 1]]
