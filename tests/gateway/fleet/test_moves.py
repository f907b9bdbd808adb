"""Moves of requests that have not begun at their replicas."""

import asyncio
from dataclasses import replace
from random import Random

import pytest

from gateway.fleet import moves
from gateway.fleet.choice import Demand, KnownReplica, Load, ReplicaState
from gateway.fleet.moves import WaitingRequests
from tests.gateway.fleet.fake_replica import until

LOAD = Load(
    seen=0,
    waiting_tokens=0,
    running=0,
    queued=0,
    prefill_rate=1000.0,
    step_secs=0.01,
    kv_used=0.0,
    room=1000,
    state=ReplicaState.READY,
)


class Request:
    """A request of 1,000 tokens; `places` are the replicas to which it moved."""

    def __init__(self) -> None:
        self.places: list[KnownReplica] = []

    def demand(self) -> Demand:
        return Demand(tokens=1000)

    def move(self, to: KnownReplica) -> None:
        self.places.append(to)


@pytest.fixture(autouse=True)
def _short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moves, "TURN_SECS", 0.01)


@pytest.fixture
def busy() -> KnownReplica:
    return KnownReplica("busy", replace(LOAD, waiting_tokens=100_000), distance_secs=0.0)


@pytest.fixture
def idle() -> KnownReplica:
    return KnownReplica("idle", LOAD, distance_secs=0.0)


async def test_a_request_moves_to_a_new_replica_that_serves_it_sooner(
    busy: KnownReplica, idle: KnownReplica
) -> None:
    replicas = [busy]
    waiting, request = WaitingRequests(lambda: replicas, Random(1)), Request()
    waiting.add(request, busy, busy.ahead)
    await asyncio.sleep(0.03)
    assert request.places == []
    replicas.append(idle)
    await until(lambda: request.places == [idle])
    assert len(waiting) == 0


async def test_a_request_with_little_before_it_is_not_kept(busy: KnownReplica) -> None:
    waiting = WaitingRequests(lambda: [busy], Random(1))
    waiting.add(Request(), busy, 1999)
    assert len(waiting) == 0
    waiting.add(Request(), busy, 2000)
    assert len(waiting) == 1


async def test_a_request_whose_time_has_come_is_settled(
    busy: KnownReplica, idle: KnownReplica
) -> None:
    waiting, request = WaitingRequests(lambda: [busy, idle], Random(1)), Request()
    waiting.add(request, busy, 2001)
    await asyncio.sleep(0.002)
    await until(lambda: len(waiting) == 0)
    assert request.places == []


async def test_a_request_that_has_a_response_does_not_move(
    busy: KnownReplica, idle: KnownReplica
) -> None:
    waiting = WaitingRequests(lambda: [busy, idle], Random(1))
    first, second = Request(), Request()
    for each in (first, second):
        waiting.add(each, busy, busy.ahead)
    waiting.discard(first)
    await until(lambda: bool(second.places))
    assert first.places == []


async def test_each_moved_request_counts_for_those_after_it(
    busy: KnownReplica, idle: KnownReplica
) -> None:
    waiting = WaitingRequests(lambda: [busy, idle], Random(1))
    requests = [Request() for _ in range(200)]
    for each in requests:
        waiting.add(each, busy, busy.ahead)
    await until(lambda: any(each.places for each in requests))
    assert 40 < sum(bool(each.places) for each in requests) < 120


async def test_without_waiting_requests_there_is_no_timer(busy: KnownReplica) -> None:
    asked = []

    def replicas() -> list[KnownReplica]:
        asked.append(1)
        return [busy]

    waiting, request = WaitingRequests(replicas, Random(1)), Request()
    waiting.add(request, busy, busy.ahead)
    await until(lambda: len(asked) > 1)
    waiting.discard(request)
    asked.clear()
    await asyncio.sleep(0.05)
    assert asked == []


async def test_routers_take_their_first_turns_at_different_times(
    monkeypatch: pytest.MonkeyPatch, busy: KnownReplica
) -> None:
    monkeypatch.setattr(moves, "TURN_SECS", 1.0)
    due = []
    loop = asyncio.get_running_loop()
    call_later = loop.call_later
    monkeypatch.setattr(
        loop, "call_later", lambda secs, *more: due.append(secs) or call_later(secs, *more)
    )
    for seed in range(5):
        waiting, request = WaitingRequests(lambda: [busy], Random(seed)), Request()
        waiting.add(request, busy, busy.ahead)
        waiting.discard(request)
    assert len(set(due)) == 5
    assert all(0 <= secs <= 1 for secs in due)
