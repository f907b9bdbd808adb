"""The number of replicas that a model needs, in virtual time."""

from dataclasses import replace

import pytest

from gateway.fleet.choice import Load, ReplicaState
from gateway.fleet.scaling import ReplicaCount, need
from gateway.models.replicas import ReplicaRules

IDLE = Load(
    seen=0,
    waiting_tokens=0,
    running=0,
    queued=0,
    prefill_rate=0.0,
    step_secs=0.1,
    kv_used=0.0,
    room=100,
    state=ReplicaState.READY,
)
WITH_TOKENS = replace(IDLE, prefill_rate=1000.0)
RULES = ReplicaRules(least=1, most=8, up_secs=10, down_secs=300)
TICK_SECS = 2


@pytest.mark.parametrize(
    ("load", "concurrency", "expected"),
    [
        (IDLE, 1, 0.0),
        (replace(IDLE, queued=1), 4, 0.25),
        (replace(IDLE, queued=4), 4, 1.0),
        (replace(IDLE, queued=84), 4, 2.0),
        (replace(IDLE, queued=3, step_secs=3.0), 1, 6.0),
        (replace(WITH_TOKENS, waiting_tokens=3000), 1, 3.0),
        (replace(WITH_TOKENS, kv_used=0.4), 1, 0.5),
        (replace(WITH_TOKENS, waiting_tokens=100, kv_used=0.8), 1, 1.0),
    ],
)
def test_the_need_of_a_replica_is_its_wait_or_its_use(
    load: Load, concurrency: int, expected: float
) -> None:
    assert need(load, concurrency, 1.0) == pytest.approx(expected)


def test_a_shorter_wait_needs_more_replicas() -> None:
    assert need(replace(WITH_TOKENS, waiting_tokens=3000), 1, 0.5) == pytest.approx(6.0)


class Model:
    """A model whose replicas are there as soon as they are wanted."""

    def __init__(self, rules: ReplicaRules = RULES, present: int = 1) -> None:
        self.rules = rules
        self.present = present
        self._count = ReplicaCount(present)
        self._now = 0.0

    def after(self, secs: float, needed: float) -> int:
        """The number of replicas after some time with a need, a decision every two seconds."""
        for _ in range(int(secs / TICK_SECS)):
            self._now += TICK_SECS
            self.present = self._count.want(self.rules, needed, self._now)
        return self.present


def test_more_replicas_come_once_the_need_has_lasted() -> None:
    model = Model()
    assert model.after(10, 2.5) == 1
    assert model.after(2, 2.5) == 3


def test_a_short_peak_changes_nothing() -> None:
    model = Model()
    for _ in range(5):
        model.after(8, 6)
        assert model.after(2, 0.5) == 1


def test_the_number_at_most_doubles_or_grows_by_four() -> None:
    model = Model(replace(RULES, most=100))
    assert model.after(12, 99) == 5
    assert model.after(12, 99) == 10
    assert model.after(12, 99) == 20


def test_replicas_end_one_at_a_time_once_none_was_needed_for_long() -> None:
    model = Model(present=4)
    assert model.after(300, 0.2) == 4
    assert model.after(2, 0.2) == 3
    assert model.after(2, 3) == 3
    assert model.after(298, 0.2) == 3
    assert model.after(4, 0.2) == 2


@pytest.mark.parametrize("needed", [1.81, 2.0, 2.19])
def test_a_need_of_about_the_present_number_changes_nothing(needed: float) -> None:
    assert Model(present=2).after(1000, needed) == 2


ZERO = replace(RULES, least=0, to_zero_secs=20)


def test_any_need_of_a_model_without_replicas_wants_one_at_once() -> None:
    model = Model(ZERO, present=0)
    assert model.after(600, 0) == 0
    assert model.after(2, 0.01) == 1
    assert model.after(600, 0.01) == 1


def test_a_large_need_of_a_model_without_replicas_wants_one_first() -> None:
    model = Model(ZERO, present=0)
    assert model.after(2, 7) == 1
    assert model.after(12, 7) == 5


def test_the_last_replica_ends_once_there_was_no_need_for_long() -> None:
    model = Model(ZERO)
    for _ in range(5):
        assert model.after(18, 0) == 1
        assert model.after(2, 0.01) == 1
    assert model.after(20, 0) == 1
    assert model.after(2, 0) == 0


def test_the_time_to_zero_may_be_longer_than_those_of_other_changes() -> None:
    model = Model(replace(ZERO, up_secs=2, down_secs=4, to_zero_secs=40))
    assert model.after(40, 0) == 1
    assert model.after(2, 0) == 0


def test_the_last_but_one_ends_as_in_any_range() -> None:
    model = Model(replace(ZERO, down_secs=40), present=2)
    assert model.after(40, 0) == 2
    assert model.after(2, 0) == 1
    assert model.after(2, 0) == 0


def test_the_range_is_kept() -> None:
    assert Model(present=0).after(2, 0) == 1
    assert Model(replace(RULES, least=3)).after(2, 0) == 3
    assert Model(present=2).after(600, 1000) == 8
    assert Model(replace(RULES, most=2), present=4).after(4, 4) == 2
