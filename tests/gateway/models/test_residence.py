"""Decisions about models in memory, with a clock and ends of changes that the tests choose."""

import random
from itertools import pairwise

import pytest

from gateway.models.limits import ResidenceRules, Residency
from gateway.models.residence import (
    PATIENCE_SECS,
    REFUSAL_SECS,
    STAY_SECS,
    Change,
    Stage,
    Verb,
)
from tests.gateway.models.residence_world import World, lru_misses

ONE = {"models": 1}
GIB = 1 << 30
PINNED = ResidenceRules(residency=Residency.PINNED)


def world(*names: str, room: int = 1, **rules: object) -> World:
    return World({"models": room}, dict.fromkeys(names, ONE), **rules)


def wake(at: World, name: str) -> None:
    """Ask a model that is asleep, and let it be loaded and answer."""
    at.ask(name)
    at.decide()
    (change,) = [each for each in at.under_way if each.verb is Verb.WAKE]
    at.finish(change)
    at.end(name)


@pytest.mark.parametrize("seed", range(25))
def test_no_interleaving_lets_a_request_wait_for_ever_or_exceeds_the_budget(seed: int) -> None:
    chance = random.Random(seed)
    sizes = {name: {"host": chance.randint(1, 6), "models": 1} for name in "abcdef"}
    keep = chance.choice((-1, 0, 5, 300))
    at = World({"host": 8, "models": 3}, sizes, keep_alive_secs=keep)
    for name in "ab":
        at.models[name].rests = {"host": chance.randint(0, 1)}
    for _ in range(150):
        at.play(chance)
    at.settle()


def test_two_clients_that_alternate_wake_each_model_at_most_once_in_30_s() -> None:
    at = world("a", "b")
    while at.now < 600:
        for name, requests in at.requests.items():
            if not requests.present:
                assert at.ask(name)
        at.decide()
        for change in tuple(at.under_way):
            at.finish(change)
        at.decide()
        at.pass_time(0.5)
        for name, requests in at.requests.items():
            if requests.executing:
                at.end(name)
        at.decide()
    for times in at.wakes.values():
        assert len(times) > 5
        assert min(b - a for a, b in pairwise(times)) >= STAY_SECS
    assert at.longest_wait <= PATIENCE_SECS


def test_wakes_of_20_models_with_room_for_5_are_nearly_those_of_an_ideal_lru_cache() -> None:
    chance = random.Random(20)
    names = [f"m{number}" for number in range(20)]
    weights = [1 / (rank + 1) ** 1.1 for rank in range(20)]
    trace = chance.choices(names, weights, k=600)
    at = world(*names, room=5)
    for name in trace:
        at.ask(name)
        for _ in range(3):
            at.decide()
            for change in tuple(at.under_way):
                at.finish(change)
        at.pass_time(chance.expovariate(1 / 20))
        for each, requests in at.requests.items():
            for _ in range(requests.executing):
                at.end(each)
    wakes = sum(map(len, at.wakes.values()))
    assert wakes <= 1.1 * lru_misses(trace, 5)


def test_a_request_that_ends_before_its_load_is_accounted_for_is_the_last_use() -> None:
    at = world("a")
    at.ask("a")
    at.decide()
    at.now = 1.0
    at.leave("a")
    at.now = 2.0
    at.finish(at.under_way[0])
    assert at.models["a"].used_at == 1.0


def test_a_model_in_use_is_closed_for_another_one_after_a_minute() -> None:
    at = world("a", "b")
    at.ask("a")
    at.decide()
    at.finish(at.under_way[0])
    at.ask("b")
    at.decide()
    at.pass_time(PATIENCE_SECS - 1)
    assert at.under_way == []
    at.pass_time(1)
    assert at.under_way == [Change(Verb.SLEEP, at.models["a"], "room")]


