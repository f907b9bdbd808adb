"""Rollouts on Ray: the controller decides for all replicas, with a cluster in memory."""

import logging
from pathlib import Path

import msgspec
import pytest

from gateway.errors import Code
from gateway.fleet.ray_news import RolloutAnswer
from gateway.fleet.ray_repository import LeftOut, ModelFiles, Repository
from gateway.fleet.ray_views import ReplicaPhase
from gateway.rollouts.changes import RolloutAction
from gateway.rollouts.plan import PlanStart
from tests.builders import add_model
from tests.gateway.fleet.rolling import PLAN, RollingCluster
from tests.gateway.fleet.test_ray_controller import TICK_SECS

OLD, NEW = "1ax", "2ax"
SHADOW = [{"shadow": 5}, {"weight": 100}]


def test_a_new_version_gets_replicas_by_its_weight_and_in_the_end_all() -> None:
    cluster = RollingCluster(4).rolled()
    found = []
    for _ in range(60):
        cluster.run()
        cluster.count(ended=10 * len(found) + 10)
        place = *cluster.state, cluster.shown.get(OLD, 0), cluster.shown.get(NEW, 0)
        if place not in found:
            found.append(place)
    states = [place for place in found if place[2] + place[3] <= 5]
    assert found == states
    for settled in (("waiting", 0.0, 4, 1), ("step", 10.0, 4, 1), ("step", 50.0, 2, 2)):
        assert settled in found
    assert ("baking", 100.0, 1, 4) in found
    assert found[-1] == ("promoted", 0.0, 0, 4)
    assert all(kept >= 1 for state, _, kept, _ in found if state != "promoted")
    shares = cluster.news.shares
    assert shares is not None
    assert (shares.stable, shares.candidate) == (2, 1)


def test_routers_give_a_candidate_the_share_for_which_it_has_replicas() -> None:
    cluster = RollingCluster(10).rolled()
    cluster.until("step")
    cluster.placeless = frozenset({NEW})
    assert cluster.ask(RolloutAction.WEIGHT, weight=50.0) == RolloutAnswer()
    cluster.run(3)
    assert cluster.shown[OLD] == 10 - cluster.shown[NEW] + 1
    assert cluster.state == ("paused", 50.0 / 5)
    cluster.placeless = frozenset()
    cluster.run(30)
    assert (cluster.state, cluster.shown) == (("paused", 50.0), {OLD: 5, NEW: 5})


def test_a_lower_weight_ends_replicas_of_the_candidate_and_makes_some_of_stable() -> None:
    cluster = RollingCluster(4).rolled()
    cluster.until("step")
    cluster.ask(RolloutAction.WEIGHT, weight=100.0)
    cluster.run(30)
    assert cluster.shown == {OLD: 1, NEW: 4}
    cluster.ask(RolloutAction.WEIGHT, weight=0.0)
    cluster.run(20)
    assert cluster.shown == {OLD: 4, NEW: 1}
    assert cluster.state == ("paused", 0.0)


def test_a_rollout_pauses_while_stable_has_no_replica() -> None:
    cluster = RollingCluster().rolled()
    cluster.until("step")
    (name,) = [name for name, each in cluster.views.items() if each.description == OLD]
    cluster.change(name, phase=ReplicaPhase.ENDED, reason="its actor was lost")
    cluster.placeless = frozenset({OLD})
    cluster.run(3)
    assert cluster.state == ("paused", 10.0)
    assert cluster.news.state["reason"] == "version 1 (stable) is not able: it has no replica"


def test_the_only_version_that_is_left_is_not_refused() -> None:
    cluster = RollingCluster().rolled()
    cluster.until("step")
    cluster.ask(RolloutAction.ABORT)
    del cluster.stamps[1]
    cluster.run(12)
    assert cluster.shown == {NEW: 1}


