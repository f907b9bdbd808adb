"""The choice of a replica: costs by hand, replicas that are left out, own calls, and moves."""

import math
from random import Random, SystemRandom
from typing import Any

import pytest

from gateway.fleet import choice
from gateway.fleet.choice import (
    Demand,
    KnownReplica,
    Load,
    Location,
    ReplicaState,
    UnbegunRequest,
    ahead_now,
    choose,
    cost,
    moves,
    wait,
)
from gateway.schedulers.token_ratio import TokenRatio

IDLE: dict[str, Any] = {
    "seen": 0,
    "waiting_tokens": 0,
    "running": 0,
    "queued": 0,
    "prefill_rate": 10_000.0,
    "step_secs": 0.01,
    "kv_used": 0.0,
    "room": 100,
    "state": ReplicaState.READY,
}


def load(**changes: Any) -> Load:
    return Load(**{**IDLE, **changes})


def replica(name: str, distance_secs: float = 0.0, **changes: Any) -> KnownReplica:
    return KnownReplica(name, load(**changes), distance_secs=distance_secs)


def chosen(demand: Demand, *replicas: KnownReplica, now: float = 100.0) -> set[str]:
    """The replicas that 64 choices take."""
    found = [choose(demand, replicas, now=now, random=Random(seed)) for seed in range(64)]
    return {each.id for each in found if each is not None}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("waiting_tokens", -1),
        ("waiting_tokens", 10**11),
        ("waiting_tokens", 1.5),
        ("running", True),
        ("prefill_rate", math.nan),
        ("prefill_rate", math.inf),
        ("step_secs", -0.1),
        ("kv_used", 1.1),
        ("room", 10**9),
        ("seen", 2**32),
        ("ready_in_secs", "soon"),
        ("state", "READY"),
    ],
)
def test_a_load_that_no_replica_can_have_is_refused_by_its_field(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"{field} of a load is .*, expected"):
        load(**{field: value})


def test_a_replica_that_has_not_measured_its_rate_counts_requests() -> None:
    new = replica("new", prefill_rate=0.0, step_secs=0.05)
    busy = replica("busy", waiting_tokens=4_000)
    demand = Demand(tokens=10_000)
    assert cost(new, demand) == pytest.approx(0.05)
    assert chosen(demand, new, busy) == {"new"}
    for call in range(1, 51):
        new.send(call, new.work(demand))
    assert chosen(demand, new, busy) == {"busy"}


def test_the_cost_is_the_wait_and_the_surcharge_the_harm_the_full_cache_and_the_distance() -> None:
    busy = replica("a", 0.005, waiting_tokens=20_000, running=8, kv_used=0.95)
    demand = Demand(tokens=5_000, held={"a": 4_000})
    first = (20_000 + 1_000) / 10_000 + 0.01
    harm = 8 * 1_000 / 10_000
    surcharge = 1_000 / 10_000
    expected = first + surcharge + 0.05 * harm + 5 * (0.95 - 0.9) + 0.005
    assert cost(busy, demand) == pytest.approx(expected)


def test_the_harm_outweighs_a_short_wait() -> None:
    crowded, waiting = replica("a", running=40), replica("b", waiting_tokens=10_000)
    assert chosen(Demand(tokens=10_000), crowded, waiting) == {"b"}


def test_a_prefix_counts_unless_its_replica_is_too_busy() -> None:
    demand = Demand(tokens=10_000, held={"a": 9_000})
    assert chosen(demand, replica("a", waiting_tokens=17_000), replica("b")) == {"a"}
    assert chosen(demand, replica("a", waiting_tokens=18_500), replica("b")) == {"b"}


def test_a_computed_token_costs_as_much_again_as_its_time() -> None:
    demand = Demand(tokens=10_000, held={"a": 9_000})
    assert cost(replica("b"), demand) == pytest.approx(0.01 + 2 * 1.0)
    assert cost(replica("a"), demand) == pytest.approx(0.01 + 2 * 0.1)
    assert wait(replica("b"), demand) == pytest.approx(0.01 + 1.0)


