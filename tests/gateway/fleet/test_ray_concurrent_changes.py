"""Changes of a rollout on Ray while replicas roll, files change, or the controller is restarted."""

import json
import logging
from collections.abc import Mapping
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

OLD, NEW, NEWER = "1ax", "2ax", "3ax"
MANUAL = msgspec.structs.replace(PLAN, start=PlanStart.MANUAL)
STEPS = '{"steps": [{"weight": 50, "for": "10m"}, {"weight": 100}]}'
REPLICAS = 'backend: "repeat"\nparameters { key: "replicas" value { string_value: "2" } }'


def states(cluster: RollingCluster) -> list[str]:
    return [each.state for each in cluster.news.history]


def pair(cluster: RollingCluster) -> tuple[int, int, float]:
    """The versions that routers choose from, and the weight of the second one."""
    shares = cluster.news.shares
    assert shares is not None
    return shares.stable, shares.candidate, shares.weight


# Starts.


@pytest.mark.parametrize("decisions", [0, 1, 2])
def test_a_start_right_after_an_abort_begins_once_its_replicas_are_there(decisions: int) -> None:
    cluster = RollingCluster(2).rolled()
    cluster.until("step")
    cluster.load_runs = 3
    aborted = cluster.send(RolloutAction.ABORT)
    cluster.run(decisions)
    started = cluster.send(RolloutAction.START, router="other", version=2, again=True)
    cluster.run()
    answers = cluster.news.answers
    assert (answers[aborted], answers[started]) == (RolloutAnswer(), RolloutAnswer())
    assert states(cluster) == ["step", "aborted"]
    assert cluster.state == ("waiting", 0.0)
    cluster.until("step")
    assert cluster.ready(NEW) == 1
    cluster.run(4)
    assert (pair(cluster), cluster.shown) == ((1, 2, 10.0), {OLD: 2, NEW: 1})


def test_of_two_starts_at_once_one_begins_and_waits_for_its_replicas() -> None:
    cluster = RollingCluster(2).rolled()
    cluster.until("step")
    cluster.ask(RolloutAction.ABORT)
    cluster.run(3)
    sent = [
        cluster.send(RolloutAction.START, router=router, version=2, again=True)
        for router in ("r", "s")
    ]
    cluster.run()
    began, refused = sorted((cluster.news.answers[each] for each in sent), key=lambda a: a.error)
    assert began == RolloutAnswer()
    assert refused.error.endswith("rollout of version 2 (waiting); promote or abort it first")
    assert refused.code is Code.ALREADY_EXISTS
    cluster.run(2)
    assert cluster.state == ("waiting", 0.0)
    cluster.until("step")


def test_a_manual_start_before_its_replicas_are_there_waits_for_them() -> None:
    cluster = RollingCluster(2, MANUAL).rolled()
    cluster.slow = frozenset({NEW})
    cluster.run(3)
    assert cluster.ask(RolloutAction.START, version=2, reason="now") == RolloutAnswer()
    cluster.restart()
    cluster.run(3)
    assert cluster.state == ("waiting", 0.0)
    cluster.slow = frozenset()
    cluster.until("step")
    (begun,) = cluster.news.history
    assert (begun.by, begun.reason) == ("test", "now")


def test_a_candidate_that_had_no_replica_yet_has_lost_none() -> None:
    cluster = RollingCluster(2).rolled()
    cluster.slow = frozenset({NEW})
    cluster.run(2)
    cluster.ask(RolloutAction.WEIGHT, weight=50.0)
    cluster.run(2)
    cluster.slow = frozenset()
    cluster.run(8)
    for name in [name for name, each in cluster.views.items() if each.description == NEW]:
        cluster.change(name, phase=ReplicaPhase.ENDED, reason="its actor was lost")
    cluster.run(2)
    assert cluster.state[0] == "paused"


# Promotions.


def test_a_promotion_right_after_the_beginning_moves_requests_with_the_replicas() -> None:
    cluster = RollingCluster(4).rolled()
    cluster.run()
    assert cluster.ask(RolloutAction.PROMOTE) == RolloutAnswer()
    weights = []
    while pair(cluster)[:2] == (1, 2):
        weights.append(pair(cluster)[2])
        cluster.run()
    assert list(dict.fromkeys(weights)) == [0.0, 25.0, 50.0, 75.0]
    assert pair(cluster) == (2, 1, 0.0)


