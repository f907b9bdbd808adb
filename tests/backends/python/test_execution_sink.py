"""Answers that go to the sink of a single request, while the task of the execution waits."""

import asyncio
from dataclasses import replace

import pytest

from backends.python.execution import Backlog, WorkerExecution
from gateway.messages import InferResponse
from gateway.stream import ResponseStream
from tests.backends.python.played import ANSWER, BODY, ERROR, LAST, PART, Ends, Played
from tests.builders import settle, soon, text_request


def to_sink(ends: Ends, count: int = 1, limit: int = 64) -> tuple[WorkerExecution, ResponseStream]:
    """An execution of requests with this sink."""
    sink = ResponseStream(limit=limit)
    requests = [replace(text_request(), sink=sink) for _ in range(count)]
    backlog = Backlog(ends.link, ordered=True)
    return WorkerExecution(requests, range(count), backlog, number=1, first=10), sink


async def test_an_answer_goes_to_the_sink_while_the_task_waits(ends: Ends) -> None:
    found, sink = to_sink(ends)
    waiting = asyncio.create_task(found.answers())
    await settle()
    assert not found.answer(10, PART)
    assert found.answer(10, LAST)
    assert sink.take() == [PART, LAST]
    assert not waiting.done()
    found.end()
    found.wake()
    assert await soon(waiting) == []


async def test_the_task_reads_what_comes_before_it_waits(ends: Ends) -> None:
    found, sink = to_sink(ends)
    found.answer(10, PART)
    assert sink.take() is None
    assert await found.answers() == [(0, PART)]


async def test_no_answer_overtakes_an_unread_one(ends: Ends) -> None:
    found, sink = to_sink(ends, limit=1)
    waiting = asyncio.create_task(found.answers())
    await settle()
    for answer in (PART, PART):
        found.answer(10, answer)
    assert sink.take() == [PART]
    found.answer(10, LAST)
    assert sink.take() is None
    found.wake()
    assert await soon(waiting) == [(0, PART), (0, LAST)]


async def test_the_task_reads_errors(ends: Ends) -> None:
    found, sink = to_sink(ends)
    waiting = asyncio.create_task(found.answers())
    await settle()
    assert found.answer(10, ERROR)
    found.wake()
    assert await soon(waiting) == [(0, ERROR)]
    assert sink.take() is None


async def test_the_task_reads_the_answers_of_several_requests(ends: Ends) -> None:
    found, sink = to_sink(ends, count=2)
    waiting = asyncio.create_task(found.answers())
    await settle()
    found.answer(10, LAST)
    found.wake()
    assert await soon(waiting) == [(0, LAST)]
    assert sink.take() is None


async def test_the_failure_of_a_listener_of_the_sink_is_raised_by_the_task(ends: Ends) -> None:
    found, sink = to_sink(ends)
    waiting = asyncio.create_task(found.answers())
    await settle()
    sink.listen(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    found.answer(10, LAST)
    with pytest.raises(ZeroDivisionError):
        await soon(waiting)


async def test_an_answer_may_have_its_request_closed(ends: Ends) -> None:
    found, sink = to_sink(ends)
    waiting = asyncio.create_task(found.answers())
    await settle()
    sink.listen(lambda: found.close_requests(found.requests))  # type: ignore[arg-type]
    assert found.answer(10, LAST)
    assert not found.answer(10, InferResponse(final=True))
    found.end()
    found.wake()
    assert await soon(waiting) == []


async def test_an_execution_ends_when_the_sink_has_its_last_answer(ends: Ends) -> None:
    played, sink = Played(ends, decoupled=True), ResponseStream()
    reading = await played.begin(sink)
    await settle()
    played.executions.take_executed([5, 1, None, [], 1000], BODY)
    played.executions.after_read()
    await settle()
    assert not reading.done()
    for final in (False, True):
        played.executions.take_response([4, 1, ANSWER, final], BODY)
        played.executions.after_read()
    assert await soon(reading) == []
    assert [each.final for each in sink.take() or ()] == [False, True]
