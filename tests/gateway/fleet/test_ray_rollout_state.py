"""Rollouts on Ray after a restart of the controller, and with records that cannot be read."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path

import pytest

from gateway.fleet.ray_news import RolloutRequest, RouterNews
from gateway.fleet.ray_repository import LeftOut, ModelFiles, Repository
from gateway.models.repository import ModelRepository
from gateway.rollouts.changes import RolloutAction
from tests.builders import add_model
from tests.gateway.fleet.rolling import PLAN, RollingCluster
from tests.gateway.fleet.test_ray_controller import READY, FakeCluster

OLD, NEW = "1ax", "2ax"
OF_ANOTHER = b'{"format":1,"model":"n","stable":1,"bad":{"2":"x"}}'
REPLICAS = "parameters { key: 'replicas' value { string_value: '2' } }"


def test_a_plan_that_appears_keeps_the_version_that_serves() -> None:
    cluster = RollingCluster(2, plan=None)
    cluster.run(6)
    cluster.plan = PLAN
    cluster.run()
    cluster.restart()
    cluster.stamps[2] = "a"
    cluster.run()
    cluster.until("step")
    assert cluster.shown == {OLD: 2, NEW: 1}


def test_a_version_that_rolled_without_a_plan_stays_stable_with_one() -> None:
    cluster = RollingCluster(2).rolled()
    cluster.plan = None
    cluster.run(20)
    assert cluster.shown == {NEW: 2}
    cluster.plan = PLAN
    cluster.restart()
    cluster.run(5)
    assert (cluster.shown, cluster.news.state["stable"]) == ({NEW: 2}, 2)


@pytest.mark.parametrize("plan", [PLAN, None], ids=["later", "from-the-start"])
def test_a_restarted_controller_holds_back_a_version_whose_plan_is_wrong(plan: object) -> None:
    cluster = RollingCluster(2, PLAN if plan else None)
    cluster.plan_refusal = "" if plan else "rollout.json: steps is wrong"
    cluster.rolled()
    cluster.plan, cluster.plan_refusal = None, "rollout.json: steps is wrong"
    cluster.run(4)
    cluster.restart()
    cluster.run(4)
    assert (cluster.shown, cluster.made) == ({OLD: 2}, 2)


def test_a_damaged_record_is_kept_and_the_version_of_the_replicas_is_stable(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster = RollingCluster(2).rolled()
    cluster.until("step")
    cluster.ask(RolloutAction.ABORT)
    cluster.run(2)
    cluster.records["m"] = b'{"format":1,"model":'
    cluster.restart()
    with caplog.at_level(logging.ERROR):
        cluster.run()
    assert cluster.records["m/damaged"] == b'{"format":1,"model":'
    assert "rollout damaged" in caplog.text
    assert cluster.state == ("waiting", 0.0)
    assert (cluster.news.state["stable"], cluster.shown[OLD]) == (1, 2)
    assert json.loads(cluster.records["m"])["stable"] == 1


def test_a_record_of_another_release_holds_its_model(caplog: pytest.LogCaptureFixture) -> None:
    cluster = RollingCluster(2).rolled()
    cluster.until("step")
    cluster.ask(RolloutAction.ABORT)
    cluster.run(2)
    cluster.records["m"] = foreign = b'{"format": 9, "stable": "first"}'
    cluster.restart()
    with caplog.at_level(logging.ERROR):
        cluster.run(5)
    assert (cluster.shown, cluster.records) == ({OLD: 2}, {"m": foreign})
    reason = "the state of its rollouts has format 9, expected 1"
    assert cluster.troubles == {"m": reason}
    assert [each.__dict__["reason"] for each in caplog.records] == [reason]


def test_many_changes_that_routers_repeat_have_one_effect_each() -> None:
    cluster = RollingCluster().rolled()
    cluster.until("step")
    members = {"weight": 10.0}
    changes = tuple(
        RolloutRequest(f"{n}", "m", RolloutAction.WEIGHT, members, "test") for n in range(150)
    )
    for _ in range(3):
        cluster.controller.heard.take("r", RouterNews(changes=changes))
        cluster.run(3)
        assert len(json.loads(cluster.records["m"])["rollout"]["transitions"]) == 151
        assert len(cluster.news.answers) == 150
        cluster.restart()
    cluster.run(6)
    cluster.ask(RolloutAction.RESUME)
    assert len(cluster.news.answers) == 101


def test_the_rollout_of_a_removed_model_is_written_no_more() -> None:
    cluster = RollingCluster().rolled()
    cluster.until("step")
    cluster.is_removed = True
    cluster.run(5)
    cluster.records["m"] = b"kept"
    cluster.run(12)
    assert cluster.records["m"] == b"kept"


class OnDisk(FakeCluster):
    """A cluster with the models of a folder."""

    def __init__(self, folder: Path) -> None:
        self.repository = Repository([str(folder)], "")
        super().__init__()

    def files(self, left_out: LeftOut) -> Mapping[str, ModelFiles | str]:
        return self.repository.files(left_out)


@pytest.mark.parametrize("record", [{}, {"n": OF_ANOTHER}], ids=["new", "known"])
def test_a_config_that_is_half_written_makes_no_replicas_while_another_model_appears(
    tmp_path: Path, record: Mapping[str, bytes]
) -> None:
    folder = add_model(tmp_path, "m", REPLICAS)
    cluster = OnDisk(tmp_path)
    cluster.decide()
    for name in cluster.views:
        cluster.change(name, phase=READY)
    cluster.decide(4)
    (folder / "config.pbtxt").write_text("")
    add_model(tmp_path, "n", "")
    cluster.records |= record
    cluster.decide()
    assert list(cluster.views) == ["m:1", "m:2", "n:3"]
    (folder / "config.pbtxt").write_text(REPLICAS)
    cluster.decide(4)
    assert list(cluster.views) == ["m:1", "m:2", "n:3"]


def test_versions_that_are_left_out_from_now_on_make_no_half_written_file_hold(
    tmp_path: Path,
) -> None:
    folder = add_model(tmp_path, "m", REPLICAS)
    repository = Repository([str(tmp_path)], "")
    before = repository.files(LeftOut())
    (folder / "config.pbtxt").write_text("")
    assert repository.files(LeftOut()) == before
    others = LeftOut(refused={"n": {1}})
    assert repository.files(others) == before
    assert repository.files(others) != before


def test_stable_is_made_although_the_policy_selects_the_candidate_alone(tmp_path: Path) -> None:
    policy = 'backend: "repeat"\n' + "version_policy { specific { versions: %d } }"
    folder = add_model(tmp_path, "m", policy % 1)
    repository = Repository([str(tmp_path)], "")
    repository.files(LeftOut())
    for version in (2, 3):
        (folder / str(version)).mkdir()
    (folder / "config.pbtxt").write_text(policy % 2)
    left_out = LeftOut(candidates={"m": {2, 3}})
    for _ in range(3):
        found = repository.files(left_out)["m"]
    assert isinstance(found, ModelFiles)
    assert found.selected == (2,)
    assert found.kept is not None
    assert found.kept.left_out == {"m": {2, 3}}
    assert found.kept.description != found.rules.description
    of_replica = ModelRepository([tmp_path], "")
    of_replica.left_out = found.kept.left_out
    entry = of_replica.find("m")
    assert entry.versions(of_replica.read("m").version_policy) == (1,)


def test_the_version_of_each_description_is_that_of_the_highest_one_left(tmp_path: Path) -> None:
    folder = add_model(tmp_path, "m", "")
    before = Repository([str(tmp_path)], "").files(LeftOut())["m"]
    (folder / "2").mkdir()
    after = Repository([str(tmp_path)], "").files(LeftOut(unknown={"m"}))["m"]
    assert isinstance(before, ModelFiles)
    assert isinstance(after, ModelFiles)
    assert after.by_description == {before.rules.description: 1, after.rules.description: 2}
