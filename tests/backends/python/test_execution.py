"""Answers of executions: in order, by request, and all released at a disconnect."""

import asyncio

import pytest

from backends.python.execution import Backlog, WorkerExecution
from backends.python.loading import WorkerLimits
from gateway.backend import Note
from gateway.messages import InferResponse
from tests.backends.python.played import BODY, ERROR, LAST, PART, Ends, Played, leave
from tests.builders import settle, soon, text_request


def execution(
    ends: Ends, count: int = 2, *, backlog: Backlog | None = None, number: int = 1
) -> WorkerExecution:
    """Requests 10, 11, ... that the scheduler knows as 0, 1, ..."""
    return WorkerExecution(
        [text_request()] * count,
        range(count),
        backlog or Backlog(ends.link, ordered=True),
        number=number,
        first=10 * number,
    )


async def test_answers_have_the_schedulers_indexes(ends: Ends) -> None:
    backlog = Backlog(ends.link, ordered=True)
    requests = [text_request()] * 2
    found = WorkerExecution(requests, [5, 3], backlog, number=1, first=10)
    found.answer(11, LAST)
    found.answer(10, PART)
    assert await found.answers() == [(3, LAST), (5, PART)]


async def test_it_is_over_when_execute_has_returned_and_every_request_is_done(ends: Ends) -> None:
    found = execution(ends)
    assert found.answer(10, LAST)
    assert not found.answer(11, PART)
    found.end()
    assert not found.over
    assert await found.answers() == [(0, LAST), (1, PART), (0, Note.FREED)]
    found.answer(11, ERROR)
    assert found.over
    assert await found.answers() == [(1, ERROR)]
    assert await found.answers() == []


async def test_execute_is_waited_for_though_every_request_is_done(ends: Ends) -> None:
    found = execution(ends, 1)
    found.answer(10, LAST)
    await found.answers()
    waiting = asyncio.ensure_future(found.answers())
    await settle()
    assert not waiting.done()
    found.end()
    found.wake()
    assert await soon(waiting) == []


async def test_a_rescheduled_request_is_done_here(ends: Ends) -> None:
    found = execution(ends, 1)
    found.reschedule(10)
    found.end()
    assert await found.answers() == [(0, Note.RESCHEDULED)]
    assert found.over


async def test_the_end_of_the_worker_fails_open_requests(ends: Ends) -> None:
    found = execution(ends)
    found.answer(10, LAST)
    found.abort(ERROR)
    assert await found.answers() == [(0, LAST), (1, ERROR)]
    assert found.over
    assert found.aborted


async def test_the_return_of_execute_is_waited_for(ends: Ends) -> None:
    found = execution(ends)
    found.drop()
    leaving = asyncio.ensure_future(found.until_returned())
    await settle()
    assert not leaving.done()
    found.end()
    found.wake()
    await soon(leaving)
    assert found.over


async def test_the_timer_ends_with_execute(ends: Ends) -> None:
    found = execution(ends)
    timer = found.timer = asyncio.get_running_loop().call_later(60, print)
    found.end()
    assert timer.cancelled()


async def test_a_flag_alone_ends_a_request(ends: Ends) -> None:
    found = execution(ends, 1)
    assert found.answer(10, InferResponse(final=True))


# WorkerExecutions that a worker was handed while it was busy.


def row(ends: Ends, count: int) -> list[WorkerExecution]:
    """WorkerExecutions of one request each, of one worker: requests 10, 20, ..."""
    backlog = Backlog(ends.link, ordered=True)
    return [execution(ends, 1, backlog=backlog, number=each + 1) for each in range(count)]


async def test_answers_wait_until_those_of_an_earlier_execution_have_been_read(ends: Ends) -> None:
    first, _, third = row(ends, 3)
    for number, each in ((10, first), (30, third)):
        each.answer(number, LAST)
        each.end()
    waiting = asyncio.create_task(third.answers())
    await settle()
    assert not waiting.done()
    assert await soon(first.answers()) == [(0, LAST)]
    assert await soon(waiting) == [(0, LAST)]