def test_a_prefix_longer_than_the_expected_prompt_leaves_one_token() -> None:
    assert replica("a").work(Demand(tokens=10, held={"a": 500})) == 1


def test_a_full_cache_costs_seconds() -> None:
    assert chosen(Demand(tokens=1), replica("a", kv_used=1.0), replica("b", kv_used=0.9)) == {"b"}


def test_costs_within_a_millisecond_are_equal() -> None:
    near, far = replica("a"), replica("b", 0.0009)
    assert chosen(Demand(tokens=1), near, far, replica("c", 0.002)) == {"a", "b"}


def test_of_equal_costs_that_with_the_fewest_open_calls_is_chosen() -> None:
    first, second = replica("a"), replica("b", 0.0009)
    first.send(1, 0)
    first.announce(load(seen=1))
    assert chosen(Demand(tokens=1), first, second) == {"b"}
    second.send(1, 0)
    second.announce(load(seen=1))
    assert chosen(Demand(tokens=1), first, second) == {"a", "b"}
    first.end(1)
    assert chosen(Demand(tokens=1), first, second) == {"a"}


@pytest.mark.parametrize(
    ("own", "other", "secs"),
    [
        (Location("n", "z"), Location("n", "z"), 0.0),
        (Location("n", "z"), Location("m", "z"), 0.001),
        (Location("n", "z"), Location("m", "y"), 0.005),
        (Location(), Location(), 0.005),
    ],
)
def test_the_distance_depends_on_node_and_zone(own: Location, other: Location, secs: float) -> None:
    assert own.secs_to(other) == secs


@pytest.mark.parametrize("state", [ReplicaState.STARTING, ReplicaState.DRAINING])
def test_only_ready_replicas_are_chosen(state: ReplicaState) -> None:
    assert chosen(Demand(tokens=1), replica("a", state=state)) == set()
    assert chosen(Demand(tokens=1), replica("a", state=state), replica("b", 1.0)) == {"b"}


def test_a_replica_without_room_is_left_out_until_a_load_has_some() -> None:
    full = replica("a", room=1)
    full.send(1, 10)
    assert chosen(Demand(tokens=1), full) == set()
    full.announce(load(seen=1, room=1))
    assert chosen(Demand(tokens=1), full) == {"a"}


def test_a_replica_that_refused_is_left_out_for_a_second() -> None:
    refusing = replica("a")
    refusing.refuse(now=100.0)
    assert chosen(Demand(tokens=1), refusing, now=100.9) == set()
    assert chosen(Demand(tokens=1), refusing, now=101.0) == {"a"}


def test_own_calls_count_until_a_load_includes_them() -> None:
    known = replica("a")
    for call in (1, 2, 3):
        known.send(call, 1_000 * call)
    assert known.ahead == 6_000
    known.announce(load(seen=2, waiting_tokens=500))
    assert known.ahead == 3_500
    known.announce(load(seen=3, waiting_tokens=500))
    assert known.ahead == 500


def test_an_ended_call_counts_no_longer_and_may_be_seen_later() -> None:
    known = replica("a")
    known.send(1, 1_000)
    known.send(2, 2_000)
    known.end(1)
    assert known.ahead == 2_000
    known.announce(load(seen=1))
    assert known.ahead == 2_000
    known.end(1)
    assert known.ahead == 2_000


def test_a_call_with_a_response_waits_no_longer_before_the_next_load() -> None:
    known = replica("a")
    for call in (1, 2, 3):
        known.send(call, 1_000 * call)
    known.announce(load(seen=2, waiting_tokens=4_000))
    known.begin(1)
    known.begin(3)
    assert known.ahead == 3_000
    known.end(1)
    assert known.ahead == 3_000
    known.announce(load(seen=3, waiting_tokens=2_000))
    assert known.ahead == 2_000


