"""Requests of an allowance have the accounts of requests that are looked at one by one."""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from gateway.admission.admission import MOST_ACCOUNTS
from gateway.admission.allowances import HOLDS_SECS, MOST_EVENTS, Allowance
from gateway.errors import Refusal, RefusalReason, RetryAdvice
from gateway.messages import Deadline
from gateway.policy.tenants import TenantRules
from gateway.schedulers.passages import AT_ONCE
from tests.builders import settle
from tests.conftest import Serve
from tests.gateway.admission.twin_planes import (
    BROKEN,
    NS_PER_SECOND,
    RULES,
    Plane,
    Twins,
    answer_of,
    infer,
    request,
)

STEPS = 500
KINDS = {
    "call": 2,
    "answer": 9,
    "fail": 1,
    "cancel": 1,
    "early": 2,
    "late": 1,
    "tokens": 0.1,
    "wait": 1,
    "rules": 0.2,
}
"""The other steps than the begin of a request, with their weights.

By those that are early a request ends before its execution, by its answer; or it is late for its
deadline.
"""
LATE = Refusal(RefusalReason.DEADLINE_EXCEEDED, "deadline exceeded", RetryAdvice(retries=True))
FLOOD = 60
"""Steps in which more requests begin than end, and then as many in which more end."""


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("rooms", [[None, None], [24, None], [6, 8]])
async def test_sums_order_and_refusals_are_those_without_allowances(
    serve: Serve, rooms: list[int | None], seed: int
) -> None:
    draw, twins = Random(seed), Twins(serve, rooms)
    await settle()
    allowed, names = 0, (f"r{number}" for number in range(STEPS))
    for number, name in enumerate(names):
        begin = 30 if number // FLOOD % 2 else 6
        kind = draw.choices(("begin", *KINDS), (begin, *KINDS.values()))[0]
        step_of(draw, kind, name, twins)
        await settle()
        if draw.random() < 0.15:
            twins.compare()
        allowed += sum(len(each.allowances) for each in twins.planes[0].models)
    while executing := twins.planes[0].executing:
        for plane in twins.planes:
            plane.answer(executing[0], answer_of(100))
        await settle()
    twins.compare()
    assert allowed


def step_of(draw: Random, kind: str, name: str, twins: Twins) -> None:
    """Begin or end a request in one of several ways, let time pass, or change the rules."""
    executing = twins.planes[0].executing
    if kind == "begin" or not executing:
        tenant = draw.choices(tuple(RULES), (3, 3, 3, 2, 2, 3))[0]
        model, rows = draw.randrange(2), draw.choice((1, 1, 1, 3))
        fields: dict[str, Any] = {
            "priority": draw.choice((0, 0, 0, 0, 0, 1, 3)),
            "deadline": draw.choice(twins.deadlines),
        }
        twins.both(lambda plane: plane.infer(name, model, tenant, rows, **fields))
    elif kind == "call":
        twins.both(lambda plane: plane.call(name))
    elif kind == "rules":
        rules = changed(draw)
        twins.both(lambda plane: plane.tenants.replace(rules))
    elif kind == "wait":
        secs = draw.choice((0.001, 0.01, 0.3, 2.0))
        for each in twins.planes:
            each.clock.secs += secs
    else:
        chosen = draw.choice(executing)
        answer = answer_of(draw.choice((10, 400, 3000)), tokens=5 if kind == "tokens" else 0)
        if kind in ("early", "late"):
            error = LATE if kind == "late" else None
            twins.both(lambda plane: plane.end_early(chosen, answer, error))
            return
        if kind in ("fail", "cancel"):
            twins.both(lambda plane: plane.streams[chosen].put(replace(answer, final=False)))
        if kind == "cancel":
            twins.both(lambda plane: plane.streams[chosen].cancel())
        twins.both(lambda plane: plane.answer(chosen, BROKEN if kind == "fail" else answer))


def changed(draw: Random) -> Mapping[str, TenantRules]:
    """Rules of which those of one tenant differ, and some tables may be gone or have no limits."""
    most = draw.choice((3, 40))
    rules = RULES | {"wide": replace(RULES["wide"], max_in_flight=most, weight=most)}
    for tenant in ("timed", "narrow", "flying"):
        kind = draw.choices(("kept", "gone", "unlimited"), (4, 1, 1))[0]
        if kind == "gone":
            del rules[tenant]
        elif kind == "unlimited":
            rules[tenant] = TenantRules(weight=3.0)
    return rules


