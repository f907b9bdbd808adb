"""When a batch waits a few turns of the loop for others, and for how many."""

import asyncio

from gateway.schedulers.batching import (
    CREDIT,
    LIMIT_NS,
    LOOK_AGAIN,
    PATIENCE,
    TRY_EVERY,
    Gathering,
    Wait,
)
from tests.builders import ScriptedInstance, read_all, settle, soon
from tests.gateway.conftest import Start
from tests.gateway.schedulers.queues import Queue, asked, dynamic, finish


def batches_until_worthwhile(gathering: Gathering) -> int:
    count = 1
    while not gathering.worthwhile:
        count += 1
    return count


MOST = 1000


def vain(gathering: Gathering) -> None:
    gathering.waited(1, 1, MOST)


def test_at_first_and_after_a_vain_wait_one_batch_in_so_many_waits() -> None:
    gathering = Gathering()
    for _ in range(3):
        assert batches_until_worthwhile(gathering) == TRY_EVERY
        vain(gathering)


def test_waiting_goes_on_while_it_brings_something_now_and_then() -> None:
    gathering = Gathering()
    gathering.waited(1, 2, MOST)
    for _ in range(3):
        for _ in range(CREDIT - 1):
            assert gathering.worthwhile
            vain(gathering)
        assert gathering.worthwhile
        gathering.waited(1, 2, MOST)


def test_waiting_ends_after_a_row_of_vain_waits() -> None:
    gathering = Gathering()
    gathering.waited(1, 2, MOST)
    for _ in range(CREDIT):
        assert gathering.worthwhile
        vain(gathering)
    assert not gathering.worthwhile


def test_no_more_are_waited_for_than_came_the_last_time() -> None:
    gathering = Gathering()
    assert gathering.enough(MOST) == MOST
    gathering.waited(1, 8, MOST)
    assert gathering.enough(MOST) == 8
    assert gathering.enough(4) == 4
    gathering.waited(2, 5, 8)  # that was the end of patience: three have gone
    assert gathering.enough(MOST) == 5
    gathering.waited(2, 7, 5)  # the last turn brought three at once
    assert gathering.enough(MOST) == 7
    vain(gathering)
    assert gathering.enough(MOST) == MOST  # nobody came: the next wait looks for anybody


def test_whoever_has_waited_in_vain_looks_for_anybody() -> None:
    gathering = Gathering()
    gathering.waited(8, 8, MOST)  # one client alone, with eight rows
    assert gathering.enough(MOST) == MOST


def test_now_and_then_a_wait_is_not_cut_short() -> None:
    gathering = Gathering()
    gathering.waited(1, 8, MOST)
    for _ in range(2):
        for _ in range(LOOK_AGAIN):
            assert gathering.enough(MOST) == 8
            gathering.waited(8, 8, 8)
        assert gathering.enough(MOST) == MOST
        gathering.waited(1, 8, MOST)


def test_to_find_all_there_at_once_says_nothing_against_waiting() -> None:
    gathering = Gathering()
    gathering.waited(1, 8, MOST)
    for _ in range(LOOK_AGAIN):
        gathering.waited(8, 8, 8)
    assert gathering.credit == CREDIT


def turns(arrivals: dict[int, int], enough: int = 1000, turn_ns: int = 1000) -> int:
    """For how many turns a wait goes on, with so many rows from those turns on."""
    wait, rows, turn = Wait(1, began_ns=7), 1, 0
    while not wait.over(rows, enough, 7 + turn * turn_ns):
        turn += 1
        rows = arrivals.get(turn, rows)
    return turn


def test_a_wait_ends_after_so_many_quiet_turns() -> None:
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


async def after_batches(start: Start, count: int) -> tuple[Queue, ScriptedInstance]:
    """A queue that has had so many batches of one request each."""
    queue = start(dynamic(8))
    instance = queue.employ(concurrency=1)
    for _ in range(count):
        queue.submit("-")
        finish(await instance.begun())
        await settle()
    return queue, instance


async def one_by_one(start: Start, patient: bool) -> list[list[str]]:
    """What shares executions if three requests come two turns apart, after many single ones."""
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


async def test_a_batch_that_waits_has_what_comes_a_few_turns_later(start: Start) -> None:
    assert await one_by_one(start, patient=True) == [["a", "b", "c"]]


async def test_a_batch_that_does_not_wait_has_what_is_there(start: Start) -> None:
    assert await one_by_one(start, patient=False) == [["a"], ["b", "c"]]


async def test_an_instance_that_goes_while_its_batch_waits_takes_nothing(start: Start) -> None:
    queue, leaving = await after_batches(start, TRY_EVERY - 1)
    (entry,) = queue.submit("a")
    await settle()
    staying = queue.employ(concurrency=1)
    await soon(queue.scheduler.withdraw(leaving))
    finish(await staying.begun())
    assert await soon(read_all(entry.stream)) == ["a"]
    assert "a" not in leaving.asked


async def test_whoever_leaves_while_its_batch_waits_is_not_executed(start: Start) -> None:
    queue, instance = await after_batches(start, TRY_EVERY - 1)
    gone, staying = queue.submit("gone", "staying")
    await settle()
    gone.stream.cancel()
    execution = await instance.begun()
    assert asked(execution) == ["staying"]
    finish(execution)
    assert await soon(read_all(staying.stream)) == ["staying"]