def test_an_ended_call_that_the_load_includes_counts_no_longer() -> None:
    known = replica("a")
    known.send(1, 1_000)
    known.announce(load(seen=1, waiting_tokens=1_500))
    known.end(1)
    assert known.ahead == 500
    requests = replica("b", prefill_rate=0.0, queued=3, step_secs=0.5)
    requests.send(1, 1)
    requests.announce(load(prefill_rate=0.0, queued=4, step_secs=0.5, seen=1))
    requests.begin(1)
    assert requests.ahead == 4
    requests.end(1)
    assert requests.ahead == 3
    requests.announce(load(prefill_rate=0.0, queued=2, step_secs=0.5, seen=1))
    assert requests.ahead == 2


def test_a_smaller_load_than_expected_leaves_no_work() -> None:
    known = replica("a")
    known.send(1, 1_000)
    known.announce(load(seen=1, waiting_tokens=100))
    known.end(1)
    assert known.ahead == 0


def test_calls_whose_numbers_begin_anew_count_once() -> None:
    known = replica("a")
    known.send(2**32 - 1, 1_000)
    known.send(1, 2_000)
    known.announce(load(seen=2**32 - 1))
    assert known.ahead == 2_000


def test_a_load_that_has_seen_a_call_never_sent_is_refused() -> None:
    known = replica("a")
    known.send(1, 1_000)
    with pytest.raises(ValueError, match="seen of a load is 7, expected one of the calls 0, 1"):
        known.announce(load(seen=7))
    known.announce(load(seen=1))
    with pytest.raises(ValueError, match="seen of a load is 0, expected one of the calls 1"):
        known.announce(load(seen=0))


def test_a_model_without_tokens_costs_the_requests_before() -> None:
    slow = replica("a", prefill_rate=0.0, queued=3, step_secs=0.5)
    wide = KnownReplica(
        "b", load(prefill_rate=0.0, queued=3, step_secs=0.5), distance_secs=0.0, concurrency=4
    )
    assert cost(slow, Demand()) == pytest.approx(4 * 0.5)
    assert cost(wide, Demand()) == pytest.approx(4 * 0.5 / 4)
    wide.send(1, 0)
    assert cost(wide, Demand()) == pytest.approx(5 * 0.5 / 4)


@pytest.mark.parametrize(
    ("then", "secs", "now"),
    [(30_000, 1.0, 20_000), (30_000, 3.0, 0), (30_000, 9.0, 0), (90_000, 1.0, 50_000)],
)
def test_work_before_a_request_is_done_as_time_passes(then: int, secs: float, now: int) -> None:
    assert ahead_now(replica("a", waiting_tokens=50_000), then, secs) == now


def test_work_that_takes_no_time_is_done() -> None:
    assert ahead_now(replica("a", prefill_rate=0.0, queued=5, step_secs=0.0), 3, 0.0) == 0


def backlog(here: KnownReplica, count: int, tokens: int = 10_000) -> list[UnbegunRequest]:
    """Requests that arrived one after the other, each behind those before."""
    demand = Demand(tokens=tokens)
    return [UnbegunRequest(call, demand, here, call * tokens) for call in range(count)]


def moved(unbegun: list[UnbegunRequest], *replicas: KnownReplica) -> list[tuple[int, str]]:
    return [(each.request.call, each.to.id) for each in moves(unbegun, replicas, now=100.0)]


def test_a_new_replica_takes_the_part_of_a_backlog_that_it_serves_sooner() -> None:
    here, new = replica("a", waiting_tokens=80_000), replica("b")
    found = moved(backlog(here, 8), here, new)
    assert found == [(2, "b"), (3, "b"), (5, "b")]


def test_requests_that_may_have_begun_stay() -> None:
    here = replica("a", waiting_tokens=80_000)
    unbegun = [UnbegunRequest(1, Demand(tokens=10_000), here, 19_999)]
    assert moved(unbegun, here, replica("b")) == []
    unbegun = [UnbegunRequest(1, Demand(tokens=10_000), here, 20_000)]
    assert moved(unbegun, here, replica("b")) == [(1, "b")]


def test_a_request_stays_unless_it_gains_a_sixth() -> None:
    here = replica("a", waiting_tokens=80_000)
    unbegun = [UnbegunRequest(1, Demand(tokens=1), here, 60_000)]
    assert moved(unbegun, here, replica("b", waiting_tokens=51_000)) == []
    assert moved(unbegun, here, replica("b", waiting_tokens=49_000)) == [(1, "b")]


