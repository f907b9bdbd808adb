"""Batches by length: pure decisions, and what they are worth to clients that ask and ask again."""

import heapq
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from itertools import combinations, pairwise

import pytest

from gateway.schedulers.batching import Decision
from gateway.schedulers.length_batching import (
    DEFAULT_BUDGET,
    LEAST_BUDGET,
    LEAST_OVERHEAD,
    LOOK_AHEAD,
    BatchCost,
    BatchTime,
    LengthBatching,
    cheapest,
)
from gateway.schedulers.queue import QueuedRequest
from tests.gateway.schedulers.queues import MS, TOKENS, dynamic, names, waiting

COST = BatchCost(budget=100, overhead=5)


def queue_of(*lengths: int, **fields: object) -> list[QueuedRequest]:
    return [waiting(str(index), length=length, **fields) for index, length in enumerate(lengths)]  # type: ignore[arg-type]


def batching(cost: BatchCost = COST, max_batch_size: int = 8, **fields: object) -> LengthBatching:
    config = dynamic(max_batch_size, TOKENS, **fields)
    assert config.dynamic_batching is not None
    return LengthBatching(config, config.dynamic_batching, cost)


def padded(batch: Sequence[QueuedRequest]) -> int:
    return max(each.length for each in batch) * sum(each.rows for each in batch)


def lengths(decision: Decision) -> list[int]:
    return sorted(each.length for each in decision.batch)


def test_nothing_is_due_in_an_empty_queue() -> None:
    assert batching().decide([], 0) == Decision()


@pytest.mark.parametrize(
    ("queue", "expected"),
    [
        ((10,), [10]),
        ((10, 10, 10), [10, 10, 10]),
        ((10, 50, 11, 48), [10, 11]),
        ((50, 10, 11, 48), [48, 50]),
        ((30, 31, 32), [30, 31, 32]),
        ((30, 31, 32, 33), [30, 31]),
        ((500, 10, 490), [500]),
        ((10, 12), [10, 12]),
        ((10, 16), [10]),
        ((1,) * 20, [1] * 8),
    ],
    ids=str,
)
def test_the_first_request_executes_with_those_of_similar_lengths(
    queue: tuple[int, ...], expected: list[int]
) -> None:
    assert lengths(batching().decide(queue_of(*queue), 0)) == expected


def test_equal_lengths_fill_a_batch_to_its_budget_and_not_beyond() -> None:
    for count in (9, 10, 11):
        decision = batching(max_batch_size=64).decide(queue_of(*(10,) * count), 0)
        assert padded(decision.batch) <= 100
    exact = batching(max_batch_size=64).decide(queue_of(*(10,) * 10), 0)
    assert len(exact.batch) == 10


def test_rows_count_as_often_as_they_are() -> None:
    queue = queue_of(10, 10, 10, rows=4)
    assert [each.rows for each in batching().decide(queue, 0).batch] == [4, 4]
    assert len(batching(max_batch_size=64).decide(queue, 0).batch) in (1, 2)


def test_a_request_beyond_the_budget_executes_alone() -> None:
    assert len(batching().decide(queue_of(400, 400), 0).batch) == 1


def test_only_requests_of_the_same_key_and_level_join_the_first() -> None:
    queue = [
        waiting("first", level=1, key="x", length=10),
        waiting("other shape", level=1, key="y", length=10),
        waiting("less urgent", level=2, key="x", length=10),
        waiting("like it", level=1, key="x", length=10),
    ]
    assert names(batching().decide(queue, 0).batch) == ["first", "like it"]


def test_requests_wait_for_a_full_budget_until_the_delay_is_over() -> None:
    rules = batching(max_queue_delay_microseconds=5000)
    few = queue_of(10, 11)
    assert rules.decide(few, 0) == Decision(until_ns=5 * MS)
    assert rules.decide(few, 5 * MS - 1).batch == ()
    assert lengths(rules.decide(few, 5 * MS)) == [10, 11]
    assert rules.decide(queue_of(50, 50), 0).batch != ()
    assert rules.decide(queue_of(*(1,) * 8), 0).batch != ()