def test_a_newer_version_waits_for_the_roll_of_a_promotion() -> None:
    cluster = RollingCluster(4).rolled()
    cluster.until("step")
    cluster.ask(RolloutAction.PROMOTE)
    cluster.stamps[3] = "a"
    cluster.run()
    answer = cluster.ask(RolloutAction.START, version=3)
    assert answer.code is Code.UNAVAILABLE
    assert answer.error.startswith("version 2 was promoted, and has not all replicas yet")
    while cluster.ready(NEW) < 4:
        assert (cluster.state[0], pair(cluster)[:2]) == ("promoted", (1, 2))
        assert pair(cluster)[2] <= 25 * cluster.ready(NEW)
        assert NEWER not in cluster.shown
        cluster.run()
    cluster.until("step")
    assert (pair(cluster)[:2], cluster.news.state["candidate"]) == ((2, 3), 3)
    cluster.run(10)
    assert cluster.shown == {NEW: 4, NEWER: 1}


def test_a_config_that_changes_while_a_newer_version_waits_ends_the_roll_of_a_promotion() -> None:
    cluster = RollingCluster(4).rolled()
    cluster.until("step")
    cluster.ask(RolloutAction.PROMOTE)
    cluster.run()
    cluster.config = "y"
    cluster.stamps[3] = "a"
    weights = []
    while pair(cluster)[:2] == (1, 2) and len(weights) < 60:
        weights.append(pair(cluster)[2])
        cluster.run()
    assert 25 == weights[0] <= min(weights)
    cluster.until("step")
    assert cluster.ready("3ay") == 1


def test_a_version_without_a_plan_does_not_wait_for_the_roll_of_a_promotion() -> None:
    cluster = RollingCluster(4).rolled()
    cluster.until("step")
    cluster.ask(RolloutAction.PROMOTE)
    cluster.plan = None
    cluster.stamps[3] = "a"
    cluster.run()
    assert (cluster.news.state["stable"], cluster.news.shares) == (3, None)
    cluster.run(20)
    assert cluster.shown == {NEWER: 4}


def test_a_promotion_while_replicas_of_stable_roll_moves_requests_with_the_replicas() -> None:
    cluster = RollingCluster(4).rolled()
    cluster.until("step")
    cluster.config = "y"
    cluster.run(3)
    assert (cluster.ready(OLD) > 0, cluster.ready("2ay")) == (True, 0)
    assert cluster.ask(RolloutAction.PROMOTE) == RolloutAnswer()
    while cluster.ready("2ay") < 4:
        assert pair(cluster) == (1, 2, pair(cluster)[2])
        assert pair(cluster)[2] <= 25 * cluster.ready("2ay")
        cluster.run()
    cluster.run(10)
    assert (pair(cluster), cluster.shown) == ((2, 1, 0.0), {"2ay": 4})


def test_a_promotion_while_the_files_cannot_be_read_moves_requests_with_the_replicas() -> None:
    cluster = RollingCluster(4).rolled()
    cluster.until("step")
    cluster.config_refusal = "line 3 is wrong"
    cluster.restart()
    cluster.run(2)
    assert cluster.ask(RolloutAction.PROMOTE) == RolloutAnswer()
    assert pair(cluster)[:2] == (1, 2)
    cluster.config_refusal = ""
    cluster.run(2)
    assert (pair(cluster)[:2], cluster.shown[OLD] >= 3) == ((1, 2), True)


def test_a_start_before_the_files_are_read_is_refused_for_now() -> None:
    cluster = RollingCluster(2).rolled()
    cluster.until("step")
    cluster.ask(RolloutAction.ABORT)
    cluster.config_refusal = "line 3 is wrong"
    cluster.restart()
    cluster.run(2)
    answer = cluster.ask(RolloutAction.START, version=2, again=True)
    assert answer.code is Code.UNAVAILABLE


# Files that change.


