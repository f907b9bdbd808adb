"""Triton's batching rules as a function of the queue and the time."""

import asyncio
import random
from dataclasses import replace

import pytest

from gateway.schedulers.batching import (
    CREDIT,
    LIMIT_NS,
    LOOK_AGAIN,
    PATIENCE,
    TRY_EVERY,
    BatchWait,
    Decision,
    FirstComeBatching,
    WaitHistory,
    most_rows,
)
from gateway.schedulers.queue import QueuedRequest
from tests.builders import DECOUPLED, ScriptedInstance, read_all, settle, soon
from tests.gateway.conftest import Start
from tests.gateway.schedulers.queues import MS, Queue, asked, dynamic, finish, names, waiting


def batching(max_batch_size: int = 8, **fields: object) -> FirstComeBatching:
    config = dynamic(max_batch_size, **fields)
    assert config.dynamic_batching is not None
    return FirstComeBatching(config, config.dynamic_batching)


def rows(*sizes: int, arrived_ms: float = 0) -> list[QueuedRequest]:
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
def test_without_a_delay_the_largest_preferred_size_executes_or_else_all(
    preferred: tuple[int, ...], sizes: tuple[int, ...], expected: str
) -> None:
    decision = batching(preferred_batch_size=preferred).decide(rows(*sizes), 0)
    assert sent(decision) == expected


def test_a_backlog_of_seven_executes_as_four_and_three() -> None:
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
def test_after_the_delay_all_requests_execute(count: int) -> None:
    decision = batching(**DELAY).decide(rows(*(1,) * count), 5 * MS)
    assert len(decision.batch) == count


def test_a_preferred_size_executes_before_the_delay_ends() -> None:
    rules = batching(**DELAY)
    assert sent(rules.decide(rows(1, 1, 1, 1), 0)) == "abcd"
    assert sent(rules.decide(rows(*(1,) * 6), 0)) == "abcd"


def test_a_request_beyond_all_preferred_sizes_does_not_wait() -> None:
    rules = batching(**DELAY | {"preferred_batch_size": (4,)})
    assert sent(rules.decide(rows(6), 0)) == "a"


def test_the_oldest_counts_for_the_delay_even_if_it_is_not_the_first() -> None:
    queue = [waiting("urgent", arrived_ms=4, level=1), waiting("old", arrived_ms=0, level=2)]
    assert names(batching(**DELAY).decide(queue, 5 * MS).batch) == ["urgent", "old"]


def test_a_batch_waits_for_the_next_preferred_size() -> None:
    rules = batching(max_batch_size=16, preferred_batch_size=(3, 9), max_queue_delay_microseconds=9)
    assert rules.decide(rows(2), 0).enough_rows == 3
    assert rules.decide(rows(2, 2), 0).enough_rows == 9


def test_an_incompatible_request_ends_the_batch_and_is_not_overtaken() -> None:
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
def test_random_requests_execute_once_in_order_and_within_the_limits(seed: int) -> None:
    choice = random.Random(seed)
    preferred = tuple({choice.randint(1, 8) for _ in range(choice.randint(0, 3))})
    delay_us = choice.choice([0, 0, 1, 5])
    rules = batching(8, preferred_batch_size=preferred, max_queue_delay_microseconds=delay_us)
    queue: list[QueuedRequest] = []
    came: list[QueuedRequest] = []
    went: list[QueuedRequest] = []
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


def batches_until_worthwhile(gathering: WaitHistory) -> int:
    count = 1
    while not gathering.worthwhile:
        count += 1
    return count


MOST = 1000


def vain(gathering: WaitHistory) -> None:
    gathering.waited(1, 1, MOST)


def test_at_first_and_after_a_vain_wait_one_batch_in_several_waits() -> None:
    gathering = WaitHistory()
    for _ in range(3):
        assert batches_until_worthwhile(gathering) == TRY_EVERY
        vain(gathering)


def test_batches_wait_while_waits_bring_requests_now_and_then() -> None:
    gathering = WaitHistory()
    gathering.waited(1, 2, MOST)
    for _ in range(3):
        for _ in range(CREDIT - 1):
            assert gathering.worthwhile
            vain(gathering)
        assert gathering.worthwhile
        gathering.waited(1, 2, MOST)


def test_waiting_ends_after_a_row_of_vain_waits() -> None:
    gathering = WaitHistory()
    gathering.waited(1, 2, MOST)
    for _ in range(CREDIT):
        assert gathering.worthwhile
        vain(gathering)
    assert not gathering.worthwhile


