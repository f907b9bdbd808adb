"""Shares of tenants: whose request is next, and what requests cost."""

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from gateway.policy.tenants import LEAST, MOST
from gateway.schedulers import shares as shares_module
from gateway.schedulers.shares import ACTIVE_NS, FEW_TOKENS, ActiveTenants, Costs, TenantShares

SECOND = 1_000_000_000
PROMPT_WEIGHT, OUTPUT_WEIGHT = 1.0, 2.0


def equal(tenant: str) -> float:
    return 1.0


def waiting(*tenants: str, **weights: float) -> TenantShares:
    """Tenants that have begun to wait in this order, of weight 1 unless it is given."""
    found = TenantShares(lambda tenant: weights.get(tenant, 1.0))
    for since, tenant in enumerate(tenants):
        found.wait(tenant, since)
    return found


def test_the_tenant_with_the_least_service_is_next() -> None:
    shares = waiting("a", "b", "c")
    for tenant, service in (("a", 5.0), ("b", 3.0), ("c", 4.0)):
        shares.charge(tenant, service)
    assert shares.next == "b"
    shares.charge("b", 1.5)
    assert shares.next == "c"
    shares.leave("c")
    assert shares.next == "b"
    shares.charge("a", -1.0)
    assert shares.next == "a"


def test_of_equal_tenants_that_with_the_oldest_request_is_next() -> None:
    shares = waiting("a", "b")
    assert shares.next == "a"
    shares.wait("a", 7)
    assert shares.next == "b"


def test_service_counts_by_weight() -> None:
    shares = waiting("a", "b", a=3.0)
    shares.charge("a", 30.0)
    shares.charge("b", 11.0)
    assert shares.next == "a"
    shares.charge("a", 6.0)
    assert shares.next == "b"


def test_the_largest_weights_share_also_after_much_service_of_the_smallest_one() -> None:
    shares = waiting("small", small=LEAST, a=MOST, b=MOST)
    shares.charge("small", 1e6)
    for since, tenant in enumerate(("a", "b")):
        shares.wait(tenant, since)
    found = ""
    for _ in range(60):
        assert shares.next is not None
        found += shares.next
        shares.charge(shares.next, 1.0 if shares.next == "a" else 2.0)
    assert found.count("small") == 1, "it is not behind those that have begun to wait"
    assert found.count("a") == pytest.approx(40, abs=2)
    shares.leave("a")
    shares.leave("b")
    assert shares.next == "small"


def test_a_tenant_without_weight_is_next_only_while_no_other_waits() -> None:
    shares = waiting("idle", "a", "idler", idle=0.0, idler=0.0)
    shares.charge("a", 1000.0)
    assert shares.next == "a"
    shares.leave("a")
    assert shares.next == "idle"
    shares.charge("idle", 1.0)
    assert shares.next == "idler"
    shares.wait("a", 9)
    assert shares.next == "a"
    for tenant in ("a", "idle", "idler"):
        shares.leave(tenant)
    assert shares.next is None


def test_a_tenant_that_was_idle_has_saved_nothing() -> None:
    shares = waiting("a")
    shares.charge("a", 1000.0)
    shares.wait("b", 5)  # lifted to the counter of those that wait
    shares.charge("b", 1.0)
    assert shares.next == "a"


def test_without_others_the_counter_is_that_of_the_tenant_released_last() -> None:
    shares = waiting("a")
    shares.charge("a", 1000.0)
    shares.released("a")
    shares.leave("a")
    shares.charge("a", 500.0)  # outputs of what is executed
    shares.pass_on("b")
    shares.charge("b", 1.0)
    shares.wait("a", 5)
    shares.wait("b", 6)
    assert shares.next == "a"


def test_a_tenant_keeps_its_debt_while_it_is_idle() -> None:
    shares = waiting("a", "b")
    shares.charge("a", 100.0)
    shares.leave("a")
    shares.wait("a", 3)
    assert shares.next == "b"


def test_a_weight_may_change_while_its_tenant_waits() -> None:
    weights = {"a": 1.0, "b": 1.0}
    shares = TenantShares(weights.__getitem__)
    shares.wait("a", 0)
    shares.wait("b", 1)
    weights["a"] = 0.0
    shares.reweigh()
    assert shares.next == "b"
    weights["a"] = 1.0
    shares.reweigh()
    shares.charge("b", 1.0)
    assert shares.next == "a"
    shares.leave("a")
    shares.leave("b")
    assert shares.next is None


@pytest.mark.parametrize(("before", "after"), [(0.01, 1.0), (0.01, 0.0), (4.0, 0.5), (0.0, 2.0)])
def test_a_new_weight_counts_for_the_service_that_a_tenant_was_ahead(
    before: float, after: float
) -> None:
    """Of 100 an estimate of 40 is taken back: 60 are left by any weight."""
    weights = {"a": before, "b": before}
    shares = TenantShares(lambda tenant: weights.get(tenant, 1.0))
    for since, tenant in enumerate("ab"):
        shares.wait(tenant, since)
    shares.charge("a", 100.0)
    weights["a"] = weights["b"] = after
    shares.reweigh()
    shares.charge("a", -40.0)
    shares.charge("b", 59.0)
    assert shares.next == "b"
    shares.charge("b", 2.0)
    assert shares.next == "a"