async def test_a_tenant_whose_table_is_gone_for_a_time_is_charged_for_no_request_of_it(
    serve: Serve,
) -> None:
    rules = {"a": TenantRules(requests_per_minute=600.0), "b": TenantRules()}
    plane = Plane(serve, [None], rules)
    await settle()
    await infer(plane, "limited", 0, "a")
    plane.tenants.replace({"b": TenantRules()})
    for number in range(520):
        await infer(plane, f"r{number}", 0, "a")
    plane.tenants.replace(rules)
    await infer(plane, "limited again", 0, "a")
    assert plane.admission.describe()[0]["buckets"]["requests"]["remaining"] == 598.0
    assert plane.refused == []


async def test_requests_that_began_without_limits_are_not_in_flight_once_there_are_some(
    serve: Serve,
) -> None:
    plane = Plane(serve, [None], {"a": TenantRules(weight=2.0)})
    await settle()
    names = [f"r{number}" for number in range(10)]
    for name in names:
        plane.infer(name, 0, "a")
    plane.tenants.replace({"a": TenantRules(max_in_flight=2)})
    plane.infer("limited", 0, "a")
    await settle()
    assert plane.refused == []
    assert plane.state()["a in flight"] == 1
    for name in names:
        plane.answer(name, answer_of(100, tokens=3 if name == "r5" else 0))
        await settle()
    assert plane.state()["a in flight"] == 1
    plane.answer("limited", answer_of(100))
    await settle()
    assert plane.state()["a in flight"] == 0


async def test_a_request_with_the_first_tokens_of_a_model_has_its_account_at_once(
    serve: Serve,
) -> None:
    twins = Twins(serve, [None])
    await settle()
    for name, tokens in (("a", 0), ("b", 0), ("c", 5), ("d", 5)):
        for plane in twins.planes:
            plane.infer(name, 0, "timed")
        await settle()
        for plane in twins.planes:
            plane.answer(name, answer_of(3000, tokens))
        await settle()
    twins.compare()
    allowance = twins.planes[0].models[0].allowances["timed"]
    assert not allowance.admits(request("e", 0, "timed"))


async def test_a_request_behind_a_long_execution_finds_the_bucket_empty(serve: Serve) -> None:
    """Short ones have let many begin at once; the bucket has 3 ms."""
    plane = Plane(serve, [None], {"a": TenantRules(compute_ms_per_minute=600.0, burst=0.005)})
    for name in ("short", "long"):
        plane.infer(name, 0, "a")
        await settle()
        spent_ns = 1000
        if name == "long":
            await asyncio.sleep(0.006)
            spent_ns = 6_000_000
        plane.answer(name, answer_of(spent_ns))
        await settle()
    plane.infer("next", 0, "a")
    assert [each for each in plane.refused if "milliseconds of compute time" in each]


@pytest.mark.parametrize("error", [LATE, None])
async def test_a_tenant_is_not_lifted_by_an_execution_of_another_that_ends_later(
    serve: Serve, error: Refusal | None
) -> None:
    """It begins between the end of the other one's request and that of the execution."""
    rules = {each: TenantRules(requests_per_minute=1e9) for each in "ab"}
    twins, long = Twins(serve, [300], rules), answer_of(20_000_000)
    await settle()
    for name in ("a1", "b1", "a2", "b2"):
        for plane in twins.planes:
            await infer(plane, name, 0, name[0], phases_ns=1000)
    twins.compare()
    twins.both(lambda plane: plane.infer("a3", 0, "a"))
    await settle()
    await asyncio.sleep(0.03)
    twins.both(lambda plane: plane.end_early("a3", long, error))
    await settle()
    twins.both(lambda plane: plane.infer("b3", 0, "b"))
    for plane in twins.planes:
        for instance in plane.instances:
            instance.begun.pop("a3").over(None)
    twins.both(lambda plane: plane.answer("b3", answer_of(1000)))
    await settle()
    twins.compare()


async def test_an_allowance_ends_after_a_second(serve: Serve) -> None:
    """A tenant is noted as active at least once a second."""
    plane = Plane(serve, [None], RULES)
    await settle()
    plane.infer("first", 0, "wide")
    allowance = plane.models[0].allowances["wide"]
    assert allowance.admits(request("second", 0, "wide"))
    plane.clock.secs += HOLDS_SECS
    assert not allowance.admits(request("third", 0, "wide"))
    plane.answer("first", answer_of(100))
    await settle()


async def used_up(serve: Serve) -> tuple[Plane, Allowance]:
    """An allowance whose last request has just been answered."""
    plane = Plane(serve, [None], {"a": TenantRules(requests_per_minute=1e9)})
    await settle()
    for name in ("first", "second"):
        await infer(plane, name, 0, "a")
    found = plane.models[0].allowances["a"]
    assert isinstance(found, Allowance)
    for number in range(found.passage.left):
        plane.infer(f"r{number}", 0, "a")
        plane.answer(f"r{number}", answer_of(100))
    assert found.passage.left == 0
    assert plane.tenants.ledger.events
    return plane, found


