"""Rolls on Ray: the controller replaces the replicas of a model whose files have changed."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.fleet.ray_controller import ModelStatus
from gateway.fleet.ray_repository import LeftOut, ModelFiles, Repository, refusal
from gateway.fleet.ray_views import ReplicaPhase, ReplicaView
from gateway.models.replicas import ReplicaRules
from tests.builders import add_model
from tests.gateway.fleet.test_ray_controller import REACHED_TICKS, FakeCluster

PENDING, STARTING, READY = ReplicaPhase.PENDING, ReplicaPhase.STARTING, ReplicaPhase.READY
DRAINING, ENDED, SILENT = ReplicaPhase.DRAINING, ReplicaPhase.ENDED, ReplicaPhase.SILENT
ONE = ReplicaRules(resources={"CPU": 1}, description="a")
TWO = replace(ONE, least=2, most=2)
LOAD_FAILS = "it ended with status 1: no such file"
PLACE_TICKS = 6
"""Decisions after which a replica has had no place for ten seconds."""


def started(rules: ReplicaRules, **changes: object) -> FakeCluster:
    """Ready replicas of a model, whose files then change."""
    found = FakeCluster(m=rules).start()
    change(found, description="b", **changes)
    return found


def change(cluster: FakeCluster, **changes: object) -> None:
    """Change the rules of the model."""
    rules = cluster.rules["m"]
    assert isinstance(rules, ReplicaRules)
    cluster.rules = {"m": replace(rules, **changes)}  # type: ignore[arg-type]


def shown(cluster: FakeCluster) -> list[tuple[str, ReplicaPhase]]:
    """The description and the phase of each replica, in the order in which they were made."""
    return [(each.description, each.phase) for each in cluster.views.values()]


def those(cluster: FakeCluster, phase: ReplicaPhase) -> list[ReplicaView]:
    return [each for each in cluster.views.values() if each.phase is phase]


def ended(cluster: FakeCluster) -> None:
    """Let the draining replicas end."""
    for each in those(cluster, DRAINING):
        cluster.change(each.name, phase=ENDED)


def test_a_changed_model_gets_a_new_replica_before_each_old_one_drains() -> None:
    cluster = started(replace(ONE, least=4, most=4))
    working = []
    while any(each.description == "a" for each in cluster.views.values()):
        cluster.decide()
        working.append((len(those(cluster, READY)), len(those(cluster, STARTING))))
        ended(cluster)
        for each in those(cluster, STARTING):
            cluster.change(each.name, phase=READY)
        assert len(working) < 40
    assert set(working) == {(4, 1), (5, 0), (4, 0)}
    assert shown(cluster) == [("b", READY)] * 4
    assert cluster.decide(3) == dict.fromkeys(cluster.views, READY)
    assert cluster.made == 8


def test_no_old_replica_drains_while_the_first_new_one_starts() -> None:
    cluster = started(TWO)
    cluster.decide(30)
    assert shown(cluster) == [("a", READY), ("a", READY), ("b", STARTING)]


@pytest.mark.parametrize("is_ready_before", [False, True])
def test_a_new_description_that_does_not_load_changes_nothing_and_has_the_reason(
    is_ready_before: bool,
) -> None:
    cluster = started(TWO)
    made = 0
    for _ in range(40):
        cluster.decide()
        made += len(those(cluster, STARTING))
        for each in those(cluster, STARTING):
            if is_ready_before:
                cluster.change(each.name, phase=READY)
                cluster.decide(REACHED_TICKS - 2)
            cluster.change(each.name, phase=ENDED, reason=LOAD_FAILS)
    assert 3 < made < 8
    assert shown(cluster)[:2] == [("a", READY), ("a", READY)]
    assert cluster.troubles == {"m": LOAD_FAILS}
    change(cluster, description="c")
    cluster.decide()
    assert shown(cluster)[2:] == [("c", STARTING)]
    assert cluster.troubles == {}


def test_a_change_that_is_taken_back_leaves_the_old_replicas_only() -> None:
    cluster = started(TWO)
    cluster.decide()
    change(cluster, description="a")
    cluster.decide(3)
    assert shown(cluster) == [("a", READY), ("a", READY)]
    assert cluster.made == 3


def test_the_first_start_of_a_controller_does_not_end_the_pause_after_a_failure() -> None:
    cluster = FakeCluster(m=ONE)
    cluster.decide()
    cluster.change("m:1", phase=ENDED, reason=LOAD_FAILS)
    restarted(cluster)
    cluster.decide()
    assert cluster.troubles == {"m": LOAD_FAILS}


def test_an_old_replica_gives_its_place_if_the_new_one_has_none_for_ten_seconds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster = started(TWO)
    cluster.decide()
    cluster.change("m:3", phase=PENDING)
    cluster.decide(PLACE_TICKS - 1)
    assert shown(cluster)[:2] == [("a", READY), ("a", READY)]
    assert cluster.troubles == {"m": "no node has 1 CPU free"}
    cluster.decide(PLACE_TICKS)
    assert [phase for _, phase in shown(cluster)] == [DRAINING, READY, PENDING]
    ended(cluster)
    cluster.decide(2 * PLACE_TICKS)
    assert [phase for _, phase in shown(cluster)] == [READY, PENDING]
    cluster.change("m:3", phase=READY)
    cluster.decide()
    cluster.change("m:4", phase=PENDING)
    cluster.decide(2 * PLACE_TICKS)
    assert [phase for _, phase in shown(cluster)] == [DRAINING, READY, PENDING]
    assert "no replica until" not in caplog.text


def restarted(cluster: FakeCluster) -> None:
    cluster.restart()


def changed_again(cluster: FakeCluster) -> None:
    change(cluster, description="c")
    cluster.decide()
    for each in those(cluster, STARTING):
        cluster.change(each.name, phase=PENDING)


@pytest.mark.parametrize("happens", [restarted, changed_again])
def test_no_second_replica_gives_its_place_before_a_new_one_is_ready(
    happens: Callable[[FakeCluster], None],
) -> None:
    cluster = started(TWO)
    cluster.decide()
    cluster.change("m:3", phase=PENDING)
    cluster.decide(PLACE_TICKS)
    ended(cluster)
    cluster.decide()
    happens(cluster)
    cluster.decide(3 * PLACE_TICKS)
    assert {phase for _, phase in shown(cluster)} == {READY, PENDING}


def test_a_new_replica_waits_for_the_place_of_one_that_drains_already() -> None:
    cluster = started(TWO)
    cluster.decide()
    cluster.change("m:3", phase=READY)
    cluster.decide(REACHED_TICKS)
    cluster.change("m:4", phase=PENDING)
    cluster.decide(3 * PLACE_TICKS)
    assert [phase for _, phase in shown(cluster)] == [DRAINING, READY, READY, PENDING]


def test_the_next_new_replica_waits_for_ten_seconds_from_the_end_of_one_that_drained() -> None:
    cluster = started(TWO)
    cluster.decide()
    cluster.change("m:3", phase=PENDING)
    cluster.decide(PLACE_TICKS)
    cluster.change("m:3", phase=READY)
    cluster.decide(REACHED_TICKS)
    cluster.change("m:4", phase=PENDING)
    cluster.decide()
    ended(cluster)
    cluster.decide(PLACE_TICKS - 1)
    assert [phase for _, phase in shown(cluster)] == [READY, READY, PENDING]
    cluster.decide()
    assert [phase for _, phase in shown(cluster)] == [DRAINING, READY, PENDING]


def test_the_log_has_a_warning_before_the_only_replica_gives_its_place(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster = started(ONE)
    cluster.decide()
    cluster.change("m:2", phase=PENDING)
    drain: Callable[[str], None] = cluster.drain
    logged = []

    def noted(name: str) -> None:
        logged.append("no replica until a new one is ready" in caplog.text)
        drain(name)

    cluster.drain = noted  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING):
        cluster.decide(PLACE_TICKS)
    assert logged == [True]


def test_a_new_description_that_no_node_could_ever_have_leaves_the_old_replicas() -> None:
    cluster = started(ONE, resources={"GPU": 8})
    cluster.decide()
    cluster.change("m:2", phase=ReplicaPhase.INFEASIBLE)
    cluster.decide(30)
    assert [phase for _, phase in shown(cluster)] == [READY, ReplicaPhase.INFEASIBLE]
    assert cluster.troubles == {"m": "no node has 8 GPU"}


def test_a_second_change_ends_the_replicas_of_the_middle_description_first() -> None:
    cluster = started(replace(ONE, least=3, most=3))
    cluster.decide()
    cluster.change("m:4", phase=READY, need=0.9)
    cluster.decide(REACHED_TICKS)
    change(cluster, description="c")
    cluster.decide()
    assert "m:5" not in cluster.views
    cluster.change("m:6", phase=READY)
    cluster.decide(REACHED_TICKS)
    ended(cluster)
    cluster.decide()
    assert shown(cluster) == [("a", READY), ("a", READY), ("c", READY), ("c", STARTING)]


def test_a_restarted_controller_continues_a_roll() -> None:
    cluster = started(TWO)
    cluster.decide()
    restarted(cluster)
    cluster.decide()
    assert shown(cluster) == [("a", READY), ("a", READY), ("b", STARTING)]
    cluster.change("m:3", phase=READY)
    cluster.decide(REACHED_TICKS - 1)
    assert those(cluster, DRAINING) == []
    cluster.decide()
    assert len(those(cluster, DRAINING)) == 1


def test_a_lost_replica_is_replaced_by_the_new_description_and_needs_count_during_a_roll() -> None:
    cluster = started(replace(ONE, least=2, most=4, up_secs=2, down_secs=4))
    cluster.decide()
    cluster.change("m:1", phase=ENDED, reason="its actor was lost")
    cluster.decide()
    assert shown(cluster) == [("a", READY), ("b", STARTING)]
    cluster.change("m:2", need=3.5)
    cluster.decide(3)
    assert shown(cluster) == [("a", READY), *[("b", STARTING)] * 3]
    for each in those(cluster, STARTING):
        cluster.change(each.name, phase=READY)
    cluster.decide()
    assert shown(cluster)[-1] == ("b", STARTING)
    change(cluster, most=2)
    cluster.change("m:2", need=0.0)
    cluster.decide(12)
    assert len(those(cluster, READY)) == 2
    assert not any(each.description == "a" for each in those(cluster, READY))


def test_a_roll_waits_while_a_replica_is_silent() -> None:
    cluster = started(TWO)
    cluster.change("m:2", phase=SILENT)
    for _ in range(10):
        cluster.decide()
        ended(cluster)
        for each in those(cluster, STARTING):
            cluster.change(each.name, phase=READY)
    assert shown(cluster) == [("a", READY), ("a", SILENT), ("b", READY)]
    cluster.change("m:2", phase=READY)
    cluster.decide()
    assert len(those(cluster, DRAINING)) == 1


def test_the_status_has_the_replicas_of_earlier_descriptions() -> None:
    cluster = started(ONE)
    cluster.decide(2)
    (status,) = cluster.controller.status()
    assert isinstance(status, ModelStatus)
    assert [each.name for each in status.outdated] == ["m:1"]
    cluster.rules = {}
    cluster.decide(2)
    assert [each.outdated for each in cluster.controller.status()] == [[]]


PARAMETER = "parameters {{ key: '{}' value {{ string_value: '{}' }} }}\n"
ENSEMBLE = 'platform: "ensemble"\nensemble_scheduling { step [{ model_name: "m" }] }\n'


def description(folder: Path, model: str = "m") -> str:
    """The description of a model, as a controller reads it that was just started."""
    found = Repository([str(folder)], "").files(LeftOut())[model]
    assert isinstance(found, ModelFiles), found
    return found.rules.description


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    add_model(tmp_path, "m", 'backend: "repeat"\n')
    add_model(tmp_path, "e", ENSEMBLE)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "versions", "changes"),
    [
        ("max_batch_size: 4", (), True),
        (PARAMETER.format("delay", 1), (), True),
        (PARAMETER.format("replica_resources", '{"CPU": 2}'), (), True),
        (PARAMETER.format("scale_target_wait_ms", 5), (), True),
        ("", ("2",), True),
        ("version_policy { specific { versions: [1] } }", ("2",), True),
        (PARAMETER.format("replicas", "1..4"), (), False),
        (PARAMETER.format("scale_up_secs", 7) + PARAMETER.format("scale_down_secs", 7), (), False),
        (PARAMETER.format("start_limit_secs", 7200), (), False),
        ("# a comment\n", (), False),
    ],
)
def test_the_description_changes_with_what_a_replica_loads(
    folder: Path, text: str, versions: Sequence[str], changes: bool
) -> None:
    before = [description(folder), description(folder, "e")]
    for version in versions:
        (folder / "m" / version).mkdir()
    (folder / "m" / "config.pbtxt").write_text('backend: "repeat"\n' + text)
    after = [description(folder), description(folder, "e")]
    assert [old != new for old, new in zip(before, after, strict=True)] == [changes, changes]


def test_the_description_changes_with_the_arguments_of_an_engine(folder: Path) -> None:
    before = description(folder)
    (folder / "m" / "1" / "model.json").write_text('{"model": "llama", "max_model_len": 4096}')
    assert description(folder) != before


def test_files_and_versions_that_the_policy_leaves_out_do_not_change_the_description(
    folder: Path,
) -> None:
    config = 'backend: "repeat"\nversion_policy { specific { versions: [1] } }'
    (folder / "m" / "config.pbtxt").write_text(config)
    before = description(folder)
    (folder / "m" / "2").mkdir()
    (folder / "m" / "1" / "weights").write_text("new")
    assert description(folder) == before


def test_a_node_whose_repository_differs_refuses_a_replica_with_the_reason(folder: Path) -> None:
    paths = [str(folder)]
    assert refusal(paths, "", "m", description(folder), {}) == ""
    assert "another configuration or other versions" in refusal(paths, "", "m", "0000", {})
    assert refusal(paths, "", "n", "0000", {}) == "model 'n' is not in any repository"
    assert "does not exist" in refusal([str(folder / "nowhere")], "", "m", "0000", {})
