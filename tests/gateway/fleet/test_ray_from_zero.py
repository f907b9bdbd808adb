"""The decisions of the controller on Ray on a model that may have no replicas, in virtual time."""

from dataclasses import replace

import pytest

from gateway.fleet.ray_news import KEPT_SECS, RouterNews, described
from gateway.fleet.ray_views import ReplicaPhase
from gateway.models.replicas import ReplicaRules
from tests.builders import TEXT
from tests.gateway.fleet.fake_replica import offered
from tests.gateway.fleet.test_ray_controller import (
    DRAINING,
    ENDED,
    QUICK,
    READY,
    STARTING,
    TICK_SECS,
    TWO,
    FakeCluster,
)

ZERO = replace(QUICK, least=0, to_zero_secs=4)
OFFERS = {"a": (offered(TEXT),)}


def known(description: str = "") -> RouterNews:
    """The news of a router that has seen a replica of that description."""
    return RouterNews(offers=OFFERS, descriptions={"a": description})


def at_zero() -> FakeCluster:
    """A cluster with a model that has no replicas, and is known."""
    cluster = FakeCluster(a=ZERO)
    cluster.controller.heard.take("r", known())
    cluster.now = KEPT_SECS
    assert cluster.decide(3) == {}
    return cluster


def test_a_model_that_no_router_knows_has_one_replica_until_one_does() -> None:
    cluster = FakeCluster(a=ZERO)
    assert cluster.decide(int(KEPT_SECS / TICK_SECS)) == {}  # routers may know it
    assert cluster.decide() == {"a:1": STARTING}
    cluster.change("a:1", phase=READY)
    assert cluster.decide(20) == {"a:1": READY}
    assert cluster.controller.status()[0].known == ""
    cluster.controller.heard.take("r", known())
    assert cluster.decide(4) == {"a:1": DRAINING}
    assert cluster.controller.status()[0].known == described(OFFERS["a"])


@pytest.mark.parametrize("is_added", [False, True])
def test_a_model_that_changes_at_zero_has_one_replica_until_a_router_knows_the_change(
    is_added: bool,
) -> None:
    cluster = at_zero()
    cluster.rules = {} if is_added else cluster.rules
    cluster.decide()
    cluster.rules = {"a": replace(ZERO, description="new")}
    assert cluster.decide() == {"a:1": STARTING}
    assert cluster.controller.status()[0].known == ""
    cluster.controller.heard.take("r", known())  # of a router that has not heard of the change
    cluster.change("a:1", phase=READY)
    assert cluster.decide(20) == {"a:1": READY}
    cluster.controller.heard.take("r", known("new"))
    assert cluster.decide(4) == {"a:1": DRAINING}
    assert cluster.controller.status()[0].known == described(OFFERS["a"])


def test_a_model_that_is_removed_and_added_without_a_change_stays_known() -> None:
    cluster = at_zero()
    cluster.rules, before = {}, cluster.rules
    cluster.decide()
    cluster.rules = before
    assert cluster.decide(10) == {}


def test_the_needs_of_routers_ask_for_one_start_and_hold_for_some_seconds() -> None:
    cluster = at_zero()
    for router in ("r", "s"):
        cluster.controller.heard.take(router, RouterNews(needs={"a": 2.5}))
    assert cluster.decide() == {"a:1": STARTING}
    assert cluster.controller.status()[0].need == 5
    assert cluster.decide(3) == {"a:1": STARTING}
    cluster.controller.heard.take("r", RouterNews(needs={"a": 2.5}))
    cluster.controller.heard.take("s", RouterNews())
    cluster.change("a:1", phase=READY)
    assert cluster.decide(2) == {"a:1": READY, "a:2": STARTING, "a:3": STARTING}
    cluster.decide(4)
    assert cluster.controller.status()[0].need == 0
    assert DRAINING in cluster.decide(8).values()


