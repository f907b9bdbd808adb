"""The decisions of the controller on Ray, with a cluster in memory and virtual time."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from gateway.errors import Code, InferenceError
from gateway.fleet.ray_controller import Controller
from gateway.fleet.ray_repository import LeftOut, ModelFiles, Repository
from gateway.fleet.ray_views import ReplicaPhase, ReplicaView
from gateway.models.replicas import ReplicaRules
from tests.builders import add_model

STARTING, READY, SILENT = ReplicaPhase.STARTING, ReplicaPhase.READY, ReplicaPhase.SILENT
DRAINING, ENDED = ReplicaPhase.DRAINING, ReplicaPhase.ENDED
TWO = ReplicaRules(least=2, most=2, resources={"CPU": 1})
QUICK = ReplicaRules(least=1, most=4, resources={"CPU": 1}, up_secs=2, down_secs=4)
TICK_SECS = 2
REACHED_TICKS = 4
"""Decisions after which routers have reached a replica that is ready at the first one."""


class FakeCluster:
    """Replicas that do what the test says; it is a `Cluster`, with its controller and clock."""

    def __init__(self, **rules: ReplicaRules | str) -> None:
        self.views: dict[str, ReplicaView] = {}
        self.leaving: frozenset[str] = frozenset()
        self.rules: Mapping[str, ReplicaRules | str] = rules
        self.now = 0.0
        self.made = 0
        self.refuses: frozenset[str] = frozenset()
        self.records: dict[str, bytes] = {}
        self.restart()

    def restart(self) -> None:
        """Have a new controller."""
        self.controller = Controller(self, self.files, lambda: self.now)

    def files(self, left_out: LeftOut) -> Mapping[str, ModelFiles | str]:
        """The files of models without versions."""
        return {
            name: each if isinstance(each, str) else ModelFiles(rules=each)
            for name, each in self.rules.items()
        }

    def read_record(self, model: str) -> bytes | None:
        return self.records.get(model)

    def write_record(self, model: str, record: bytes) -> None:
        self.records[model] = record

    def replicas(self) -> Sequence[ReplicaView]:
        return list(self.views.values())

    def draining_nodes(self) -> frozenset[str]:
        return self.leaving

    def make(self, model: str, rules: ReplicaRules) -> None:
        if model in self.refuses:
            raise InferenceError(Code.UNAVAILABLE, "Ray refuses a replica: too large")
        self.made += 1
        name = f"{model}:{self.made}"
        node = f"node{self.made}"
        description = rules.description
        self.views[name] = ReplicaView(
            name=name, model=model, phase=STARTING, description=description, node=node
        )

    def drain(self, name: str) -> None:
        self.change(name, phase=DRAINING)

    def remove(self, name: str) -> None:
        del self.views[name]

    def change(self, name: str, **fields: object) -> None:
        self.views[name] = replace(self.views[name], **fields)  # type: ignore[arg-type]

    def decide(self, times: int = 1) -> dict[str, ReplicaPhase]:
        """Decide, every two seconds; returns the phases then."""
        for _ in range(times):
            self.controller.decide()
            self.now += TICK_SECS
        return {name: each.phase for name, each in self.views.items()}

    def start(self) -> "FakeCluster":
        """Make the replicas, which routers have then reached."""
        self.decide()
        for name in self.views:
            self.change(name, phase=READY)
        self.decide(REACHED_TICKS)
        return self

    @property
    def troubles(self) -> dict[str, str]:
        return {each.model: each.trouble for each in self.controller.status() if each.trouble}


def test_the_replicas_of_every_model_are_made_once() -> None:
    cluster = FakeCluster(a=TWO, b=QUICK)
    expected = {"a:1": STARTING, "a:2": STARTING, "b:3": STARTING}
    assert cluster.decide() == expected
    assert cluster.decide(3) == expected


def test_a_controller_that_was_restarted_keeps_what_is_there() -> None:
    cluster = FakeCluster(a=TWO).start()
    cluster.restart()
    assert cluster.decide(3) == {"a:1": READY, "a:2": READY}


def test_a_ready_replica_that_was_lost_is_replaced_at_once() -> None:
    cluster = FakeCluster(a=TWO).start()
    cluster.change("a:1", phase=ENDED, reason="its actor was lost")
    assert cluster.decide() == {"a:2": READY, "a:3": STARTING}
    assert cluster.troubles == {}


def test_a_replica_that_does_not_start_is_replaced_after_longer_and_longer_pauses() -> None:
    cluster = FakeCluster(a=replace(TWO, least=1, most=1))
    made_at = []
    for _ in range(40):
        before = cluster.made
        cluster.decide()
        if cluster.made > before:
            made_at.append(cluster.now)
            cluster.change(f"a:{cluster.made}", phase=ENDED, reason="no such file")
    pauses = [later - sooner for sooner, later in pairwise(made_at)]
    assert pauses == sorted(pauses)
    assert pauses[-1] > 16
    assert cluster.troubles == {"a": "no such file"}


@pytest.mark.parametrize(
    ("phase", "ends"),
    [(STARTING, True), (ReplicaPhase.PENDING, False), (READY, False), (SILENT, False)],
)
def test_a_start_has_an_end_and_the_wait_for_a_place_has_none(
    phase: ReplicaPhase, ends: bool
) -> None:
    cluster = FakeCluster(a=replace(TWO, start_secs=10))
    cluster.decide()
    cluster.change("a:1", phase=READY)
    cluster.change("a:2", phase=ReplicaPhase.PENDING)
    cluster.decide(10)
    cluster.change("a:2", phase=phase)
    assert cluster.decide(5) == {"a:1": READY, "a:2": phase}
    assert cluster.decide(2) == {"a:1": READY, **({"a:3": STARTING} if ends else {"a:2": phase})}
    reason = (
        "it has not become ready within 10 s of its start: look at the log of its actor, or set a "
        "higher 'start_limit_secs' in the parameters of its config.pbtxt"
    )
    assert (cluster.troubles == {"a": reason}) == ends


def test_a_start_at_another_place_has_the_whole_limit() -> None:
    cluster = FakeCluster(a=replace(TWO, least=1, most=1, start_secs=10))
    cluster.decide(4)
    for phase in (ReplicaPhase.PENDING, STARTING):
        cluster.change("a:1", phase=phase)
        assert cluster.decide(4) == {"a:1": phase}
    assert cluster.decide(3) == {"a:2": STARTING}


def test_the_pause_is_over_once_routers_have_reached_a_replica() -> None:
    cluster = FakeCluster(a=replace(TWO, least=1, most=1))
    cluster.decide()
    cluster.change("a:1", phase=ENDED, reason="no such file")
    cluster.decide(3)
    cluster.change("a:2", phase=READY)
    cluster.decide(REACHED_TICKS)
    assert cluster.troubles == {}
    cluster.change("a:2", phase=ENDED, reason="killed")
    assert cluster.decide() == {"a:3": STARTING}


def test_the_failures_of_a_replica_last_while_another_one_is_ready() -> None:
    cluster = FakeCluster(a=TWO)
    cluster.decide()
    cluster.change("a:1", phase=READY)
    before = 0
    for _ in range(40):
        for name, phase in cluster.decide().items():
            if phase is STARTING:
                cluster.change(name, phase=ENDED, reason="no such file")
        before = before or (cluster.made if cluster.now >= 20 else 0)
    assert cluster.made - before <= 3
    assert cluster.troubles == {"a": "no such file"}
    assert cluster.views["a:1"].phase is READY


def test_a_model_that_the_cluster_refuses_has_the_reason_and_the_others_their_replicas() -> None:
    cluster = FakeCluster(a=TWO, b=TWO)
    cluster.refuses = frozenset("a")
    assert cluster.decide() == {"b:1": STARTING, "b:2": STARTING}
    assert cluster.troubles == {"a": "Ray refuses a replica: too large"}
    cluster.decide(4)
    cluster.refuses = frozenset()
    assert "a:3" not in cluster.decide()
    assert "a:3" in cluster.decide(4)


def test_a_replica_that_is_lost_within_a_range_is_replaced_at_once() -> None:
    cluster = FakeCluster(a=QUICK).start()
    cluster.change("a:1", need=1.8)
    cluster.decide(3)
    cluster.change("a:2", phase=READY)
    cluster.decide()
    cluster.change("a:1", phase=ENDED, reason="its actor was lost")
    assert cluster.decide() == {"a:2": READY, "a:3": STARTING}


def test_replicas_come_with_the_need_and_end_without_it() -> None:
    cluster = FakeCluster(a=QUICK).start()
    cluster.change("a:1", need=2.5)
    assert cluster.decide(3) == {"a:1": READY, "a:2": STARTING, "a:3": STARTING}
    cluster.change("a:1", need=0.5)
    cluster.change("a:2", phase=READY, need=0.2)
    assert cluster.decide(6)["a:1"] is READY
    assert "a:3" not in cluster.views
    assert cluster.views["a:2"].phase is DRAINING


def test_a_starting_replica_ends_before_an_idle_and_an_idle_before_a_busy_one() -> None:
    cluster = FakeCluster(a=replace(QUICK, least=3)).start()
    cluster.change("a:1", need=0.3)
    cluster.change("a:3", phase=STARTING)
    cluster.rules = {"a": replace(QUICK, least=2, most=2)}
    assert cluster.decide() == {"a:1": READY, "a:2": READY}
    cluster.rules = {"a": replace(QUICK, least=1, most=1)}
    assert cluster.decide() == {"a:1": READY, "a:2": DRAINING}


def test_no_replica_ends_for_lack_of_need_while_one_is_silent() -> None:
    cluster = FakeCluster(a=replace(QUICK, least=2)).start()
    cluster.rules = {"a": QUICK}
    cluster.change("a:1", phase=SILENT)
    assert cluster.decide(10) == {"a:1": SILENT, "a:2": READY}
    cluster.change("a:1", phase=READY)
    assert DRAINING in cluster.decide(4).values()


def test_replicas_of_a_draining_node_are_replaced_first_and_then_drained() -> None:
    cluster = FakeCluster(a=TWO).start()
    cluster.leaving = frozenset({"node1"})
    assert cluster.decide(2) == {"a:1": READY, "a:2": READY, "a:3": STARTING}
    cluster.change("a:3", phase=READY)
    assert cluster.decide(REACHED_TICKS - 1)["a:1"] is READY
    assert cluster.decide() == {"a:1": DRAINING, "a:2": READY, "a:3": READY}


def test_a_replica_with_workers_on_a_draining_node_is_replaced() -> None:
    cluster = FakeCluster(a=TWO).start()
    cluster.change("a:1", further_nodes=frozenset({"node1", "other"}))
    cluster.leaving = frozenset({"other"})
    assert cluster.decide() == {"a:1": READY, "a:2": READY, "a:3": STARTING}


@pytest.mark.parametrize("rules", [QUICK, "line 3 is wrong"], ids=["range", "unreadable"])
def test_a_draining_node_is_left_also_within_a_range_and_by_the_last_rules(
    rules: ReplicaRules | str,
) -> None:
    cluster = FakeCluster(a=QUICK).start()
    cluster.rules = {"a": rules}
    cluster.leaving = frozenset({"node1"})
    assert cluster.decide() == {"a:1": READY, "a:2": STARTING}
    cluster.change("a:2", phase=READY)
    assert cluster.decide(REACHED_TICKS) == {"a:1": DRAINING, "a:2": READY}


def test_a_model_without_a_replica_has_its_rules_while_the_repository_cannot_be_read() -> None:
    cluster = FakeCluster(a=TWO)
    is_readable = True

    def files(left_out: LeftOut) -> Mapping[str, ModelFiles | str]:
        if is_readable:
            return {"a": ModelFiles(rules=TWO)}
        raise InferenceError(Code.INTERNAL, "no such folder")

    cluster.controller = Controller(cluster, files, lambda: cluster.now)
    cluster.decide()
    is_readable = False
    cluster.views.clear()
    assert cluster.decide() == {"a:3": STARTING, "a:4": STARTING}


def test_the_replicas_of_a_model_that_was_removed_are_drained() -> None:
    cluster = FakeCluster(a=TWO).start()
    cluster.change("a:2", phase=STARTING)
    cluster.rules = {}
    assert cluster.decide() == {"a:1": DRAINING}
    cluster.remove("a:1")
    cluster.decide()
    assert cluster.controller.status() == []


def test_a_model_whose_configuration_cannot_be_read_keeps_its_replicas() -> None:
    cluster = FakeCluster(a=TWO).start()
    cluster.rules = {"a": "line 3 is wrong"}
    assert cluster.decide(3) == {"a:1": READY, "a:2": READY}
    assert cluster.troubles == {"a": "line 3 is wrong"}


def test_replicas_are_kept_while_the_repository_cannot_be_read() -> None:
    cluster = FakeCluster(a=TWO).start()

    def unreadable(left_out: LeftOut) -> Mapping[str, ModelFiles | str]:
        raise InferenceError(Code.INTERNAL, "no such folder")

    cluster.controller = Controller(cluster, unreadable, lambda: cluster.now)
    assert cluster.decide(3) == {"a:1": READY, "a:2": READY}
    assert cluster.troubles == {"a": "no such folder"}


@pytest.mark.parametrize(
    ("phase", "trouble"),
    [
        (ReplicaPhase.INFEASIBLE, "no node has 8 GPU, 1 CPU with zone=a"),
        (ReplicaPhase.PENDING, "no node has 8 GPU, 1 CPU free with zone=a"),
    ],
)
def test_a_replica_without_a_place_has_the_reason(phase: ReplicaPhase, trouble: str) -> None:
    rules = ReplicaRules(resources={"GPU": 8, "CPU": 1}, labels={"zone": "a"})
    cluster = FakeCluster(a=rules)
    cluster.decide()
    cluster.change("a:1", phase=phase, node="")
    cluster.decide()
    assert cluster.troubles == {"a": trouble}


def test_a_replica_without_places_for_its_workers_has_the_reason() -> None:
    cluster = FakeCluster(a=ReplicaRules(bundles=[{"GPU": 1}] * 2, labels={"zone": "a"}))
    cluster.decide()
    cluster.change("a:1", phase=ReplicaPhase.PENDING, node="")
    cluster.decide()
    assert cluster.troubles == {"a": "the nodes do not have 2 x (1 GPU) free with zone=a"}


def read(repository: Repository) -> Mapping[str, ReplicaRules | str]:
    """The rules of each model."""
    found = repository.files(LeftOut())
    return {name: each if isinstance(each, str) else each.rules for name, each in found.items()}


def settled(repository: Repository) -> Mapping[str, ReplicaRules | str]:
    """The rules after a change: they hold once they have been read twice."""
    read(repository)
    return read(repository)


def test_rules_follow_the_engine_in_the_files_of_a_model(tmp_path: Path) -> None:
    file = add_model(tmp_path, "m", 'backend: "vllm"') / "1" / "model.json"
    repository = Repository([str(tmp_path)], "")
    for size in (2, 3):
        file.write_text(
            f'{{"tensor_parallel_size": {size}, "distributed_executor_backend": "ray"}}'
        )
        found = settled(repository)["m"]
        assert isinstance(found, ReplicaRules)
        assert found.bundles == ({"GPU": 1, "CPU": 1},) * size
        assert found.resources == {}


def test_rules_are_read_again_from_the_repository(tmp_path: Path) -> None:
    add_model(tmp_path, "m", "")
    add_model(tmp_path, "n", "parameters { key: 'replicas' value { string_value: '0' } }")
    repository = Repository([str(tmp_path)], "")
    found = read(repository)
    assert isinstance(found["m"], ReplicaRules)
    assert replace(found["m"], description="") == ReplicaRules(resources={"CPU": 1})
    assert found["n"] == (
        "model 'n': parameter 'replicas' is '0', expected a number from 1 to 9999, or a range "
        "such as 0..8"
    )
    config = "parameters { key: 'replicas' value { string_value: '2' } }"
    (tmp_path / "m" / "config.pbtxt").write_text(config)
    again = settled(repository)["m"]
    assert isinstance(again, ReplicaRules)
    assert again.most == 2


def test_a_config_that_is_half_written_changes_no_rules(tmp_path: Path) -> None:
    config = "parameters { key: 'replicas' value { string_value: '%d' } }"
    file = add_model(tmp_path, "m", config % 2) / "config.pbtxt"
    repository = Repository([str(tmp_path)], "")
    before = read(repository)
    file.write_text("")
    assert read(repository) == before
    file.write_text(config % 3)
    assert read(repository) == before
    again = read(repository)["m"]
    assert isinstance(again, ReplicaRules)
    assert again.most == 3