def test_no_more_are_waited_for_than_came_the_last_time() -> None:
    gathering = WaitHistory()
    assert gathering.enough(MOST) == MOST
    gathering.waited(1, 8, MOST)
    assert gathering.enough(MOST) == 8
    assert gathering.enough(4) == 4
    gathering.waited(2, 5, 8)  # that was the end of patience: three have gone
    assert gathering.enough(MOST) == 5
    gathering.waited(2, 7, 5)  # the last turn brought three at once
    assert gathering.enough(MOST) == 7
    vain(gathering)
    assert gathering.enough(MOST) == MOST  # no request arrived: the next wait is for any number


def test_after_a_useless_wait_the_next_wait_is_not_cut_short() -> None:
    gathering = WaitHistory()
    gathering.waited(8, 8, MOST)  # one client alone, with eight rows
    assert gathering.enough(MOST) == MOST


def test_now_and_then_a_wait_is_not_cut_short() -> None:
    gathering = WaitHistory()
    gathering.waited(1, 8, MOST)
    for _ in range(2):
        for _ in range(LOOK_AGAIN):
            assert gathering.enough(MOST) == 8
            gathering.waited(8, 8, 8)
        assert gathering.enough(MOST) == MOST
        gathering.waited(1, 8, MOST)


def test_to_find_all_there_at_once_says_nothing_against_waiting() -> None:
    gathering = WaitHistory()
    gathering.waited(1, 8, MOST)
    for _ in range(LOOK_AGAIN):
        gathering.waited(8, 8, 8)
    assert gathering.credit == CREDIT


def turns(arrivals: dict[int, int], enough: int = 1000, turn_ns: int = 1000) -> int:
    """The turns that a wait lasts, with these rows from these turns on."""
    wait, rows, turn = BatchWait(1, began_ns=7), 1, 0
    while not wait.over(rows, enough, 7 + turn * turn_ns):
        turn += 1
        rows = arrivals.get(turn, rows)
    return turn


def test_a_wait_ends_after_a_number_of_quiet_turns() -> None:
    assert turns({}) == PATIENCE
    assert turns({5: 2}) == 5 + PATIENCE
    assert turns({5: 2, 10: 4}) == 10 + PATIENCE


def test_a_wait_ends_when_enough_are_there() -> None:
    assert turns({2: 8}, enough=8) == 2
    assert turns({}, enough=1) == 0


def test_a_wait_ends_in_time_though_requests_keep_coming() -> None:
    always = {turn: turn + 1 for turn in range(1, 100_000)}
    assert turns(always, enough=100_000) == LIMIT_NS // 1000
    assert turns(always, turn_ns=LIMIT_NS) == 1


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits of batches end by their turns alone, also on a busy machine."""
    monkeypatch.setattr("gateway.schedulers.batching.LIMIT_NS", 3600 * 10**9)


async def after_batches(start: Start, count: int) -> tuple[Queue, ScriptedInstance]:
    """A queue that has had `count` batches of one request each."""
    queue = start(dynamic(8))
    instance = queue.employ(concurrency=1)
    for _ in range(count):
        queue.submit("-")
        finish(await instance.begun())
        await settle()
    return queue, instance


async def one_by_one(start: Start, patient: bool) -> list[list[str]]:
    """The executions if three requests come two turns apart, after many single ones."""
    queue, instance = await after_batches(start, TRY_EVERY - patient)
    found = []
    for text in "abc":
        queue.submit(text)
        for _ in range(2):
            await asyncio.sleep(0)
    await settle()
    for _ in range(1 if patient else 2):
        execution = await instance.begun()
        found.append(asked(execution))
        finish(execution)
        await settle()
    return found


@pytest.mark.usefixtures("unhurried")
async def test_a_batch_that_waits_contains_requests_of_the_next_turns(start: Start) -> None:
    assert await one_by_one(start, patient=True) == [["a", "b", "c"]]


async def test_a_batch_that_does_not_wait_contains_the_queued_requests(start: Start) -> None:
    assert await one_by_one(start, patient=False) == [["a"], ["b", "c"]]


@pytest.mark.usefixtures("unhurried")
async def test_an_instance_removed_while_its_batch_waits_executes_nothing(start: Start) -> None:
    queue, leaving = await after_batches(start, TRY_EVERY - 1)
    (entry,) = queue.submit("a")
    await settle()
    staying = queue.employ(concurrency=1)
    await soon(queue.scheduler.remove(leaving))
    finish(await staying.begun())
    assert await soon(read_all(entry.stream)) == ["a"]
    assert "a" not in leaving.asked


@pytest.mark.usefixtures("unhurried")
async def test_a_request_cancelled_while_its_batch_waits_is_not_executed(start: Start) -> None:
    queue, instance = await after_batches(start, TRY_EVERY - 1)
    gone, staying = queue.submit("gone", "staying")
    await settle()
    gone.stream.cancel()
    execution = await instance.begun()
    assert asked(execution) == ["staying"]
    finish(execution)
    assert await soon(read_all(staying.stream)) == ["staying"]