async def test_accounts_are_made_and_more_may_begin_behind_the_last_answer(serve: Serve) -> None:
    plane, found = await used_up(serve)
    await settle()
    assert plane.tenants.ledger.events == []
    assert found.passage.left > 0


async def test_no_more_may_begin_by_an_allowance_that_has_ended(serve: Serve) -> None:
    _, found = await used_up(serve)
    found.end()
    await settle()
    assert found.passage.left == 0


async def test_a_model_that_is_closed_ends_no_allowance_of_another(serve: Serve) -> None:
    """Its executions are too long for the bucket, those of the other one are short."""
    rules = TenantRules(requests_per_minute=1e9, compute_ms_per_minute=600.0, burst=0.02)
    plane = Plane(serve, [None, None], {"a": rules})
    await settle()
    plane.infer("long", 0, "a")
    await asyncio.sleep(0.02)
    plane.answer("long", answer_of(20_000_000))
    late = Deadline(first_ns=time.perf_counter_ns() + NS_PER_SECOND, asked=True)
    await infer(plane, "timed", 0, "a", deadline=late)
    await plane.models[0].close()
    plane.clock.secs += 60.0
    for name in "abc":
        await infer(plane, name, 1, "a")
    assert plane.models[1].allowances["a"].admits(request("next", 1, "a"))


async def test_a_model_has_one_callback_for_all_allowances_that_end_with_it(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = {f"t{number}": TenantRules(requests_per_minute=1e9) for number in range(20)}
    plane = Plane(serve, [None], rules)
    callbacks: list[Callable[[], None]] = []
    monkeypatch.setattr(plane.models[0], "when_closed", callbacks.append)
    await settle()
    for each in rules:
        await infer(plane, each, 0, each)
    found = [each for each in plane.models[0].allowances.values() if isinstance(each, Allowance)]
    assert all(each.account.allowances == [each] for each in found)
    assert len(found) == 20
    (closed,) = callbacks
    closed()
    assert plane.models[0].allowances == {}
    assert not any(each.account.allowances for each in found)


async def test_tenants_without_a_table_have_no_more_allowances_than_accounts(serve: Serve) -> None:
    """Each has an account since its first request was refused."""
    plane = Plane(serve, [None], {"a": TenantRules(requests_per_minute=1e9)})
    await settle()
    refusal = Refusal(RefusalReason.RATE_LIMITED, "refused", RetryAdvice(retry_after_secs=1.0))
    for number in range(MOST_ACCOUNTS + 10):
        name = f"t{number}"
        plane.admission.note(request("refused", 0, name), plane.models[0], refusal)
        plane.infer(name, 0, name)
        plane.answer(name, answer_of(100))
    await settle()
    accounts = [each["tenant"] for each in plane.admission.describe() if each["tenant"] != "a"]
    assert MOST_ACCOUNTS / 2 < len(accounts) <= MOST_ACCOUNTS
    assert sorted(plane.models[0].allowances) == accounts
    assert "t0" not in accounts


async def test_what_is_noted_is_bounded_and_read_with_the_metrics(serve: Serve) -> None:
    plane = Plane(serve, [None], {"a": TenantRules(requests_per_minute=1e9)})
    await settle()
    most = 0
    for number in range(MOST_EVENTS):
        plane.infer(f"r{number}", 0, "a")
        plane.answer(f"r{number}", answer_of(100))
        most = max(most, len(plane.tenants.ledger.events))
    await settle()
    assert 100 < most < 4 * AT_ONCE
    assert plane.state()["a in flight"] == 0
    assert not plane.tenants.ledger.events


async def test_what_is_noted_of_many_tenants_in_turn_is_bounded_too(serve: Serve) -> None:
    """No accounts take longer than those of as many events: all begin first, then all end."""
    rules = {f"t{number}": TenantRules(requests_per_minute=1e9) for number in range(20)}
    plane, most = Plane(serve, [None], rules), 0
    await settle()
    for tenant in rules:
        await infer(plane, tenant, 0, tenant)
    names = [f"r{number}" for number in range(800)]
    for number, name in enumerate(names):
        plane.infer(name, 0, f"t{number % 20}")
        most = max(most, len(plane.tenants.ledger.events))
    for name in names:
        plane.answer(name, answer_of(100))
        most = max(most, len(plane.tenants.ledger.events))
    await settle()
    assert MOST_EVENTS / 2 < most <= MOST_EVENTS + 1