def test_the_time_of_a_step_passes_only_with_all_replicas_of_its_weight() -> None:
    cluster = RollingCluster().rolled()
    cluster.until("step")
    cluster.count(ended=5)
    (name,) = [each.name for each in cluster.views.values() if each.description == NEW]
    cluster.change(name, phase=ReplicaPhase.ENDED, reason="its actor was lost")
    cluster.placeless = frozenset({NEW})
    cluster.run(20)
    assert cluster.state == ("step", 0.0)
    assert cluster.news.state["spent_secs"] < 5
    cluster.placeless = frozenset()
    cluster.run(20)
    assert cluster.state == ("step", 50.0)


def test_a_controller_that_was_restarted_continues_at_the_weight() -> None:
    cluster = RollingCluster(2).rolled()
    cluster.until("step")
    cluster.count(ended=5)
    cluster.run(6)
    before = cluster.news
    cluster.restart()
    cluster.run(2)
    after = cluster.news
    assert 0 < after.state["spent_secs"] <= before.state["spent_secs"] + TICK_SECS
    assert after.state["guardrails"] == before.state["guardrails"]
    assert (after.heard, after.evidence) == (before.heard, before.evidence)
    assert cluster.state == ("step", 10.0)
    assert cluster.shown == {OLD: 2, NEW: 1}
    assert cluster.controller.status()[0].outdated == []


def test_a_restarted_controller_refuses_a_version_that_was_rolled_back() -> None:
    cluster = RollingCluster(2).rolled()
    cluster.until("step")
    assert cluster.ask(RolloutAction.ABORT, reason="slow") == RolloutAnswer()
    cluster.restart()
    cluster.run(10)
    assert cluster.shown == {OLD: 2}
    assert cluster.state == ("aborted", 0.0)


def test_a_candidate_that_does_not_load_leaves_stable_alone_and_has_the_reason() -> None:
    cluster = RollingCluster(2).rolled()
    cluster.failing = frozenset({NEW})
    cluster.run(20)
    assert cluster.state == ("waiting", 0.0)
    assert cluster.troubles == {"m": "no such file"}
    assert cluster.shown[OLD] == 2
    while NEW in cluster.shown:
        cluster.run()  # until it is tried after a longer pause
    lost = next(name for name, each in cluster.views.items() if each.description == OLD)
    cluster.change(lost, phase=ReplicaPhase.ENDED, reason="its actor was lost")
    cluster.run(2)
    assert cluster.shown[OLD] == 2
    cluster.failing = frozenset()
    cluster.until("step")


def test_a_candidate_whose_replica_starts_slowly_after_a_loss_stays_unless_none_starts() -> None:
    cluster = RollingCluster().rolled()
    cluster.until("step")
    (name,) = [name for name, each in cluster.views.items() if each.description == NEW]
    cluster.change(name, phase=ReplicaPhase.ENDED, reason="its actor was lost")
    cluster.slow = frozenset({NEW})
    cluster.run(60)
    assert cluster.state == ("step", 0.0)
    (name,) = [name for name, each in cluster.views.items() if each.description == NEW]
    cluster.change(name, phase=ReplicaPhase.ENDED, reason="no such file")
    cluster.failing = frozenset({NEW})
    cluster.until("rolled_back")
    assert cluster.news.state["reason"].startswith("no instance was able for 60 s: no such file")


def test_the_reason_of_a_rollout_has_no_paths_and_no_log_of_its_replicas() -> None:
    cluster = RollingCluster().rolled()
    cluster.until("step")
    cluster.failing, cluster.reason = frozenset({NEW}), "no such file: '/srv/w.bin'\nE a line"
    (name,) = [name for name, each in cluster.views.items() if each.description == NEW]
    cluster.change(name, phase=ReplicaPhase.ENDED, reason="its actor was lost")
    cluster.until("rolled_back")
    reasons = [each.reason for each in cluster.news.history]
    assert any(each.endswith("no such file: (a path)") for each in reasons)
    assert not any("/srv" in each or "E a line" in each for each in reasons)


def test_a_candidate_that_the_policy_no_longer_selects_is_taken_back() -> None:
    cluster = RollingCluster().rolled()
    cluster.until("step")
    cluster.most = 1
    cluster.run(3)
    assert cluster.news.state["reason"] == "the policy selects version 2 no more"
    assert cluster.shown == {OLD: 1}


