"""The replicas of a fleet, as calls of Ray have them: the test answers these calls."""

import io
import os
import queue
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.errors import Code, InferenceError
from gateway.fleet.ray_addresses import RayFleet, RayQuestion, RayTable, encode
from gateway.fleet.ray_controller import ModelStatus
from gateway.fleet.ray_news import ModelNews
from gateway.fleet.ray_views import ReplicaPhase, ReplicaView
from gateway.models.replicas import ReplicaRules

pytestmark = pytest.mark.ray

NAME = "sluice:f:m:1"


class FakeRay:
    """Calls of Ray on groups and actors in memory; an actor without a view does not answer."""

    def __init__(self) -> None:
        self.groups: set[str] = set()
        self.views: dict[str, object] = {}
        self.late: list[str] = []
        self.placed: list[Any] = []
        self.takes_actors = False
        self.nodes = {0: "n"}

    def add(self, name: str, phase: ReplicaPhase | None) -> None:
        """Add a replica that is placed."""
        self.groups.add(name)
        found = phase and ReplicaView(name=name, model="m", phase=phase, node="n")
        self.views[name] = found and encode(found)

    def placement_group_table(self) -> dict[str, Any]:
        placed = {"state": "CREATED", "bundles_to_node_id": self.nodes}
        return {name: {"name": name, **placed} for name in self.groups}

    def list_named_actors(self, all_namespaces: bool) -> list[dict[str, str]]:
        assert all_namespaces
        return [{"name": name, "namespace": "sluice"} for name in self.views]

    def placement_group(self, bundles: Sequence[Any], *, name: str, **options: Any) -> str:
        self.groups.add(name)
        self.placed.append((bundles, options))
        return name

    def get_placement_group(self, name: str) -> str:
        if name not in self.groups:
            raise ValueError(name)
        return name

    def remove_placement_group(self, name: str) -> None:
        self.groups.remove(name)

    def get_actor(self, name: str, namespace: str) -> Any:
        if name not in self.views:
            raise ValueError(name)
        calls = {"drain": lambda: self.drain(name)}
        calls |= dict.fromkeys(("view", "next_status", "name"), lambda: name)
        return SimpleNamespace(**{key: SimpleNamespace(remote=call) for key, call in calls.items()})

    def drain(self, name: str) -> None:
        """End a replica, upon which a late one comes."""
        self.add(name, ReplicaPhase.ENDED)
        for each in self.late:
            self.add(each, ReplicaPhase.READY)
        self.late.clear()

    def kill(self, actor: Any) -> None:
        del self.views[actor.name.remote()]

    def wait(self, asked: list[str], **options: Any) -> tuple[list[str], list[str]]:
        return [name for name in asked if self.views[name]], []

    def get(self, asked: str, timeout: float = 0.0) -> object:
        return self.views[asked]

    def remote(self, kind: type) -> Any:
        def made(**options: Any) -> Any:
            def make(*arguments: Any) -> None:
                if not self.takes_actors:
                    raise ValueError("a whole number of GPUs")
                self.placed.append((arguments, options))

            return SimpleNamespace(remote=make)

        return SimpleNamespace(options=made)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    from gateway.fleet import ray_cluster

    found = FakeRay()
    monkeypatch.setattr(ray_cluster, "ray", found)
    monkeypatch.setattr(ray_cluster, "PlacementGroupSchedulingStrategy", lambda *given: None)
    for name in (
        *("placement_group", "placement_group_table", "list_named_actors"),
        *("get_placement_group", "remove_placement_group"),
    ):
        monkeypatch.setattr(ray_cluster, name, getattr(found, name))
    return found


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


@pytest.mark.parametrize(("is_restarted", "ends"), [(True, False), (False, True)])
def test_a_fleet_without_a_controller_has_ended_unless_its_cluster_was_restarted(
    monkeypatch: pytest.MonkeyPatch, is_restarted: bool, ends: bool
) -> None:
    from gateway.fleet import ray_cluster, ray_directory

    def missing(fleet: str) -> None:
        raise InferenceError(Code.NOT_FOUND, "no controller")

    class NoThread:
        def __init__(self, **options: object) -> None:
            """A thread that a test does without."""

        def start(self) -> None:
            """Do nothing."""

    monkeypatch.setattr(ray_directory.threading, "Thread", NoThread)
    for name, answer in (
        ("connect", lambda: None),
        ("cluster_id", lambda: "one"),
        ("make_controller", lambda fleet: None),
        ("next_status", missing),
        ("was_restarted", lambda cluster: is_restarted),
    ):
        monkeypatch.setattr(ray_cluster, name, answer)
    tables = ray_directory._tables(RayQuestion(RayFleet("f")))  # noqa: SLF001
    expected = RayTable(reason="no controller", cluster="one", is_ended=ends)
    assert next(tables) == expected


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


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("\x1b[36mray::C.__init__()\x1b[39m\n  File x\nModuleNotFoundError: no 'm'\n", "no 'm'"),
        ("timed out", "timed out"),
        ("", "RayError"),
    ],
    ids=["traceback", "line", "nothing"],
)
def test_an_error_of_ray_has_its_cause_on_one_line(text: str, cause: str) -> None:
    from ray.exceptions import RayError

    from gateway.fleet.ray_cluster import cause as cause_of

    found = cause_of(RayError(text))
    assert found.endswith(cause)
    assert "\n" not in found
    assert "\x1b" not in found
