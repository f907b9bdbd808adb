"""The replicas of a fleet, as calls of Ray have them: the test answers these calls."""

import io
import os
import queue
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.errors import Code, InferenceError
from gateway.fleet.ray_addresses import RayFleet, RayQuestion, RayTable, encode
from gateway.fleet.ray_controller import ModelStatus
from gateway.fleet.ray_news import ModelNews
from gateway.fleet.ray_views import ReplicaPhase, ReplicaView
from gateway.models.replicas import ReplicaRules
from tests.fleet.fake_ray import NAME, FakeRay

pytestmark = pytest.mark.ray


def test_a_placed_replica_that_never_answered_is_silent_and_may_have_requests(
    fake: FakeRay,
) -> None:
    from gateway.fleet.ray_cluster import RayCluster

    fake.add(NAME, None)
    cluster = RayCluster(RayFleet("f"))
    assert [each.phase for each in cluster.replicas()] == [ReplicaPhase.SILENT]
    fake.add(NAME, ReplicaPhase.STARTING)
    cluster.replicas()
    fake.add(NAME, None)
    for _ in range(2):
        assert [each.phase for each in cluster.replicas()] == [ReplicaPhase.STARTING]
    fake.add(NAME, ReplicaPhase.READY)
    cluster.replicas()
    fake.add(NAME, None)
    assert [each.phase for each in cluster.replicas()] == [ReplicaPhase.SILENT]


def test_the_name_of_a_replica_has_its_model_and_its_description(fake: FakeRay) -> None:
    from gateway.fleet.ray_cluster import RayCluster

    fake.add("sluice:f:a:m:0badcafe-1", None)
    (found,) = RayCluster(RayFleet("f")).replicas()
    assert (found.model, found.description) == ("a:m", "0badcafe")


def test_routers_get_the_addresses_of_replicas_of_earlier_descriptions() -> None:
    from gateway.fleet.ray_directory import table

    def replica(port: int, phase: ReplicaPhase, description: str) -> ReplicaView:
        own: dict[str, Any] = {"phase": phase, "description": description, "port": port}
        return ReplicaView(name=f"{port}", model="m", host="h", **own)

    replicas = [
        replica(1, ReplicaPhase.READY, "new"),
        replica(2, ReplicaPhase.READY, "old"),
        replica(3, ReplicaPhase.DRAINING, "old"),
        replica(0, ReplicaPhase.STARTING, "old"),
    ]
    status = ModelStatus(model="m", wanted=2, need=0.0, replicas=replicas, description="new")
    found = table([status], "cluster", {})
    assert found.replicas == (("h", 1), ("h", 2), ("h", 3))
    assert found.outdated == (("h", 2), ("h", 3))
    assert found.models == {"m": ModelNews(description="new")}