def test_an_ensemble_keeps_stable_of_its_member_until_the_promotion() -> None:
    cluster = RollingCluster(1)
    cluster.has_ensemble = True
    cluster.rolled()
    seen = set[str]()
    while cluster.state[0] != "step":
        cluster.run()
        seen |= cluster.shown.keys()
    assert seen == {OLD, NEW, "e1"}
    cluster.ask(RolloutAction.PROMOTE)
    cluster.run(15)
    assert cluster.shown == {NEW: 1, "e2": 1}


def test_a_candidate_that_is_lost_twice_is_rolled_back() -> None:
    cluster = RollingCluster(2).rolled()
    cluster.until("step")
    for _ in range(2):
        (name,) = [name for name, each in cluster.views.items() if each.description == NEW]
        cluster.change(name, phase=ReplicaPhase.ENDED, reason="its actor was lost")
        cluster.run(3)
    assert cluster.state[0] == "rolled_back"
    cluster.run(2)
    assert cluster.shown == {OLD: 2}


@pytest.mark.parametrize("count", [1, 2])
def test_a_candidate_without_a_place_gets_that_of_stable_unless_it_is_the_last(count: int) -> None:
    cluster = RollingCluster(count).rolled()
    cluster.placeless = frozenset({NEW})
    cluster.run(20)
    assert cluster.shown == {OLD: 1, NEW: 1}
    assert cluster.made == count + 1
    assert cluster.troubles == {"m": "no node has 1 CPU free"}


def test_a_config_that_changes_during_a_rollout_begins_it_anew() -> None:
    cluster = RollingCluster(2).rolled()
    cluster.until("step")
    cluster.config = "y"
    cluster.run(20)
    assert cluster.shown == {"1ay": 2, "2ay": 1}
    states = [each.state for each in cluster.news.history]
    assert states == ["step", "superseded", "step"]


def test_a_newer_version_supersedes_a_candidate() -> None:
    cluster = RollingCluster().rolled()
    cluster.until("step")
    cluster.stamps[3] = "a"
    cluster.run(10)
    assert cluster.shown == {OLD: 1, "3ax": 1}
    assert cluster.news.state["candidate"] == 3


def test_without_a_plan_a_new_version_rolls_at_once() -> None:
    cluster = RollingCluster(2, plan=None).rolled()
    cluster.run(20)
    assert cluster.shown == {NEW: 2}
    assert cluster.records == {}


def test_a_plan_that_cannot_be_read_holds_a_new_version_back() -> None:
    cluster = RollingCluster(2).rolled()
    cluster.plan_refusal = "rollout.json: steps is wrong"
    cluster.run(10)
    assert cluster.shown == {OLD: 2}
    assert cluster.troubles == {"m": "rollout.json: steps is wrong"}
    cluster.plan_refusal = ""
    cluster.until("step")


def test_a_record_that_cannot_be_written_is_written_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster = RollingCluster()
    cluster.fails_to_write = True
    with caplog.at_level(logging.ERROR):
        cluster.run(3)
    assert "rollout not kept" in caplog.text
    cluster.fails_to_write = False
    cluster.run()
    assert msgspec.json.decode(cluster.records["m"])["stable"] == 1


def test_persons_change_a_rollout_once_by_each_request() -> None:
    manual = msgspec.structs.replace(PLAN, start=PlanStart.MANUAL)
    cluster = RollingCluster(2, manual).rolled()
    cluster.run(10)
    assert cluster.state == ("waiting", 0.0)
    assert cluster.ask(RolloutAction.START, version=2) == RolloutAnswer()
    assert cluster.ask(RolloutAction.PAUSE) == RolloutAnswer()
    cluster.run(3)  # the router repeats the request
    assert set(cluster.news.answers.values()) == {RolloutAnswer()}
    answer = cluster.ask(RolloutAction.PAUSE)
    assert answer.error == "the rollout of version 2 is paused, expected step, baking"
    assert answer.code is Code.INVALID_ARG
    assert cluster.ask(RolloutAction.RESUME) == RolloutAnswer()
    assert cluster.ask(RolloutAction.PROMOTE, reason="enough") == RolloutAnswer()
    cluster.run(12)
    assert cluster.shown == {NEW: 2}
    assert [each.by for each in cluster.news.history] == ["test"] * 4