def test_the_oldest_wish_is_granted_first_and_keeps_later_ones_from_its_room() -> None:
    at = World({"host": 10}, {"old": {"host": 6}, "big": {"host": 10}, "small": {"host": 4}})
    wake(at, "old")
    at.ask("big")
    at.decide()
    at.ask("small")
    at.decide()
    (granted,) = at.under_way
    assert granted.resident.name == "small", "it needs no one's memory"
    at.finish(granted)
    at.end("small")
    at.pass_time(2 * STAY_SECS)
    names = [(each.verb, each.resident.name) for each in at.under_way]
    assert names == [(Verb.SLEEP, "old"), (Verb.SLEEP, "small")]
    at.ask("old")
    for change in tuple(at.under_way):
        at.finish(change)
    at.decide()
    assert [each.resident.name for each in at.under_way] == ["big"]


def test_no_model_sleeps_for_one_that_would_still_have_no_room() -> None:
    at = World({"host": 10}, {"a": {"host": 4}, "b": {"host": 4}, "big": {"host": 10}})
    at.models["b"].rules = PINNED
    wake(at, "a")
    wake(at, "b")
    assert not at.ask("big")
    assert at.models["a"].stage is Stage.AWAKE


def test_a_version_in_a_rollout_stays_and_may_sleep_after_it() -> None:
    at = World({"host": 10}, {"a": {"host": 9}, "b": {"host": 9}}, keep_alive_secs=5)
    wake(at, "a")
    at.requests["a"].pinned = "in a rollout"
    at.pass_time(100)
    assert at.models["a"].stage is Stage.AWAKE
    assert not at.ask("b")
    assert "no room: a (in a rollout)" in at.residence.no_room(at.models["b"]).message
    at.requests["a"].pinned = ""
    at.pass_time(5)
    assert at.models["a"].stage is Stage.FALLING


def test_only_as_many_models_sleep_as_are_needed() -> None:
    at = World({"host": 12}, {"a": {"host": 1}, "b": {"host": 9}, "c": {"host": 10}})
    for name in "ab":
        wake(at, name)
        at.pass_time(1)
    at.ask("c")
    at.decide()
    at.pass_time(STAY_SECS)
    assert [each.resident.name for each in at.under_way] == ["b"]


def test_failures_refuse_requests_for_a_minute_and_then_one_may_try() -> None:
    at = world("a")
    for _ in range(3):
        assert at.ask("a")
        at.decide()
        at.finish(at.under_way[0], fails=True)
    assert not at.ask("a")
    at.pass_time(REFUSAL_SECS)
    assert at.ask("a")
    at.decide()
    at.finish(at.under_way[0], fails=True)
    assert not at.ask("a")


def test_a_refusal_says_which_models_have_the_memory() -> None:
    at = World({"host": 20 * GIB}, {name: {"host": 9 * GIB} for name in "abc"})
    at.models["b"].rules = PINNED
    wake(at, "a")
    wake(at, "b")
    at.ask("a")
    refusal = at.residence.no_room(at.models["c"])
    assert refusal.message == (
        "model 'c' is not in memory and there is no room: a (9.0 GiB, 1 requests), b (pinned)"
    )


def test_memory_kept_during_a_nap_is_given_up_for_another_model() -> None:
    at = World({"host": 10}, {"a": {"host": 8}, "b": {"host": 4}}, keep_alive_secs=5)
    at.models["a"].rests = {"host": 7}
    wake(at, "a")
    at.pass_time(5)
    at.finish(at.under_way[0])
    assert at.models["a"].memory == {"host": 7}
    at.ask("b")
    at.decide()
    assert at.under_way == [Change(Verb.DROP, at.models["a"], "room")]


def test_memory_that_was_measured_beyond_the_budget_does_not_lock_a_model_out() -> None:
    at = World({"host": 10}, {"a": {"host": 1}, "b": {"host": 1}})
    wake(at, "a")
    wake(at, "b")
    at.residence.woken(at.models["b"], {"host": 12})
    assert at.models["b"].needs == {"host": 10}
    at.now += STAY_SECS
    assert at.residence.decide() == [Change(Verb.SLEEP, at.models["a"], "room")]
