"""Triton's batching rules as a function of the queue and the time."""

import random
from dataclasses import replace

import pytest

from gateway.schedulers.batching import Decision, FirstComeBatching, most_rows
from gateway.schedulers.queue import Waiting
from tests.builders import DECOUPLED
from tests.gateway.schedulers.queues import MS, dynamic, names, waiting


def batching(max_batch_size: int = 8, **fields: object) -> FirstComeBatching:
    config = dynamic(max_batch_size, **fields)
    assert config.dynamic_batching is not None
    return FirstComeBatching(config, config.dynamic_batching)


def rows(*sizes: int, arrived_ms: float = 0) -> list[Waiting]:
    names = "abcdefghijklmnop"
    return [waiting(names[index], size, arrived_ms) for index, size in enumerate(sizes)]


def sent(decision: Decision) -> str:
    return "".join(names(decision.batch))


def test_nothing_is_due_in_an_empty_queue() -> None:
    assert batching().decide([], 0) == Decision()


@pytest.mark.parametrize(
    ("preferred", "sizes", "expected"),
    [
        ((8,), (1,), "a"),
        ((8,), (1, 1, 1), "abc"),
        ((8,), (1,) * 10, "abcdefgh"),
        ((8,), (3, 3, 3), "ab"),
        ((8,), (5, 5), "a"),
        ((4,), (1,) * 7, "abcd"),
        ((4,), (1,) * 3, "abc"),
        ((4,), (6, 1), "a"),
        ((4,), (3, 2), "a"),
        ((4,), (2, 1, 2), "ab"),
        ((2, 4), (1,) * 3, "ab"),
        ((2, 4), (1,) * 5, "abcd"),
        ((), (1,) * 10, "abcdefgh"),
    ],
    ids=str,
)
def test_without_a_delay_the_best_preferred_size_goes_or_else_what_there_is(
    preferred: tuple[int, ...], sizes: tuple[int, ...], expected: str
) -> None:
    decision = batching(preferred_batch_size=preferred).decide(rows(*sizes), 0)
    assert sent(decision) == expected


def test_a_backlog_of_seven_goes_as_four_and_three() -> None:
    rules, queue, batches = batching(preferred_batch_size=(4,)), rows(*(1,) * 7), []
    while queue:
        batches.append(sent(rules.decide(queue, 0)))
        del queue[: len(batches[-1])]
    assert batches == ["abcd", "efg"]


def test_a_model_that_does_not_batch_gets_one_request_at_a_time() -> None:
    assert sent(batching(max_batch_size=0).decide(rows(1, 1), 0)) == "a"


DELAY = {"preferred_batch_size": (4, 8), "max_queue_delay_microseconds": 5000}


@pytest.mark.parametrize("now_ms", [0, 4.999])
def test_requests_wait_for_a_preferred_size_until_the_delay_is_over(now_ms: float) -> None:
    decision = batching(**DELAY).decide(rows(1, 1), int(now_ms * MS))
    assert decision == Decision(until_ns=5 * MS, enough_rows=4)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7])
def test_once_the_delay_is_over_all_go_whatever_their_number(count: int) -> None:
    decision = batching(**DELAY).decide(rows(*(1,) * count), 5 * MS)
    assert len(decision.batch) == count


def test_a_preferred_size_goes_before_the_delay_is_over() -> None:
    rules = batching(**DELAY)
    assert sent(rules.decide(rows(1, 1, 1, 1), 0)) == "abcd"
    assert sent(rules.decide(rows(*(1,) * 6), 0)) == "abcd"


def test_a_request_beyond_all_preferred_sizes_does_not_wait() -> None:
    rules = batching(**DELAY | {"preferred_batch_size": (4,)})
    assert sent(rules.decide(rows(6), 0)) == "a"


def test_the_oldest_counts_for_the_delay_even_if_it_is_not_the_first() -> None:
    queue = [waiting("urgent", arrived_ms=4, level=1), waiting("old", arrived_ms=0, level=2)]
    assert names(batching(**DELAY).decide(queue, 5 * MS).batch) == ["urgent", "old"]


def test_the_next_preferred_size_is_what_waiting_is_for() -> None:
    rules = batching(max_batch_size=16, preferred_batch_size=(3, 9), max_queue_delay_microseconds=9)
    assert rules.decide(rows(2), 0).enough_rows == 3
    assert rules.decide(rows(2, 2), 0).enough_rows == 9


def test_requests_that_do_not_fit_together_end_the_batch_and_nobody_overtakes() -> None:
    keys = ["x", "x", "y", "x"]
    queue = [waiting(name, key=key) for name, key in zip("abcd", keys, strict=True)]
    rules, batches = batching(**DELAY), []
    while queue:
        batches.append(sent(rules.decide(queue, 0)) or sent(rules.decide(queue, 5 * MS)))
        del queue[: len(batches[-1])]
    assert batches == ["ab", "c", "d"]


def test_levels_share_a_batch() -> None:
    queue = [waiting("a", level=1), waiting("b", level=2)]
    assert names(batching(preferred_batch_size=(8,)).decide(queue, 0).batch) == ["a", "b"]


def test_responses_in_order_of_a_decoupled_model_need_executions_of_one() -> None:
    config = dynamic(8, preserve_ordering=True)
    assert config.dynamic_batching is not None
    assert most_rows(config, config.dynamic_batching) == 8
    decoupled = replace(config, model_transaction_policy=DECOUPLED)
    assert most_rows(decoupled, config.dynamic_batching) == 1


@pytest.mark.parametrize("seed", range(20))
def test_whatever_comes_is_executed_once_in_order_and_within_the_limits(seed: int) -> None:
    choice = random.Random(seed)
    preferred = tuple({choice.randint(1, 8) for _ in range(choice.randint(0, 3))})
    delay_us = choice.choice([0, 0, 1, 5])
    rules = batching(8, preferred_batch_size=preferred, max_queue_delay_microseconds=delay_us)
    queue: list[Waiting] = []
    came: list[Waiting] = []
    went: list[Waiting] = []
    for now in range(0, 400_000, 500):
        for _ in range(choice.choice([0, 0, 1, 3])):
            came.append(waiting(rows=choice.randint(1, 8), key=choice.choice("xxxy")))
            came[-1].arrived_ns = now
            queue.append(came[-1])
        batch = rules.decide(queue, now).batch if choice.random() < 0.7 else ()
        assert sum(each.rows for each in batch) <= 8
        assert len({each.key for each in batch}) <= 1
        assert list(batch) == queue[: len(batch)]
        went += queue[: len(batch)]
        del queue[: len(batch)]
    while queue:
        batch = rules.decide(queue, 10**9).batch
        went += queue[: len(batch)]
        del queue[: len(batch)]
    assert went == came