def test_a_start_that_fails_is_the_reason_until_the_model_is_at_zero_again() -> None:
    cluster = at_zero()
    cluster.controller.heard.take("r", RouterNews(needs={"a": 0.01}))
    cluster.decide()
    assert cluster.controller.status()[0].refusal == ""
    cluster.change("a:1", phase=ENDED, reason="no such file")
    cluster.decide()
    assert cluster.controller.status()[0].refusal == "no such file"
    for name in cluster.decide(8):
        cluster.change(name, phase=ENDED, reason="no such file")
    cluster.decide()
    assert cluster.controller.status()[0].refusal == ""
    cluster.controller.heard.take("r", RouterNews(needs={"a": 0.01}))
    assert list(cluster.decide().values()) == [STARTING]
    assert cluster.controller.status()[0].refusal == ""


def test_clients_get_the_first_line_of_a_reason_and_not_the_log() -> None:
    cluster = FakeCluster(a=TWO)
    cluster.decide()
    reason = 'it ended with status -11\n  File "/srv/model.py", line 5'
    for name in list(cluster.decide()):
        cluster.change(name, phase=ENDED, reason=reason)
    cluster.decide()
    (found,) = cluster.controller.status()
    assert (found.trouble, found.refusal) == (reason, "it ended with status -11")


@pytest.mark.parametrize(
    ("reason", "refusal"),
    [
        (
            "--fleet-secret-file '/srv/my private/secret' cannot be read: No such file",
            "--fleet-secret-file (a path) cannot be read: No such file",
        ),
        (
            "it ended with status 1: m version 1: [Errno 2] No such file: '/srv/w.bin'; p: x",
            "it ended with status 1: m version 1: [Errno 2] No such file: (a path); p: x",
        ),
        ("no ~/w.bin, file:///srv/w, (/srv/w).", "no (a path), file:(a path), ((a path))."),
        ('model "/srv/it\'s mine/m" is bad', "model (a path) is bad"),
        ("it's '/srv/o'brien/x y', isn't it", "it's (a path), isn't it"),
        ("no 's3://b/a b/c' and 'https://h/my m/x'", "no (a path) and (a path)"),
        ("cc -I/usr/my-include -L/x and/or a-b/c", "cc -I(a path) -L(a path) and/or a-b/c"),
        ("no node has 8 GPU with ray.io/accelerator-type=H100 and / or zone=a", ""),
        ("backend 'none' of 'org/m' is not text/plain", ""),
    ],
    ids=["option", "error", "bare", "quotes", "apostrophe", "urls", "flags", "labels", "names"],
)
def test_clients_get_no_paths_of_the_nodes_and_the_status_has_them(
    reason: str, refusal: str
) -> None:
    cluster = FakeCluster(a=TWO)
    cluster.decide()
    for name in list(cluster.decide()):
        cluster.change(name, phase=ENDED, reason=reason)
    cluster.decide()
    (found,) = cluster.controller.status()
    assert (found.trouble, found.refusal) == (reason, refusal or reason)


@pytest.mark.parametrize(
    ("phase", "refusal"),
    [
        (ReplicaPhase.INFEASIBLE, "no node has 8 GPU"),
        (ReplicaPhase.PENDING, ""),
        (ReplicaPhase.STARTING, ""),
    ],
)
def test_only_what_no_node_could_have_is_refused(phase: ReplicaPhase, refusal: str) -> None:
    cluster = FakeCluster(a=ReplicaRules(resources={"GPU": 8}))
    cluster.decide()
    cluster.change("a:1", phase=phase)
    cluster.decide()
    assert cluster.controller.status()[0].refusal == refusal


def test_a_model_with_a_replica_refuses_nothing() -> None:
    cluster = FakeCluster(a=TWO).start()
    cluster.change("a:1", phase=ReplicaPhase.INFEASIBLE)
    cluster.decide()
    assert cluster.controller.status()[0].trouble != ""
    assert cluster.controller.status()[0].refusal == ""


def test_a_model_whose_rules_were_never_read_is_refused() -> None:
    cluster = FakeCluster(a="line 3 is wrong")
    cluster.decide()
    assert cluster.controller.status()[0].refusal == "line 3 is wrong"