def test_only_the_tenant_with_a_new_weight_changes_its_place() -> None:
    weights = {"a": 0.01}
    shares = TenantShares(lambda tenant: weights.get(tenant, 1.0))
    for since, tenant in enumerate("abc"):
        shares.wait(tenant, since)
    for tenant, service in (("a", 40.0), ("b", 10.0), ("c", 30.0)):
        shares.charge(tenant, service)
    weights["a"] = 1.0
    shares.reweigh()
    order = []
    for _ in range(3):
        assert shares.next is not None
        order.append(shares.next)
        shares.leave(shares.next)
    assert order == ["b", "c", "a"]


def test_counters_are_bounded_and_those_with_most_service_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shares_module, "MOST_COUNTERS", 8)
    shares = waiting("waits")
    for tenant, service in (("loud", 100.0), ("small", 1.0)):
        shares.pass_on(tenant)
        shares.charge(tenant, service)
    for number in range(50):
        shares.pass_on(f"t{number}")
        shares.charge(f"t{number}", 2.0)
    shares.wait("small", -1)
    assert shares.next == "small"
    shares.leave("small")
    shares.wait("loud", -1)
    shares.charge("waits", 99.0)
    assert shares.next == "waits"


# The bound of the paper, and its simulations.


@dataclass
class Running:
    tenant: str
    left: int
    first_at: float = 0.0


@dataclass
class Engine:
    """An engine that makes a token of each of its sequences per step, for tenants that wait."""

    shares: TenantShares
    places: int
    running: list[Running] = field(default_factory=list)
    service: Counter[str] = field(default_factory=Counter)

    def begin(self, tenant: str, prompt: int, outputs: int) -> None:
        self.shares.released(tenant)
        self.serve(tenant, PROMPT_WEIGHT * prompt)
        self.running.append(Running(tenant, outputs))

    def step(self) -> None:
        for each in self.running:
            self.serve(each.tenant, OUTPUT_WEIGHT)
            each.left -= 1
        self.running = [each for each in self.running if each.left]

    def serve(self, tenant: str, service: float) -> None:
        self.shares.charge(tenant, service)
        self.service[tenant] += service  # type: ignore[assignment]


@pytest.mark.parametrize("seed", range(12))
def test_two_tenants_that_wait_differ_by_less_than_the_bound(seed: int) -> None:
    """2 max(wp L, wq M) of Sheng et al., by the smaller weight; L and M are those of this run."""
    chance = random.Random(seed)
    weights = {"a": chance.choice([1.0, 3.0, 0.25]), "b": 1.0}
    longest, most = chance.randint(1, 400), chance.randint(1, 100)
    engine = Engine(waiting("a", "b", **weights), places=chance.randint(1, 16))
    sizes = {"a": chance.randint(1, longest), "b": chance.randint(1, longest)}
    bound = 2 * max(PROMPT_WEIGHT * longest, OUTPUT_WEIGHT * engine.places * most)
    for _ in range(1500):
        while len(engine.running) < engine.places:
            tenant = engine.shares.next
            assert tenant is not None
            prompt = chance.randint(sizes[tenant], longest)
            engine.begin(tenant, prompt, chance.randint(1, most))
        engine.step()
        a, b = (engine.service[each] / weights[each] for each in "ab")
        assert abs(a - b) <= bound / min(weights.values())
    share = engine.service["a"] / engine.service["b"]
    assert share == pytest.approx(weights["a"], rel=0.3 if engine.places * most < 300 else 1.0)


STEP_SECS, SEQUENCE_SECS, PROMPT_SECS = 0.012, 0.0004, 0.00008
SEQUENCES, PROMPT, OUTPUTS = 32, 100, 60


