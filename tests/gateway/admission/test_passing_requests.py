"""Requests of an allowance: new weights, the first tokens of their model, and deadlines."""

import asyncio
import time
from dataclasses import replace

import pytest

from gateway.admission.allowances import Allowance
from gateway.admission.costs import FIRST_ANSWER
from gateway.admission.prediction import LEARNT_ENDS
from gateway.errors import Refusal, RefusalReason
from gateway.messages import Deadline, Usage
from gateway.policy.tenants import OTHER, TenantRules
from gateway.schedulers import shares
from tests.builders import read_all, settle, soon
from tests.conftest import Serve
from tests.gateway.admission.deadline_planes import first, values
from tests.gateway.admission.twin_planes import (
    NS_PER_SECOND,
    Plane,
    Twins,
    answer_of,
    infer,
    request,
)


async def test_a_weight_counts_from_the_first_request_that_passes_behind_a_refused_one(
    serve: Serve,
) -> None:
    """The first request with the new weight is refused before it comes to the fair queue."""
    rules = {"a": TenantRules(requests_per_minute=6000.0, burst=40 / 6000), "b": TenantRules()}
    plane = Plane(serve, [2], rules)
    await settle()
    await infer(plane, "short", 0, "b")
    plane.infer("long", 0, "b")
    for number in range(40):
        await infer(plane, f"light {number}", 0, "a", phases_ns=10)
    plane.answer("long", answer_of(8000))
    plane.tenants.replace(rules | {"a": replace(rules["a"], weight=4.0)})
    plane.infer("refused", 0, "a")
    assert len(plane.refused) == 1
    plane.clock.secs += 0.9
    for number in range(5):
        await infer(plane, f"heavy {number}", 0, "a", phases_ns=1000)
    for number in range(18):
        plane.infer(f"{number}", 0, "a")
    plane.infer("of another", 0, "b")
    while plane.executing:
        plane.answer(plane.executing[0], answer_of(1000))
        await settle()
    assert plane.instances[0].order[-1] == "of another"
    assert len(plane.refused) == 1


async def test_a_request_that_passes_before_a_change_of_weights_counts_by_its_old_one(
    serve: Serve,
) -> None:
    """Its tenant is noted as active with it, and the share of another one is as large."""
    rules = {name: TenantRules(max_in_flight=4000) for name in "ab"}
    twins, most = Twins(serve, [None], rules), 100
    await settle()
    for plane in twins.planes:
        plane.models[0].most_in_flight = most
        for name in ("first", "second", "noted"):
            await infer(plane, name, 0, "a")
    assert twins.planes[0].tenants.ledger.events
    for plane in twins.planes:
        plane.tenants.replace(rules | {"a": replace(rules["a"], weight=99.0)})
        for number in range(most):
            plane.infer(f"{number}", 0, "b")
        assert len(plane.refused) == most / 2
        for name in plane.executing:
            plane.answer(name, answer_of(100))
        await settle()
    twins.compare()


@pytest.mark.parametrize(("usage", "ends"), [(Usage(4, 4), False), (Usage(0, 4), True)])
async def test_requests_are_looked_at_from_the_first_tokens_of_another_tenant_on(
    serve: Serve, usage: Usage, *, ends: bool
) -> None:
    """Their cost is that of their texts, and they take tokens of a limit."""
    rules = TenantRules(max_in_flight=40)
    plane = Plane(serve, [8], {"a": rules, "b": rules})
    await settle()
    for tenant, name in (("b", "first"), ("a", "granted"), ("a", "passing")):
        plane.infer(name, 0, tenant)
    found = allowance_of(plane, "a")
    assert found.passage.left > 0
    plane.streams["first"].put(replace(answer_of(100), usage=usage, final=False))
    if ends:
        plane.answer("first", answer_of(100))
        await settle()
    assert not found.admits(request("next", 0, "a"))
    for name in ("first", "granted", "passing"):
        plane.answer(name, answer_of(100))
    await settle()