class Asked:
    """The questions of a child process, each of which takes a second, and the time of all."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from gateway.fleet import ray_cluster, ray_directory, ray_state

        self.now, self.cluster = 100.0, "one"
        self.error: InferenceError | None = None
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=self._sleep)
        no_thread = SimpleNamespace(Thread=lambda **own: SimpleNamespace(start=int))
        for module, name, answer in (
            (ray_directory, "time", clock),
            (ray_directory, "threading", no_thread),
            (ray_state, "connect", lambda: None),
            (ray_state, "cluster_id", lambda: "one"),
            (ray_state, "found_cluster", lambda: self.cluster),
            (ray_cluster, "make_controller", lambda fleet: None),
            (ray_cluster, "next_status", self._next_status),
        ):
            monkeypatch.setattr(module, name, answer)
        self.tables = ray_directory._tables(RayQuestion(RayFleet("f")))  # noqa: SLF001

    def _sleep(self, secs: float) -> None:
        self.now += secs

    def _next_status(self, fleet: str) -> tuple[ModelStatus, ...]:
        if self.error is not None:
            raise self.error
        return ()

    def secs_to_the_end(self, most: int) -> float | None:
        """The time after which the child process ends, None if there are as many tables before."""
        began_at = self.now
        tables = list(islice(self.tables, most))
        assert all(self.error is None or each.reason for each in tables)
        return self.now - began_at if len(tables) < most else None


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    return Asked(monkeypatch)


MISSING = InferenceError(Code.NOT_FOUND, "no controller")
SLOW = InferenceError(Code.UNAVAILABLE, "no decision for 15 s")


@pytest.mark.parametrize(("cluster", "ends"), [("two", False), ("one", True), ("", True)])
def test_a_fleet_without_a_controller_has_ended_unless_its_cluster_was_restarted(
    asked: Asked, cluster: str, ends: bool
) -> None:
    asked.error, asked.cluster = MISSING, cluster
    expected = RayTable(reason="no controller", cluster="one", is_ended=ends)
    assert next(asked.tables) == expected


def test_a_child_process_that_does_not_reach_the_controller_of_a_head_that_answers_ends(
    asked: Asked,
) -> None:
    from gateway.fleet.ray_state import UnreachedError

    next(asked.tables)
    unreached = UnreachedError(Code.UNAVAILABLE, "connection refused")
    asked.error, asked.cluster = unreached, ""
    assert asked.secs_to_the_end(100) is None
    asked.cluster = "one"
    assert asked.secs_to_the_end(15) is None
    asked.error = None
    next(asked.tables)
    asked.error = unreached
    assert asked.secs_to_the_end(100) == 20


@pytest.mark.parametrize("error", [MISSING, SLOW])
def test_a_child_process_waits_for_a_controller_that_was_ended_or_decides_slowly(
    asked: Asked, error: InferenceError
) -> None:
    asked.error = error
    assert asked.secs_to_the_end(100) is None


STATUS = {"model": "m", "wanted": 1, "need": 0.5, "replicas": [{"name": "r", "model": "m"}]}


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ([{"of": "the release before"}], "a bytes-like object is required"),
        (encode([STATUS]), "Object missing required field `phase`"),
    ],
    ids=["pickled", "without-a-field"],
)
def test_a_controller_that_cannot_be_read_is_a_reason(
    fake: FakeRay, answer: object, reason: str
) -> None:
    from gateway.fleet import ray_cluster

    fake.views["sluice:f"] = answer
    with pytest.raises(InferenceError) as caught:
        ray_cluster.next_status("f")
    start = "the controller of fleet 'f' is of another release, whose answer cannot be read: "
    assert caught.value.code is Code.UNAVAILABLE
    assert caught.value.message.startswith(start + reason)


def test_a_controller_that_lacks_a_method_is_of_another_release(fake: FakeRay) -> None:
    from gateway.fleet import ray_cluster

    fake.views["sluice:f"] = encode([])
    with pytest.raises(InferenceError) as caught:
        ray_cluster.report("f", "router", b"{}")
    assert caught.value.code is Code.UNAVAILABLE
    assert caught.value.message == (
        "the controller of fleet 'f' is of another release, which has no 'report'; end it with "
        "`sluice fleet down`"
    )


def test_a_wrong_value_in_the_controller_is_no_lack_of_a_controller(
    fake: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray.exceptions import RayTaskError

    from gateway.fleet import ray_cluster

    def fail(asked: str, timeout: float) -> None:
        raise RayTaskError(
            "report", "Traceback\nValueError: bad", ValueError("bad")
        ).as_instanceof_cause()

    fake.views["sluice:f"] = encode([])
    monkeypatch.setattr(fake, "get", fail)
    with pytest.raises(InferenceError) as caught:
        ray_cluster.next_status("f")
    text = "the controller of fleet 'f' does not answer: ValueError: bad"
    assert (caught.value.code, caught.value.message) == (Code.UNAVAILABLE, text)


def test_a_controller_of_a_later_release_is_read_by_the_names_of_fields(fake: FakeRay) -> None:
    from gateway.fleet import ray_cluster

    replica = {"new": 1, "phase": "READY", "model": "m", "name": "r"}
    fake.views["sluice:f"] = encode([{"new": 1, **STATUS, "replicas": [replica]}])
    (found,) = ray_cluster.next_status("f")
    view = ReplicaView(name="r", model="m", phase=ReplicaPhase.READY)
    assert found == ModelStatus(model="m", wanted=1, need=0.5, replicas=[view])


def test_a_replica_whose_view_cannot_be_read_is_silent(fake: FakeRay) -> None:
    from gateway.fleet.ray_cluster import RayCluster

    fake.add(NAME, ReplicaPhase.READY)
    fake.views[NAME] = encode({"name": NAME})
    assert [each.phase for each in RayCluster(RayFleet("f")).replicas()] == [ReplicaPhase.SILENT]


def test_only_the_last_line_of_a_router_waits_for_the_controller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from gateway.fleet import ray_directory

    monkeypatch.setattr(os, "_exit", lambda status: None)
    lines = queue.Queue[bytes](1)
    ray_directory._read(io.BytesIO(b"1\n2\n3\n"), lines)  # noqa: SLF001 - a pipe of a child process
    assert [lines.get_nowait(), lines.empty()] == [b"3\n", True]


def test_the_group_of_an_actor_that_ray_refuses_is_removed(fake: FakeRay) -> None:
    from gateway.fleet.ray_cluster import RayCluster

    with pytest.raises(InferenceError) as caught:
        RayCluster(RayFleet("f")).make("m", ReplicaRules(resources={"GPU": 1}))
    text = "Ray refuses a replica: a whole number of GPUs"
    assert (caught.value.code, caught.value.message) == (Code.UNAVAILABLE, text)
    assert fake.groups == set()


@pytest.mark.parametrize(
    ("rules", "bundles", "strategy", "taken", "use"),
    [
        (
            ReplicaRules(resources={"GPU": 2, "CPU": 3, "stub": 1}, labels={"zone": "a"}),
            [{"GPU": 2, "CPU": 3, "stub": 1}],
            *("STRICT_PACK", (3, 2, {"stub": 1}), "OWN"),
        ),
        (
            ReplicaRules(resources={"CPU": 1}, labels={"zone": "a"}),
            [{"CPU": 1}],
            *("STRICT_PACK", (1, 0, {}), "NONE"),
        ),
        (
            ReplicaRules(bundles=({"GPU": 1, "CPU": 2}, {"GPU": 1}), labels={"zone": "a"}),
            [{"GPU": 1, "CPU": 2}, {"GPU": 1}],
            *("PACK", (0, 0, {}), "OF_WORKERS"),
        ),
    ],
    ids=["gpus", "cpu", "workers"],
)
def test_a_replica_takes_its_bundle_and_leaves_those_of_workers(
    fake: FakeRay, rules: ReplicaRules, bundles: Any, strategy: str, taken: Any, use: str
) -> None:
    from gateway.fleet.ray_cluster import RayCluster

    fake.takes_actors = True
    RayCluster(RayFleet("f")).make("m", rules)
    (group, placing), (arguments, options) = fake.placed
    assert (group, placing["strategy"]) == (bundles, strategy)
    assert placing["bundle_label_selector"] == [{"zone": "a"}] * len(bundles)
    assert (options["num_cpus"], options["num_gpus"], options["resources"]) == taken
    assert arguments[-1].name == use


def test_a_list_of_labels_reaches_ray_without_spaces(fake: FakeRay) -> None:
    from gateway.fleet.ray_cluster import RayCluster

    fake.takes_actors = True
    RayCluster(RayFleet("f")).make("m", ReplicaRules(labels={"zone": "in(a, b)", "c": "!d"}))
    assert fake.placed[0][1]["bundle_label_selector"] == [{"zone": "in(a,b)", "c": "!d"}]


def test_a_replica_is_on_the_nodes_of_its_workers_too(fake: FakeRay) -> None:
    from gateway.fleet.ray_cluster import RayCluster

    fake.add(NAME, ReplicaPhase.READY)
    fake.nodes = {0: "n", 1: "o"}
    (found,) = RayCluster(RayFleet("f")).replicas()
    assert [found.is_on({each}) for each in ("n", "o", "p")] == [True, True, False]


def test_the_end_of_a_fleet_includes_replicas_that_come_meanwhile(fake: FakeRay) -> None:
    from gateway.fleet.ray_cluster import end_fleet

    fake.add(NAME, ReplicaPhase.READY)
    fake.late = ["sluice:f:m:2"]
    assert end_fleet("f", drain_secs=60) == 2
    assert (fake.groups, fake.views) == (set(), {})


@pytest.mark.timeout(30)
def test_a_replica_that_does_not_drain_ends_when_the_time_is_over(
    fake: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gateway.fleet.ray_cluster import end_fleet

    monkeypatch.setattr(fake, "drain", lambda name: None)
    fake.add(NAME, ReplicaPhase.READY)
    assert end_fleet("f", drain_secs=0) == 1
    assert (fake.groups, fake.views) == (set(), {})


def test_the_end_of_a_fleet_that_another_controller_makes_again_has_an_end(
    fake: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gateway.fleet import ray_cluster

    monkeypatch.setattr(ray_cluster, "END_SECS", 0.3)
    monkeypatch.setattr(fake, "kill", lambda actor: None)
    monkeypatch.setattr(ray_cluster, "remove_placement_group", lambda name: None)
    fake.add(NAME, ReplicaPhase.READY)
    with pytest.raises(InferenceError) as caught:
        ray_cluster.end_fleet("f", drain_secs=0)
    assert caught.value.code is Code.UNAVAILABLE
    text = "fleet 'f' still has replicas, 0.3 s after the limit of their drain"
    expected = f"{text}: {NAME}; a router that began meanwhile"
    assert caught.value.message.startswith(expected)


def test_an_end_of_a_fleet_without_an_answer_of_ray_has_its_reason(
    fake: FakeRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray.exceptions import RpcError

    from gateway.fleet.ray_cluster import end_fleet

    def refuse(name: str, namespace: str) -> None:
        raise RpcError("GCS gone", rpc_code=14)

    monkeypatch.setattr(fake, "get_actor", refuse)
    with pytest.raises(InferenceError) as caught:
        end_fleet("f", drain_secs=0)
    assert caught.value.code is Code.UNAVAILABLE
    assert caught.value.message.startswith("the state of the cluster does not answer: GCS gone")