@pytest.mark.parametrize("seed", range(30))
def test_a_cut_is_the_cheapest_there_is(seed: int) -> None:
    choice = random.Random(seed)
    queue = [
        waiting(length=choice.randint(1, 60), rows=choice.choice([1, 1, 2]))
        for _ in range(choice.randint(1, 8))
    ]
    batches = cheapest(queue, 4, COST)
    assert sorted(map(id, queue)) == sorted(id(each) for batch in batches for each in batch)
    assert all(len(batch) == 1 or padded(batch) <= 100 for batch in batches)
    assert all(len(batch) == 1 or sum(each.rows for each in batch) <= 4 for batch in batches)
    assert sum(padded(batch) + COST.overhead for batch in batches) == _least(queue, 4)


def _least(queue: Sequence[QueuedRequest], max_rows: int) -> float:
    """The cost of the best of all ways to cut a sorted queue."""
    ranked = sorted(queue, key=lambda each: each.length)
    least = math.inf
    for count in range(len(ranked)):
        for inner in combinations(range(1, len(ranked)), count):
            bounds = [0, *inner, len(ranked)]
            batches = [ranked[a:b] for a, b in pairwise(bounds)]
            if all(
                len(batch) == 1
                or (padded(batch) <= 100 and sum(each.rows for each in batch) <= max_rows)
                for batch in batches
            ):
                least = min(least, sum(padded(batch) + COST.overhead for batch in batches))
    return least


def test_no_request_is_passed_over_more_often_than_there_were_requests_before_it() -> None:
    choice = random.Random(3)
    rules = batching()
    queue = queue_of(*(choice.randint(1, 90) for _ in range(20)))
    allowed = {each: index for index, each in enumerate(queue)}
    while queue:
        batch = rules.decide(queue, 0).batch
        assert queue[0] in batch
        queue = [each for each in queue if each not in batch]
        for each in queue:
            if each in allowed:
                allowed[each] -= 1
                assert allowed[each] >= 0
        if len(allowed) < 200:
            newcomers = queue_of(*(choice.randint(1, 90) for _ in range(4)))
            allowed |= {each: len(queue) + index for index, each in enumerate(newcomers)}
            queue += newcomers


def test_a_long_queue_is_looked_at_only_so_far() -> None:
    queue = queue_of(10, *(50,) * LOOK_AHEAD, 10)
    assert len(batching().decide(queue, 0).batch) == 1


# What it is worth: clients that ask again as soon as they are answered, on a runtime of known cost.

TOKEN_SECS = 1e-4
RUNTIME = BatchCost(budget=512, overhead=15)
Policy = Callable[[list[QueuedRequest]], Sequence[QueuedRequest]]


@dataclass(order=True)
class Event:
    """At that time requests come, or the batch of an instance has ended."""

    at: float
    number: int
    came: QueuedRequest | None = dataclass_field(compare=False)
    ended: Sequence[QueuedRequest] = dataclass_field(compare=False, default=())


class Simulation:
    """A closed loop of clients, lengths as of sentences; it counts time and waiting."""

    def __init__(self, decide: Policy, clients: int, instances: int) -> None:
        self._decide = decide
        self._random = random.Random(7)
        self._idle = instances
        self._events: list[Event] = []
        self._queue: list[QueuedRequest] = []
        self.waits: list[float] = []
        self.now = 0.0
        for _ in range(clients):
            self._ask()

    def run(self, count: int) -> "Simulation":
        """Run until `count` requests have been answered."""
        while len(self.waits) < count:
            event = heapq.heappop(self._events)
            self.now = event.at
            if event.came is not None:
                self._queue.append(event.came)
            else:
                self._idle += 1
                self.waits += [self.now - each.arrived_ns / 1e9 for each in event.ended]
                for _ in event.ended:
                    self._ask()
            while self._idle and self._queue:
                self._start(self._decide(self._queue))
        return self

    @property
    def rate(self) -> float:
        """Requests per second."""
        return len(self.waits) / self.now

    def quantile(self, part: float) -> float:
        """Seconds within which that part of the requests was answered."""
        return sorted(self.waits)[int(part * len(self.waits))]

    def _ask(self) -> None:
        length = min(max(round(self._random.lognormvariate(3.88, 0.75)), 8), 256)
        at = self.now + self._random.uniform(0.0005, 0.002)
        self._push(at, waiting(arrived_ms=at * 1000, length=length))

    def _start(self, batch: Sequence[QueuedRequest]) -> None:
        self._idle -= 1
        self._queue = [each for each in self._queue if each not in batch]
        seconds = (padded(batch) + RUNTIME.overhead) * TOKEN_SECS
        self._push(self.now + seconds, None, batch)

    def _push(
        self, at: float, came: QueuedRequest | None, ended: Sequence[QueuedRequest] = ()
    ) -> None:
        heapq.heappush(self._events, Event(at, len(self._events) + len(self.waits), came, ended))