async def test_the_tokens_of_a_request_of_an_allowance_are_learnt_once(serve: Serve) -> None:
    """Tenants without a label of their own share what a deadline learns."""
    rules = TenantRules(tokens_per_minute=6000.0)
    plane = Plane(serve, [8], {"a": TenantRules(max_in_flight=40), OTHER: rules})
    await settle()
    await infer(plane, "first", 0, "a")
    plane.infer("timed", 0, "a", deadline=first(time.perf_counter_ns() + NS_PER_SECOND))
    await settle()
    plane.answer("timed", answer_of(100, tokens=5))
    await settle()
    await infer(plane, "next", 0, OTHER)
    plane.infer("booked", 0, OTHER)
    found = {each["tenant"]: each for each in plane.admission.describe()}
    assert found[OTHER]["buckets"]["tokens"]["remaining"] == 6000.0 - FIRST_ANSWER
    plane.answer("booked", answer_of(100))
    await settle()


async def test_a_request_of_an_allowance_ends_at_its_deadline(serve: Serve) -> None:
    plane = Plane(serve, [4], {"a": TenantRules(max_in_flight=40)})
    await settle()
    await infer(plane, "first", 0, "a")
    await infer(plane, "second", 0, "a")
    passage = allowance_of(plane, "a").passage
    left = passage.left
    soon_ns = time.perf_counter_ns() + NS_PER_SECOND // 50
    plane.infer("timed", 0, "a", deadline=first(soon_ns))
    await settle()
    assert passage.left == left - 1 > 0
    with pytest.raises(Refusal) as caught:
        await soon(read_all(plane.streams["timed"]))
    assert caught.value.refusal_reason is RefusalReason.DEADLINE_EXCEEDED
    await settle()
    assert plane.executing == []
    assert plane.state()["a in flight"] == 0
    assert late(plane) == 1


async def test_a_request_of_an_allowance_that_would_miss_its_deadline_is_refused(
    serve: Serve,
) -> None:
    """It has cost one request, as one without an allowance."""
    twins = Twins(serve, [40], {"a": TenantRules(requests_per_minute=6000.0)})
    await settle()
    past = Deadline(first_ns=1, asked=True)
    for number in range(LEARNT_ENDS):
        for plane in twins.planes:
            await infer(plane, f"r{number}", 0, "a", deadline=past)
    for plane in twins.planes:
        plane.infer("late", 0, "a", deadline=past)
        assert len(plane.refused) == 1
        assert "its first response is expected in" in plane.refused[0]
        assert late(plane) == LEARNT_ENDS
        plane.refused.clear()
    assert allowance_of(twins.planes[0], "a").passage.left > 0
    twins.compare()


def allowance_of(plane: Plane, tenant: str) -> Allowance:
    """The allowance of a tenant at the first model."""
    found = plane.models[0].allowances[tenant]
    assert isinstance(found, Allowance)
    return found


def late(plane: Plane) -> float:
    """The admitted requests that missed their deadline."""
    return values(plane.dataplane)["admitted_late_total"]


@pytest.mark.parametrize(("passing", "share"), [(False, 100), (True, 50)])
async def test_a_tenant_whose_every_request_is_refused_by_its_deadline_takes_no_share(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, *, passing: bool, share: int
) -> None:
    """As without allowances; one request that passes takes its share."""
    monkeypatch.setattr(shares, "ACTIVE_NS", NS_PER_SECOND)
    monkeypatch.setattr(shares, "FRESH_NS", 1)
    twins = Twins(serve, [None], {name: TenantRules(max_in_flight=4000) for name in "ab"})
    await settle()
    for each in twins.planes:
        each.models[0].most_in_flight = 100
        await infer(each, "first", 0, "a")
        await infer(each, "second", 0, "a")
    await asyncio.sleep(1.1)
    for each in twins.planes:
        for number in range(200):
            each.infer(f"late {number}", 0, "a", deadline=first(1))
        if passing:
            await infer(each, "third", 0, "a")
        before = len(each.refused)
        for number in range(120):
            each.infer(f"{number}", 0, "b")
        assert (before, len(each.refused) - before) == (200, 120 - share)
        for name in each.executing:
            each.answer(name, answer_of(100))
        await settle()