class OnDisk(RollingCluster):
    """A cluster whose model is in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = add_model(folder, "m", REPLICAS)
        (self.folder / "rollout.json").write_text(STEPS)
        self._repository = Repository([str(folder)], "")
        super().__init__(2)
        self.run(6)
        self.write(2)
        self.until("step")

    def files(self, left_out: LeftOut) -> Mapping[str, ModelFiles | str]:
        return self._repository.files(left_out)

    def write(self, version: int) -> None:
        """Have a new version."""
        (self.folder / str(version)).mkdir()


def test_an_abort_while_a_newer_version_appears_begins_no_rollout_of_the_aborted_one(
    tmp_path: Path,
) -> None:
    cluster = OnDisk(tmp_path)
    cluster.write(3)
    assert cluster.ask(RolloutAction.ABORT) == RolloutAnswer()
    assert cluster.state == ("aborted", 0.0)
    cluster.until("step")
    assert states(cluster) == ["step", "aborted", "step"]
    assert cluster.news.state["candidate"] == 3


def test_an_abort_while_a_file_is_half_written_is_the_end(tmp_path: Path) -> None:
    cluster = OnDisk(tmp_path)
    config = cluster.folder / "config.pbtxt"
    config.write_text("")
    assert cluster.ask(RolloutAction.ABORT) == RolloutAnswer()
    config.write_text(REPLICAS)
    cluster.run(5)
    assert (cluster.state, states(cluster)) == (("aborted", 0.0), ["step", "aborted"])


def test_an_abort_while_a_newer_version_appears_leaves_stable_without_a_plan(
    tmp_path: Path,
) -> None:
    cluster = OnDisk(tmp_path)
    (cluster.folder / "rollout.json").unlink()
    cluster.run(3)
    cluster.write(3)
    cluster.ask(RolloutAction.ABORT)
    assert (cluster.news.state["stable"], pair(cluster)) == (1, (1, 2, 0.0))


def test_a_start_while_a_newer_version_appears_is_no_abort(tmp_path: Path) -> None:
    cluster = OnDisk(tmp_path)
    cluster.ask(RolloutAction.ABORT)
    cluster.run(3)
    cluster.write(3)
    assert cluster.ask(RolloutAction.START, version=2, again=True) == RolloutAnswer()
    assert cluster.state == ("waiting", 0.0)
    cluster.until("step")
    assert states(cluster) == ["step", "aborted", "superseded", "step"]


def test_versions_that_are_left_out_from_now_on_are_so_while_files_change(tmp_path: Path) -> None:
    folder = add_model(tmp_path, "m", "", ["1", "2"])
    repository = Repository([str(tmp_path)], "")
    repository.files(LeftOut())
    (folder / "3").mkdir()
    found = repository.files(LeftOut(refused={"m": {2}}))["m"]
    assert isinstance(found, ModelFiles)
    assert (found.selected, set(found.stamps)) == ((1,), {1, 2})


def test_a_model_that_appears_between_two_readings_of_a_decision_has_its_record() -> None:
    cluster = RollingCluster(2)
    cluster.records["e"] = b'{"format": 9}'
    read = cluster.files
    readings = 0

    def files(left_out: LeftOut) -> Mapping[str, ModelFiles | str]:
        nonlocal readings
        readings += 1
        cluster.has_ensemble = readings > 1
        return read(left_out)

    cluster.records["m"] = b'{"format":1,"model":"m","stable":1,"bad":{"2":"ax"}}'
    cluster.stamps[2] = "a"
    cluster.files = files  # type: ignore[method-assign]
    cluster.restart()
    cluster.decide()
    assert readings == 2
    assert cluster.shown == {OLD: 2}
    assert cluster.troubles == {"e": "the state of its rollouts has format 9, expected 1"}


# Records.


def test_a_change_is_answered_once_the_cluster_has_it() -> None:
    cluster = RollingCluster(2).rolled()
    cluster.until("step")
    cluster.fails_to_write = True
    number = cluster.send(RolloutAction.ABORT)
    cluster.run(2)
    assert (cluster.state, number in cluster.news.answers) == (("aborted", 0.0), False)
    cluster.fails_to_write = False
    cluster.run()
    assert cluster.news.answers[number] == RolloutAnswer()
    assert json.loads(cluster.records["m"])["rollout"]["state"] == "aborted"


@pytest.mark.parametrize("action", [RolloutAction.ABORT, RolloutAction.RESUME])
def test_an_answer_is_kept_with_its_change(action: RolloutAction) -> None:
    cluster = RollingCluster(2).rolled()
    cluster.until("step")
    number = cluster.send(action)
    cluster.run()
    assert number in json.loads(cluster.records["m"])["answers"]


def test_a_rollout_that_has_ended_does_not_end_again_at_a_restart(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster = RollingCluster(2).rolled()
    cluster.until("step")
    cluster.ask(RolloutAction.PROMOTE)
    cluster.plan = None
    cluster.stamps[3] = "a"
    cluster.run(30)
    history = cluster.news.history
    assert (cluster.news.state["stable"], cluster.shown) == (3, {NEWER: 2})
    cluster.restart()
    with caplog.at_level(logging.INFO):
        cluster.run()
    assert (cluster.news.state["stable"], cluster.news.history) == (3, history)
    assert "rollout changed" not in caplog.text


def test_a_change_that_a_lost_controller_had_not_kept_is_carried_out_by_the_next_one() -> None:
    cluster = RollingCluster(2).rolled()
    cluster.until("step")
    cluster.fails_to_write = True
    cluster.send(RolloutAction.ABORT)
    cluster.run(2)
    cluster.fails_to_write = False
    cluster.restart()
    cluster.run()
    assert cluster.state[0] == "step"
    number = cluster.send(RolloutAction.ABORT)
    cluster.run(2)
    assert cluster.news.answers[number] == RolloutAnswer()
    assert (cluster.state, states(cluster)) == (("aborted", 0.0), ["step", "aborted"])
