"""Guardrails of rollouts on Ray: the counts of all routers in one test."""

import time

import msgspec
import pytest

from gateway.fleet.ray_evidence import EvidencePart, FleetEvidence, RouterEvidence
from gateway.fleet.ray_news import RouterNews
from gateway.rollouts.changes import RolloutAction
from gateway.rollouts.guardrails import read_guardrails
from gateway.rollouts.observation import Arm
from gateway.rollouts.plan import Reaction
from gateway.rollouts.sequential_test import Counts
from tests.gateway.fleet.rolling import PLAN, RollingCluster

OLD, NEW = "1ax", "2ax"
MS, SECOND = 1_000_000, 1_000_000_000
USUAL_MS, SLOW_MS = 5, 50
SLOW_PLAN = msgspec.structs.replace(PLAN, guardrails={"slow_first_response": {}})


def observe(router: RouterEvidence, arm: Arm, began_ns: int, first_ms: int) -> None:
    """Let a request pass a router, whose first response is its last one."""
    found = router.blocks.tap(arm)
    assert found is not None
    found.received_ns = found.admitted_ns = began_ns
    router.blocks.admit(found)
    found.first_ns = found.last_ns = found.ended_ns = began_ns + first_ms * MS
    found.complete = True
    router.blocks.end(found)


@pytest.mark.parametrize(
    ("first_ms", "state", "shown"),
    [(USUAL_MS, "step", {OLD: 2, NEW: 1}), (SLOW_MS, "rolled_back", {OLD: 2})],
    ids=["usual", "slow"],
)
def test_a_candidate_that_is_slow_at_its_routers_together_is_rolled_back(
    first_ms: int, state: str, shown: dict[str, int]
) -> None:
    cluster = RollingCluster(2, SLOW_PLAN).rolled()
    cluster.until("step")
    guardrails = read_guardrails(cluster.news.guardrails, "guardrails")
    routers = {name: RouterEvidence(cluster.news.evidence, guardrails) for name in "rs"}
    # A block lasts a second: all of them are over.
    began_ns = time.perf_counter_ns() - 60 * SECOND
    for number in range(100):
        at_ns = began_ns + number * SECOND // 20
        for router in routers.values():
            observe(router, Arm.STABLE, at_ns, USUAL_MS)
            if number >= 60:
                observe(router, Arm.CANDIDATE, at_ns, first_ms)
    for _ in range(3):
        for name, router in routers.items():
            router.acknowledge(cluster.news.heard)
            cluster.controller.heard.take(name, RouterNews(evidence={"m": router.news()}))
        cluster.run()
    assert (cluster.state[0], cluster.shown) == (state, shown)
    by = "guardrail:slow_first_response" if state == "rolled_back" else "server"
    assert cluster.news.history[-1].by == by


def test_a_candidate_that_errs_is_rolled_back_and_begins_anew_with_other_files() -> None:
    cluster = RollingCluster(2).rolled()
    cluster.until("step")
    for ended in range(10, 60, 10):
        cluster.count(ended, events=10)
        cluster.run()
    assert cluster.state == ("rolled_back", 0.0)
    assert cluster.news.history[-1].by == "guardrail:errors"
    assert cluster.shown == {OLD: 2}
    cluster.run(20)
    assert cluster.shown == {OLD: 2}
    cluster.stamps[2] = "b"
    cluster.until("step")
    assert cluster.shown == {OLD: 2, "2bx": 1}


def test_counts_of_several_routers_add_up_and_repeated_ones_count_once() -> None:
    cluster = RollingCluster().rolled()
    cluster.until("step")
    for router in ("r", "s"):
        for _ in range(3):
            cluster.count(ended=7, router=router)
            cluster.run()
    (errors,) = cluster.news.state["guardrails"]
    assert (errors["candidate"]["requests"], errors["stable"]["requests"]) == (14, 40)
    assert cluster.news.heard == {"r": 7, "s": 7}
    assert cluster.news.state["requests"] == 14


