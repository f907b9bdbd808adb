"""Actors on Ray that fail: the reason is that of Ray's library, which the test plays."""

import asyncio
from types import SimpleNamespace

import pytest

from gateway.fleet.ray_addresses import RayFleet, encode
from gateway.fleet.ray_views import ReplicaPhase
from gateway.models.replicas import ReplicaRules
from tests.fleet.fake_ray import NAME, FakeRay

pytestmark = pytest.mark.ray

FAILED = "The actor died: ray::ReplicaActor.__init__()\n  File x\nModuleNotFoundError: no gateway\n"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (FAILED, "its actor was lost: ModuleNotFoundError: no gateway"),
        (None, "its actor was lost"),
    ],
    ids=["answered", "silent"],
)
def test_the_end_of_an_actor_that_was_asked_has_its_cause(
    fake: FakeRay, answer: str | None, reason: str
) -> None:
    from gateway.fleet.ray_cluster import RayCluster

    cluster = RayCluster(RayFleet("f"))
    fake.add(NAME, None)
    cluster.replicas()
    if answer is not None:
        fake.lost[NAME] = answer
    del fake.views[NAME]
    (found,) = cluster.replicas()
    assert (found.phase, found.reason) == (ReplicaPhase.ENDED, reason)


def test_a_failure_of_an_actor_that_answers_again_is_not_the_cause_of_its_later_loss(
    fake: FakeRay,
) -> None:
    from gateway.fleet.ray_cluster import RayCluster

    cluster = RayCluster(RayFleet("f"))
    fake.add(NAME, ReplicaPhase.READY)
    fake.lost[NAME] = "The actor is unavailable"
    cluster.replicas()
    fake.lost.clear()
    (found,) = cluster.replicas()
    assert found.phase is ReplicaPhase.READY
    del fake.views[NAME]
    (found,) = cluster.replicas()
    assert found.reason == "its actor was lost"


def test_actors_that_are_listed_once_more_after_their_removal_leave_no_causes(
    fake: FakeRay,
) -> None:
    from gateway.fleet.ray_cluster import RayCluster

    cluster = RayCluster(RayFleet("f"))
    for number in range(3):
        name = f"{NAME}{number}"
        fake.add(name, ReplicaPhase.READY)
        cluster.replicas()
        cluster.remove(name)
        fake.views[name] = None
        fake.lost[name] = "The actor died"
        assert cluster.replicas() == []
        del fake.views[name]
        assert cluster._causes == {}  # noqa: SLF001 - its size is the subject
    assert cluster._asked == {}  # noqa: SLF001 - likewise


def test_an_actor_that_fails_at_its_start_has_been_asked(fake: FakeRay) -> None:
    from gateway.fleet.ray_cluster import RayCluster

    fake.takes_actors = True
    cluster = RayCluster(RayFleet("f"))
    cluster.make("m", ReplicaRules(resources={"CPU": 1}))
    (name,) = fake.groups
    fake.lost[name] = FAILED
    (found,) = cluster.replicas()
    assert found.reason == "its actor was lost: ModuleNotFoundError: no gateway"


@pytest.mark.parametrize(
    ("waits", "is_restarted"),
    [(False, False), (True, False), (True, True)],
    ids=["placed", "waits", "waits-for-a-restarted-controller"],
)
def test_a_replica_that_was_made_is_starting_until_its_actor_answers(
    fake: FakeRay, waits: bool, is_restarted: bool
) -> None:
    from gateway.fleet.ray_cluster import RayCluster

    fake.takes_actors = True
    cluster = RayCluster(RayFleet("f"))
    cluster.make("m", ReplicaRules(resources={"CPU": 1}))
    (name,) = fake.groups
    fake.views[name] = None
    if is_restarted:
        cluster = RayCluster(RayFleet("f"))
    if waits:
        fake.nodes = {}
        assert [each.phase for each in cluster.replicas()] == [ReplicaPhase.PENDING]
        fake.nodes = {0: "n"}
    for _ in range(2):
        assert [each.phase for each in cluster.replicas()] == [ReplicaPhase.STARTING]
    fake.add(name, ReplicaPhase.READY)
    assert [each.phase for each in cluster.replicas()] == [ReplicaPhase.READY]
    fake.views[name] = None
    assert [each.phase for each in cluster.replicas()] == [ReplicaPhase.SILENT]


async def test_a_status_without_a_decision_has_the_reason_of_the_last_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from gateway.fleet import ray_cluster

    failures = [OSError("no table")] * 2

    def decide() -> None:
        if failures:
            raise failures.pop()

    monkeypatch.setattr(
        ray_cluster,
        "Controller",
        lambda *arguments: SimpleNamespace(decide=decide, status=lambda: ()),
    )
    monkeypatch.setattr(ray_cluster, "DECISION_SECS", 0.5)
    monkeypatch.setattr(ray_cluster, "DECIDED_SECS", 0.3)
    controller = ray_cluster.ControllerActor(RayFleet("f"))
    with pytest.raises(TimeoutError, match=r"^no decision for 0\.3 s: no table$"):
        await controller.next_status()
    monkeypatch.setattr(ray_cluster, "DECIDED_SECS", 20)
    assert await controller.next_status() == encode(())
    assert not failures
    for each in asyncio.all_tasks() - {asyncio.current_task()}:
        each.cancel()
