"""The answers of one execution: in order, to their requests, and none when nobody waits."""

import asyncio

from backends.python.execution import Execution
from gateway.backend import Note
from gateway.errors import Code, InferenceError
from gateway.messages import InferResponse
from tests.builders import settle, soon, text_request, text_response

ERROR = InferenceError(Code.INTERNAL, "no")
PART = text_response("part")
LAST = text_response("last", final=True)


def execution(count: int = 2) -> Execution:
    """Requests 10, 11, ... that the scheduler knows as 0, 1, ..."""
    return Execution([text_request()] * count, 10, range(count))


async def test_answers_are_told_by_the_schedulers_indexes() -> None:
    found = Execution([text_request()] * 2, 10, [5, 3])
    found.answer(11, LAST, 1)
    found.answer(10, PART, 1)
    assert await found.answers() == [(3, LAST), (5, PART)]


async def test_it_is_over_when_execute_has_returned_and_every_request_is_done() -> None:
    found = execution()
    assert found.answer(10, LAST, 1)
    assert not found.answer(11, PART, 1)
    found.end()
    assert not found.over
    assert await found.answers() == [(0, LAST), (1, PART), (0, Note.FREED)]
    found.answer(11, ERROR, 1)
    assert found.over
    assert await found.answers() == [(1, ERROR)]
    assert await found.answers() == []


async def test_execute_is_waited_for_though_every_request_is_done() -> None:
    found = execution(1)
    found.answer(10, LAST, 1)
    await found.answers()
    waiting = asyncio.ensure_future(found.answers())
    await settle()
    assert not waiting.done()
    found.end()
    found.wake()
    assert await soon(waiting) == []


async def test_a_rescheduled_request_is_done_here() -> None:
    found = execution(1)
    found.reschedule(10)
    found.end()
    assert await found.answers() == [(0, Note.RESCHEDULED)]
    assert found.over


async def test_a_lost_worker_fails_what_is_open() -> None:
    found = execution()
    found.answer(10, LAST, 1)
    found.lose(ERROR)
    assert await found.answers() == [(0, LAST), (1, ERROR)]
    assert found.over
    assert found.lost


async def test_whoever_leaves_can_wait_for_execute_to_return() -> None:
    found = execution()
    found.abandon()
    waiting = asyncio.ensure_future(found.has_returned())
    await settle()
    found.end()
    found.wake()
    await soon(waiting)
    assert found.over


async def test_the_timer_ends_with_execute() -> None:
    found = execution()
    found.timer = asyncio.get_running_loop().call_later(60, print)
    found.end()
    assert found.timer.cancelled()


async def test_a_flag_alone_ends_a_request() -> None:
    found = execution(1)
    assert found.answer(10, InferResponse(final=True), 0)


# Executions that a worker was handed while it was busy.


async def test_answers_wait_until_those_of_an_earlier_execution_have_been_taken() -> None:
    first = execution(1)
    second = Execution([text_request()], 20, [0], first)
    third = Execution([text_request()], 30, [0], second)
    for number, each in ((10, first), (30, third)):
        each.answer(number, LAST, 1)
        each.end()
    waiting = asyncio.create_task(third.answers())
    await settle()
    assert not waiting.done()
    assert await soon(first.answers()) == [(0, LAST)]
    assert await soon(waiting) == [(0, LAST)]


async def test_an_earlier_execution_that_nobody_waits_for_holds_up_nobody() -> None:
    first = execution(1)
    second = Execution([text_request()], 20, [0], first)
    first.answer(10, LAST, 1)
    second.answer(20, LAST, 1)
    waiting = asyncio.create_task(second.answers())
    await settle()
    assert not waiting.done()
    first.abandon()
    assert await soon(waiting) == [(0, LAST)]


async def test_executions_that_are_over_hold_on_to_none_before_or_behind() -> None:
    executions = [execution(1)]
    for number in (20, 30):
        executions.append(Execution([text_request()], number, [0], executions[-1]))
    for number, each in zip((10, 20, 30), executions, strict=True):
        each.answer(number, LAST, 1)
        each.end()
        assert await soon(each.answers()) == [(0, LAST)]
    assert [(each.before, each.behind) for each in executions] == [(None, None)] * 3