@pytest.mark.parametrize(("failures", "state"), [((2, 2), "step"), ((2, 3), "rolled_back")])
def test_first_failures_at_several_routers_are_those_of_one_arrival(
    failures: tuple[int, int], state: str
) -> None:
    cluster = RollingCluster().rolled()
    cluster.until("step")
    for router, count in zip("rs", failures, strict=True):
        cluster.count(count, router=router, keyless=count, has_arrived=False, parts=())
    cluster.run(2)
    assert cluster.state[0] == state


@pytest.mark.parametrize(("others", "state"), [("abcd", "step"), ("abcde", "rolled_back")])
def test_the_first_failures_of_one_key_count_once_at_all_routers(others: str, state: str) -> None:
    cluster = RollingCluster().rolled()
    cluster.until("step")
    for router in "rst":
        cluster.count(2, router=router, failed_keys=("a", "b"), has_arrived=False, parts=())
    cluster.count(5, router="u", failed_keys=tuple(others), has_arrived=False, parts=())
    cluster.run(2)
    assert cluster.state[0] == state


def test_a_router_tells_the_digests_of_the_keys_of_first_failures() -> None:
    router = RouterEvidence("e", read_guardrails({"errors": {}}, "guardrails"))
    router.blocks.first_failures |= {b"0123456789", b"01234567", object()}
    assert router.news().failed_keys == (b"01234567".hex(),) * 2
    assert router.news().keyless == 1


def test_a_candidate_whose_latest_requests_have_failed_everywhere_passes_no_step() -> None:
    cluster = RollingCluster().rolled()
    cluster.until("step")
    cluster.count(ended=10, parts=())
    cluster.run()
    for router, failures in (("r", 3), ("s", 2)):
        ended = 13 if router == "r" else 2
        cluster.count(ended, router=router, failures=failures, parts=())
    cluster.run(15)
    assert cluster.state[0] == "paused"
    assert cluster.news.state["reason"] == "the latest 5 requests of the candidate have failed"


def test_a_breach_that_pauses_begins_the_evidence_anew_with_resume() -> None:
    plan = msgspec.structs.replace(PLAN, on_breach=Reaction.PAUSE)
    cluster = RollingCluster(1, plan).rolled()
    cluster.until("step")
    first = cluster.news.evidence
    for ended in range(10, 60, 10):
        cluster.count(ended, events=10)
        cluster.run()
    assert cluster.state == ("paused", 10.0)
    cluster.ask(RolloutAction.RESUME)
    assert cluster.news.evidence != first
    (errors,) = cluster.news.state["guardrails"]
    assert (errors["candidate"]["requests"], cluster.news.heard) == (0, {})


def test_a_candidate_that_has_answered_at_one_router_is_not_dead_on_arrival() -> None:
    cluster = RollingCluster().rolled()
    cluster.until("step")
    cluster.count(10, router="r", parts=())
    cluster.count(5, router="s", failures=5, keyless=5, has_arrived=False, parts=())
    cluster.run(2)
    assert cluster.state == ("step", 10.0)


def test_a_router_repeats_its_counts_until_the_controller_has_them() -> None:
    guardrails = read_guardrails({"errors": {}}, "guardrails")
    router, controller = RouterEvidence("e", guardrails), FleetEvidence(guardrails, 0.01)
    for number in (1, 2):
        router.add(0, Counts(20, number), Counts(10, 1))
    assert [each.number for each in router.news().parts] == [1, 2]
    controller.take([router.news(), router.news()])
    router.add(0, Counts(20, 3), Counts(10, 1))
    router.acknowledge(controller.heard)
    assert router.news().parts == (EvidencePart(3, 0, Counts(20, 3), Counts(10, 1)),)
    again = FleetEvidence(guardrails, 0.01)
    again.load(msgspec.json.decode(msgspec.json.encode(controller.dump())))
    again.take([router.news()])
    (errors,) = again.describe()
    assert (errors["stable"]["events"], errors["candidate"]["requests"]) == (6, 30)