@pytest.mark.parametrize(
    ("members", "error"),
    [
        ({"version": 2}, "version 2 was rolled back, and has the same files; start it again"),
        ({"version": 5}, "the model has no version 5"),
        ({"version": 1}, "version is 1, expected one above 1 on Ray"),
        ({}, "request: Object missing required field `version`"),
        ({"version": 2, "again": True, "steps": SHADOW}, "request: steps with 'shadow' are not"),
    ],
    ids=["rolled-back", "unknown", "stable", "without", "plan"],
)
def test_a_start_that_does_not_fit_has_the_reason(members: dict[str, object], error: str) -> None:
    cluster = RollingCluster().rolled()
    cluster.until("step")
    cluster.ask(RolloutAction.ABORT)
    assert cluster.ask(RolloutAction.START, **members).error.startswith(error)


def test_a_version_that_was_rolled_back_is_started_again_on_request() -> None:
    cluster = RollingCluster().rolled()
    cluster.until("step")
    cluster.ask(RolloutAction.ABORT)
    assert cluster.ask(RolloutAction.START, version=2, again=True) == RolloutAnswer()
    cluster.until("step")
    assert cluster.shown == {OLD: 1, NEW: 1}


ENSEMBLE = 'platform: "ensemble"\nensemble_scheduling { step [{ model_name: "m" }] }\n'


def test_replicas_of_an_ensemble_leave_the_candidate_of_a_member_out(tmp_path: Path) -> None:
    folder = add_model(tmp_path, "m", 'backend: "repeat"\n')
    add_model(tmp_path, "e", ENSEMBLE)
    (folder / "rollout.json").write_text('{"steps": [{"weight": 100}]}')
    repository = Repository([str(tmp_path)], "")

    def files(model: str, candidates: frozenset[int] = frozenset()) -> ModelFiles:
        found = repository.files(LeftOut(candidates={"m": candidates} if candidates else {}))
        each = found[model]
        assert isinstance(each, ModelFiles)
        return each

    before = {name: files(name) for name in ("e", "m")}
    (folder / "2").mkdir()
    files("m")  # changed files hold after two readings
    assert files("m").selected == (2,)
    assert files("m").kept is None
    kept = files("m", frozenset({2})).kept
    assert kept is not None
    assert kept.description == before["m"].rules.description
    assert kept.left_out == {"m": {2}}
    assert files("m", frozenset({2})).rules.left_out == {}
    of_ensemble = files("e", frozenset({2})).rules
    assert of_ensemble.description == before["e"].rules.description
    assert of_ensemble.left_out == {"m": {2}}
    assert files("m").plan is not None
    add_model(tmp_path, "n", 'backend: "repeat"\n')
    assert files("n", frozenset({2})).rules.left_out == {}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"steps": [{"shadow": 5}, {"weight": 100}]}', "steps with 'shadow' are not for Ray"),
        ('{"guardrails": {"golden": {}}}', "guardrails.golden is not for Ray"),
        ('{"guardrails": {"differs": {"max": 0.1}}}', "guardrails.differs is not for Ray"),
        ('{"steps": 5}', "Expected `array`, got `int`"),
    ],
    ids=["shadow", "golden", "differs", "steps"],
)
def test_a_plan_that_needs_copies_of_requests_is_refused(
    tmp_path: Path, text: str, reason: str
) -> None:
    folder = add_model(tmp_path, "m", 'backend: "repeat"\n')
    (folder / "rollout.json").write_text(text)
    found = Repository([str(tmp_path)], "").files(LeftOut())["m"]
    assert isinstance(found, ModelFiles)
    assert found.plan is None
    assert reason in found.plan_refusal