def first_tokens(seed: int, secs: float, *, flood: float, quiet: float) -> Counter[str]:
    """The waits of a quiet tenant for first tokens during a flood, in seconds by percentile."""
    now, waits = 0.0, list[float]()
    engine = Engine(TenantShares(equal), SEQUENCES)
    queues: dict[str, list[float]] = {"flood": [], "quiet": []}
    rates = {"flood": flood, "quiet": quiet}
    chances = {each: random.Random(f"{seed} {each}") for each in rates}
    next_at = {each: chances[each].expovariate(rate) for each, rate in rates.items() if rate}
    arrived: dict[int, float] = {}
    while now < secs:
        for tenant in next_at:
            while next_at[tenant] <= now:
                if not queues[tenant]:
                    engine.shares.wait(tenant, int(next_at[tenant] * SECOND))
                queues[tenant].append(next_at[tenant])
                next_at[tenant] += chances[tenant].expovariate(rates[tenant])
        prompts = 0
        while len(engine.running) < SEQUENCES and (tenant := engine.shares.next):
            since = queues[tenant].pop(0)
            outputs = 1 + int(random.Random(since).expovariate(1 / OUTPUTS))
            engine.begin(tenant, PROMPT, outputs)
            prompts += PROMPT
            if tenant == "quiet":
                arrived[id(engine.running[-1])] = since
            if queues[tenant]:
                engine.shares.wait(tenant, int(queues[tenant][0] * SECOND))
            else:
                engine.shares.leave(tenant)
        now += STEP_SECS + SEQUENCE_SECS * len(engine.running) + PROMPT_SECS * prompts
        waits += [now - arrived.pop(id(each)) for each in engine.running if id(each) in arrived]
        engine.step()
    waits.sort()
    return Counter({"count": len(waits), "p50": waits[len(waits) // 2], "p99": waits[-1]})


def test_a_quiet_tenant_during_a_flood_waits_for_a_place_and_no_queue() -> None:
    """Capacity is about 20 requests a second: the flood has ten times that, the other a twentieth.

    Places become free each 0.05 s.
    """
    alone = first_tokens(1, 60.0, flood=0.0, quiet=1.0)
    during = first_tokens(1, 60.0, flood=200.0, quiet=1.0)
    assert during["count"] == pytest.approx(alone["count"], abs=1)
    assert during["p50"] <= alone["p50"] + 3 * 0.05
    assert during["p99"] <= 1.0


# Shares of the requests in flight.


def test_a_tenant_may_have_its_part_of_those_that_were_active_in_the_last_minute() -> None:
    active = ActiveTenants()
    assert active.share("a", 1.0, 0) == 1.0
    assert active.share("b", 3.0, SECOND) == 0.75
    assert active.share("a", 1.0, 2 * SECOND) == 0.25
    assert active.share("idle", 0.0, 3 * SECOND) == 0.0
    assert active.share("a", 1.0, 2 * SECOND + ACTIVE_NS) == 1.0
    assert active.share("b", 1.0, 3 * SECOND + ACTIVE_NS) == 0.5


def test_a_tenant_is_active_from_its_latest_request_on_to_a_second() -> None:
    active = ActiveTenants()
    for at_ns in (0, SECOND // 2, SECOND):
        assert active.share("a", 1.0, at_ns) == 1.0
    assert active.share("b", 1.0, SECOND + ACTIVE_NS) == 0.5
    assert active.share("b", 3.0, SECOND + ACTIVE_NS) == 0.75
    assert active.share("b", 3.0, 2 * SECOND + ACTIVE_NS) == 1.0


def test_a_tenant_need_not_be_noted_again_for_a_second() -> None:
    active = ActiveTenants()
    for at_ns in (0, SECOND // 2):
        active.share("a", 1.0, at_ns)
        assert active.fresh == {"a": SECOND}
    active.share("a", 1.0, SECOND)
    assert active.fresh == {"a": 2 * SECOND}
    active.share("b", 1.0, 2 * SECOND + ACTIVE_NS)
    assert active.fresh == {"b": 3 * SECOND + ACTIVE_NS}


# Costs.


def test_a_row_of_a_model_without_an_answer_costs_one() -> None:
    assert Costs(PROMPT_WEIGHT, OUTPUT_WEIGHT).before(10_000, rows=8) == 8.0
    assert Costs(PROMPT_WEIGHT, OUTPUT_WEIGHT).slack == 1


def test_prompts_cost_their_tokens_without_those_in_the_cache() -> None:
    costs = Costs(3.0, OUTPUT_WEIGHT)
    assert costs.prompted(100, 40, size_bytes=0) == 180.0
    assert costs.before(400, rows=1) == 300.0
    for _ in range(200):
        costs.prompted(100_000, 0, size_bytes=100_000)  # a byte each
    assert costs.before(400, rows=1) == pytest.approx(1200.0)


def test_rows_cost_the_mean_time_of_executions() -> None:
    costs = Costs(PROMPT_WEIGHT, OUTPUT_WEIGHT)
    assert costs.computed(8.0, rows=4) == 8.0
    assert costs.before(10_000, rows=3) == 6.0
    costs.computed(12.0, rows=1)
    assert costs.before(10_000, rows=1) == pytest.approx(3.0)


def test_short_answers_have_one_more_request_ready() -> None:
    costs = Costs(PROMPT_WEIGHT, OUTPUT_WEIGHT)
    costs.prompted(10, 0, 0)
    costs.answered(FEW_TOKENS - 1)
    assert costs.slack == 2
    costs.answered(1000)
    assert costs.slack == 1
    tensors = Costs(PROMPT_WEIGHT, OUTPUT_WEIGHT)
    tensors.computed(1.0, 1)
    assert tensors.slack == 1
