"""Weights of rollouts on Ray while replicas load: each version gets what its replicas can do."""

import json
from dataclasses import replace

from gateway.fleet.ray_news import RouterNews
from gateway.fleet.ray_views import ReplicaPhase
from gateway.models.replicas import ReplicaRules
from gateway.rollouts.changes import RolloutAction
from tests.gateway.fleet.rolling import RollingCluster

OLD, NEW = "1ax", "2ax"


def at_weight(weight: float) -> RollingCluster:
    """Ten replicas, which load for six seconds, at a weight that was set."""
    cluster = RollingCluster(10)
    cluster.load_runs = 3
    cluster.rolled().until("step")
    cluster.ask(RolloutAction.WEIGHT, weight=weight)
    cluster.run(80)
    assert cluster.state == ("paused", weight)
    return cluster


def test_a_lower_weight_comes_as_fast_as_replicas_of_stable() -> None:
    cluster = at_weight(90.0)
    assert cluster.shown == {OLD: 1, NEW: 9}
    cluster.ask(RolloutAction.WEIGHT, weight=10.0)
    weights = []
    for _ in range(80):
        weight = cluster.state[1]
        weights.append(round(weight))
        assert (100 - weight) / cluster.ready(OLD) < 10.1
        assert weight / cluster.ready(NEW) < 10.1
        assert json.loads(cluster.records["m"])["weight"] == weight
        assert cluster.shown[OLD] + cluster.shown[NEW] <= 11
        cluster.run()
    assert sorted(set(weights), reverse=True) == list(dict.fromkeys(weights))
    assert {*weights} == {90, 80, 70, 60, 50, 40, 30, 20, 10}
    assert cluster.shown == {OLD: 9, NEW: 1}


def test_the_time_of_a_step_does_not_pass_while_its_weight_is_exceeded() -> None:
    cluster = at_weight(90.0)
    cluster.ask(RolloutAction.WEIGHT, weight=10.0)
    spent_secs = cluster.news.state["spent_secs"]
    cluster.ask(RolloutAction.RESUME)
    cluster.run(10)
    assert cluster.state[0] == "step"
    assert cluster.state[1] > 10
    assert cluster.news.state["spent_secs"] == spent_secs


def test_a_promoted_version_gets_requests_as_fast_as_it_has_replicas() -> None:
    cluster = at_weight(10.0)
    cluster.ask(RolloutAction.PROMOTE)
    weights = []
    while (shares := cluster.news.shares) is not None and shares.candidate == 2:
        weights.append(round(shares.weight))
        assert shares.weight / cluster.ready(NEW) < 10.1
        cluster.run()
    assert list(dict.fromkeys(weights)) == [10, 20, 30, 40, 50, 60, 70, 80, 90]
    assert (shares.stable, shares.candidate, shares.weight) == (2, 1, 0.0)  # type: ignore[union-attr]
    cluster.run(5)
    assert cluster.shown == {NEW: 10}


def test_a_restarted_controller_continues_a_change_of_the_weight() -> None:
    cluster = at_weight(90.0)
    cluster.ask(RolloutAction.WEIGHT, weight=10.0)
    while cluster.state[1] > 60:
        cluster.run()
    cluster.restart()
    cluster.run()
    assert cluster.state == ("paused", 60.0)
    cluster.ask(RolloutAction.PROMOTE)
    cluster.restart()
    cluster.run()
    shares = cluster.news.shares
    assert shares is not None
    assert (shares.candidate, shares.weight) == (2, 60.0)


def test_a_lost_replica_of_stable_gives_the_candidate_no_more_requests() -> None:
    cluster = RollingCluster(4).rolled()
    cluster.until("step")
    cluster.load_runs = 5
    (name, *_) = [name for name, each in cluster.views.items() if each.description == OLD]
    cluster.change(name, phase=ReplicaPhase.ENDED, reason="its actor was lost")
    for _ in range(4):
        cluster.run()
        assert cluster.state == ("step", 10.0)
        assert cluster.ready(OLD) == 3


def test_a_replica_of_stable_without_a_place_gets_that_of_a_candidate_too_many() -> None:
    cluster = RollingCluster(4).rolled()
    cluster.until("step")
    cluster.ask(RolloutAction.WEIGHT, weight=100.0)
    cluster.run(30)
    cluster.placeless = frozenset({OLD})
    cluster.ask(RolloutAction.WEIGHT, weight=0.0)
    cluster.run(4)
    assert cluster.shown == {OLD: 2, NEW: 3}
    cluster.run(10)
    assert (cluster.ready(OLD), cluster.ready(NEW)) == (1, 2)
    cluster.placeless = frozenset()
    cluster.run(20)
    assert cluster.shown == {OLD: 4, NEW: 1}


def test_stable_that_does_not_load_is_tried_with_pauses_although_none_is_wanted() -> None:
    cluster = RollingCluster().rolled()
    cluster.until("step")
    rules = cluster.rules["m"]
    assert isinstance(rules, ReplicaRules)
    cluster.rules = {"m": replace(rules, least=0, to_zero_secs=4)}
    cluster.controller.heard.take("r", RouterNews(descriptions={"m": OLD}))
    cluster.run(20)
    assert cluster.controller.status()[0].wanted == 0
    assert cluster.shown == {OLD: 1, NEW: 1}
    cluster.failing, made = frozenset({OLD}), cluster.made
    (name,) = [name for name, each in cluster.views.items() if each.description == OLD]
    cluster.change(name, phase=ReplicaPhase.ENDED, reason="its actor was lost")
    cluster.run(60)
    assert 3 < cluster.made - made < 10