def by_length(queue: list[QueuedRequest]) -> Sequence[QueuedRequest]:
    return batching(RUNTIME, max_batch_size=64).decide(queue, 0).batch


def one_by_one(queue: list[QueuedRequest]) -> Sequence[QueuedRequest]:
    return queue[:1]


def in_the_order_they_came(queue: list[QueuedRequest]) -> Sequence[QueuedRequest]:
    count = 1
    while count < len(queue) and padded(queue[: count + 1]) <= RUNTIME.budget:
        count += 1
    return queue[:count]


@pytest.mark.parametrize("instances", [1, 2])
def test_batches_by_length_serve_more_and_keep_the_slowest_near_to_the_order(
    instances: int,
) -> None:
    found = Simulation(by_length, 32, instances).run(1500)
    alone = Simulation(one_by_one, 32, instances).run(1500)
    mixed = Simulation(in_the_order_they_came, 32, instances).run(1500)
    mean_length = 63
    ideal = instances / (mean_length * TOKEN_SECS * (1 + RUNTIME.overhead / RUNTIME.budget))
    assert found.rate > 1.08 * alone.rate
    assert found.rate > 1.4 * mixed.rate
    assert found.rate > 0.9 * ideal
    assert found.quantile(0.99) < 1.6 * alone.quantile(0.99)
    assert found.quantile(0.99) < mixed.quantile(0.99)


SIZES = (64, 128, 256, 512, 1024, 2048)


def points(overhead: float, per_token: float, slower_from: int = 10**9) -> list[BatchTime]:
    """Times of a runtime whose tokens cost half as much again beyond a size."""
    return [
        BatchTime(size, per_token * (overhead + size + max(0, size - slower_from) / 2))
        for size in SIZES
    ]


def test_a_runtime_that_slows_down_gets_the_size_before() -> None:
    cost = BatchCost.measured(points(15, 1e-4, slower_from=512))
    assert cost.budget == 512
    assert cost.overhead == pytest.approx(15)


def test_a_runtime_that_gets_faster_and_faster_gets_the_largest_size() -> None:
    cost = BatchCost.measured(points(4000, 1e-7))
    assert cost.budget == SIZES[-1]
    assert cost.overhead == pytest.approx(SIZES[-1])


def test_the_smallest_of_nearly_equal_sizes_is_enough() -> None:
    assert BatchCost.measured(points(10, 1e-4)).budget == 512


def test_times_that_do_not_grow_are_all_overhead() -> None:
    flat = [BatchTime(size, 0.001) for size in SIZES]
    assert BatchCost.measured(flat) == BatchCost(SIZES[-1], float(SIZES[-1]))


def test_noise_moves_the_overhead_but_little() -> None:
    noisy = [
        BatchTime(each.tokens, each.seconds * factor)
        for each, factor in zip(points(15, 1e-4), (1.05, 0.97, 1.02, 0.99, 1.1, 1.1), strict=True)
    ]
    assert 5 < BatchCost.measured(noisy).overhead < 40


def test_measurements_of_a_busy_machine_do_not_prevent_batches() -> None:
    busy = [BatchTime(64, 0.05), BatchTime(128, 0.15), BatchTime(256, 0.31)]
    assert BatchCost.measured(busy) == BatchCost(LEAST_BUDGET, LEAST_OVERHEAD)


@pytest.mark.parametrize("count", [0, 1])
def test_too_few_measurements_teach_nothing(count: int) -> None:
    assert BatchCost.measured(points(15, 1e-4)[:count]) == BatchCost.assumed()


def test_an_assumed_cost_has_some_overhead() -> None:
    assert BatchCost.assumed().budget == DEFAULT_BUDGET
    assert 0 < BatchCost.assumed(64).overhead < 64