def test_a_backlog_leaves_for_replicas_that_accept_it_only() -> None:
    here = replica("a", waiting_tokens=80_000)
    starting = replica("b", state=ReplicaState.STARTING)
    assert moved(backlog(here, 8), here, starting) == []
    assert moved(backlog(here, 8), here, replica("c", room=1)) == [(2, "c")]


def test_a_backlog_without_tokens_moves_by_its_requests() -> None:
    slow = {"prefill_rate": 0.0, "step_secs": 1.0}
    here = replica("a", queued=6, **slow)
    unbegun = [UnbegunRequest(call, Demand(), here, call) for call in range(6)]
    assert moved(unbegun, here, replica("b", **slow)) == [(2, "b"), (3, "b"), (5, "b")]


def test_a_replica_that_loses_a_request_to_its_prefix_takes_another() -> None:
    left, prefix, full = (
        replica(name, waiting_tokens=tokens)
        for name, tokens in (("a", 50_000), ("b", 40_000), ("c", 60_000))
    )
    unbegun = [
        UnbegunRequest(1, Demand(tokens=20_000, held={"b": 20_000}), left, 30_000),
        UnbegunRequest(2, Demand(tokens=1), full, 47_000),
    ]
    assert moved(unbegun, left, prefix, full) == [(1, "b"), (2, "a")]


@pytest.mark.parametrize("run", range(20))
def test_moves_are_those_of_a_comparison_with_every_replica(run: int) -> None:
    seed = SystemRandom().randrange(10**9)
    random = Random(seed)
    replicas = [
        replica(str(each), waiting_tokens=random.randrange(120_000), running=random.randrange(20))
        for each in range(4)
    ]
    unbegun = [each for here in replicas for each in backlog(here, here.ahead // 10_000)]
    random.shuffle(unbegun)
    assert moved(unbegun, *replicas) == compared(unbegun, replicas), f"seed {seed}"


def test_a_move_compares_few_replicas_and_those_with_the_longest_prefixes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared: list[str] = []

    def counted(each: KnownReplica, *more: Any) -> float:
        compared.append(each.id)
        return cost(each, *more)

    monkeypatch.setattr(choice, "cost", counted)
    here = replica("here", waiting_tokens=900_000)
    others = [replica(str(each), waiting_tokens=1000 * each) for each in range(100)]
    held = {str(each): 10 * each for each in range(20, 90)} | {"99": 100_000, "gone": 1}
    unbegun = [
        UnbegunRequest(call, Demand(tokens=100_000, held=held), here, 800_000) for call in range(9)
    ]
    assert moved(unbegun, here, *others)[0] == (0, "99")
    assert len(compared) <= len(unbegun) * (1 + 2 * choice.COMPARED)


def compared(unbegun: list[UnbegunRequest], replicas: list[KnownReplica]) -> list[tuple[int, str]]:
    found = []
    ahead = {each.id: each.ahead for each in replicas}
    left = dict.fromkeys(ahead, 0)
    for each in unbegun:
        here, before = each.replica, max(0, each.ahead - left[each.replica.id])
        others = {to.id: cost(to, each.demand, ahead[to.id]) for to in replicas if to is not here}
        to = min(others, key=lambda name: others[name])
        if before >= 20_000 and others[to] * 1.2 < cost(here, each.demand, before):
            ahead[here.id] -= 10_000
            ahead[to] += 10_000
            left[here.id] += 10_000
            found.append((each.call, to))
    return found


def test_the_tokens_of_a_byte_are_learned_from_usage() -> None:
    ratio = TokenRatio()
    assert ratio.tokens(4_000) == 1_000
    for _ in range(2_000):
        ratio.learn(10_000, 5_000)
    assert ratio.tokens(4_000) == pytest.approx(2_000, rel=0.01)
    ratio.learn(0, 10)
    ratio.learn(10, 0)
    assert ratio.tokens(4_000) == pytest.approx(2_000, rel=0.01)