async def test_a_dropped_execution_does_not_block_a_later_one(ends: Ends) -> None:
    first, second = row(ends, 2)
    first.answer(10, LAST)
    second.answer(20, LAST)
    waiting = asyncio.create_task(second.answers())
    await settle()
    assert not waiting.done()
    first.drop()
    assert await soon(waiting) == [(0, LAST)]


async def test_answers_of_a_dropped_execution_are_dropped(ends: Ends) -> None:
    first, second = row(ends, 2)
    first.drop()
    first.free()
    first.end()
    first.abort(ERROR)
    second.answer(20, LAST)
    assert await soon(second.answers()) == [(0, LAST)]
    assert await soon(first.answers()) == []


# Clients that disconnect, at every moment between two messages of the worker's.


async def test_a_client_that_disconnects_as_its_answer_comes_blocks_no_other(ends: Ends) -> None:
    played = Played(ends)
    first = await played.begin()
    await settle()
    played.executed(1)
    await leave(first)  # before its task has run: the answer is there, and unread
    second = await played.begin()
    played.executed(2)
    assert len(await soon(second)) == 1


async def test_two_executed_in_one_read_after_the_second_was_abandoned(ends: Ends) -> None:
    played = Played(ends)
    for number in (1, 2):  # short ones, so that executions overlap from here on
        reading = await played.begin()
        played.executed(number)
        await soon(reading)
    first, second = await played.begin(), await played.begin()
    await settle()
    second.cancel()
    await settle()
    played.executed(3, 4)
    await soon(asyncio.wait([second]))
    third = await played.begin()
    played.executed(5)
    assert len(await soon(first)) == len(await soon(third)) == 1


@pytest.mark.parametrize("moment", range(6))
@pytest.mark.parametrize("leaves", [1, 2, 3])
async def test_one_of_three_disconnects_at_any_turn_of_the_loop(
    ends: Ends, moment: int, leaves: int
) -> None:
    played = Played(ends)
    for number in (1, 2):
        reading = await played.begin()
        played.executed(number)
        await soon(reading)
    readings = [await played.begin() for _ in range(3)]
    events = [lambda: played.executed(3, 4), lambda: None, lambda: played.executed(5)]
    for turn in range(6):
        if turn == moment:
            readings[leaves - 1].cancel()
        if turn % 2 == 1:
            events[turn // 2]()
        await asyncio.sleep(0)
    await soon(asyncio.wait(readings))
    after = await played.begin()
    played.executed(6)
    assert len(await soon(after)) == 1
    stay = [each for number, each in enumerate(readings, 1) if number != leaves]
    assert [len(each.result()) for each in stay] == [1, 1]
    assert not played.executions.busy


async def test_an_unread_answer_of_a_disconnected_client_is_no_backlog(ends: Ends) -> None:
    played = Played(ends, decoupled=True)
    for _ in range(20):
        reading = await played.begin()
        await settle()
        number = played.begun
        for _ in range(20):
            large = [[["y", "FP32", [4], 16, 0]], None, None]
            played.executions.take_response([4, number, large, False], memoryview(bytes(16)))
        reading.cancel()
        played.executions.take_executed([5, number, None, [], 1000], BODY)
        played.executions.after_read()
        await soon(asyncio.wait([reading]))
    assert played.executions.unread_bytes == 0


async def test_an_abandoned_execution_ends_the_worker_and_blames_no_request(ends: Ends) -> None:
    played = Played(ends)
    played.executions.limits = WorkerLimits(abandoned_execute_secs=0.02)
    first = await played.begin()
    behind = await played.begin()
    await settle()
    behind.cancel()
    await asyncio.sleep(0.05)  # two limits: one that lies behind another is not to blame
    assert ends.killed == []
    assert len(played.executions.suspects) == 1
    first.cancel()
    await soon(ends.is_killed.wait())
    assert "abandoned_execute_secs" in ends.killed[0]
    assert played.executions.suspects == []
    played.executions.end(ERROR)
    await soon(asyncio.wait([first, behind]))
