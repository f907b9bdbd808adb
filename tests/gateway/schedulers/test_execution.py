"""One execution: the answer of each request, and the time when it stops."""

import asyncio
from functools import partial

import pytest

from gateway.errors import AnsweredError, Code, InferenceError, died
from gateway.messages import InferRequest
from gateway.observability.statistics import ModelStatistics
from gateway.schedulers import execution as schedulers
from gateway.schedulers.sequence_call import SequenceCall
from gateway.stream import ResponseStream
from tests.builders import (
    FLAG,
    ScriptedInstance,
    new_entry,
    read_all,
    settle,
    soon,
    text_request,
    text_response,
)
from tests.gateway.schedulers.executions import BROKEN, Execute, finish

# Answers.


async def test_each_request_gets_its_own_answers_in_any_order(
    instance: ScriptedInstance, execute: Execute
) -> None:
    streams = execute("first", "second", "third").streams
    execution = await instance.begun()
    assert instance.asked == ["first", "second", "third"]
    execution.answer(text_response("2a"), 2)
    execution.answer(text_response("0a", final=True), 0)
    execution.answer(text_response("2b", final=True), 2)
    execution.answer(FLAG, 1)
    execution.end()
    found = [await soon(read_all(stream)) for stream in streams]
    assert found == [["0a"], [""], ["2a", "2b"]]


async def test_the_records_of_a_batch_have_its_rows(instance: ScriptedInstance) -> None:
    statistics = ModelStatistics()
    for sizes in ((2, 3), (4,)):
        entries = [new_entry(statistics, batch_size=size) for size in sizes]
        task = asyncio.create_task(schedulers.Execution(instance, entries, statistics).run())
        await finish(await instance.begun(), *range(len(sizes)))
        await soon(task)
        rows = [each.record.execution_rows for each in entries]
        assert rows == ([5, 5] if len(sizes) > 1 else [0])


async def test_a_request_is_done_when_the_execution_returns(
    instance: ScriptedInstance, execute: Execute
) -> None:
    streams = execute("first", "second", "third").streams
    execution = await instance.begun()
    execution.answer(text_response("only me"), 1)
    execution.end()
    assert [await soon(read_all(stream)) for stream in streams] == [[], ["only me"], []]


@pytest.mark.parametrize("crashes", [False, True], ids=["answer", "crash"])
async def test_the_error_of_an_instance_that_has_died_has_its_number(
    instance: ScriptedInstance, execute: Execute, *, crashes: bool
) -> None:
    (stream,) = execute("first").streams
    execution = await instance.begun()
    if crashes:
        execution.crash(died("its worker has ended"))
    else:
        execution.answer(died("its worker has ended"))
        execution.end()
    with pytest.raises(InferenceError) as caught:
        await soon(read_all(stream))
    assert caught.value.dead_instance == instance.number != ScriptedInstance().number


async def test_a_request_for_an_instance_that_has_died_before_is_not_executed(
    instance: ScriptedInstance, execute: Execute
) -> None:
    instance.die("its worker has ended")
    (stream,) = execute("first").streams
    with pytest.raises(InferenceError) as caught:
        await soon(read_all(stream))
    assert caught.value.lacks_instance
    assert caught.value.dead_instance is None
    assert instance.asked == []


async def test_the_error_of_one_request_does_not_affect_its_batch(
    instance: ScriptedInstance, execute: Execute
) -> None:
    streams = execute("first", "second", "third").streams
    execution = await instance.begun()
    execution.answer(BROKEN, 1)
    await finish(execution, 0, 2)
    with pytest.raises(InferenceError, match="no such token"):
        await soon(streams[1].batch())
    assert await soon(read_all(streams[0])) == ["answer 0"]
    assert await soon(read_all(streams[2])) == ["answer 2"]


async def test_an_error_raised_by_the_instance_fails_every_request_that_is_not_done(
    instance: ScriptedInstance, execute: Execute
) -> None:
    streams = execute("first", "second", "third").streams
    execution = await instance.begun()
    execution.answer(text_response("done", final=True), 0)
    execution.answer(text_response("half"), 1)
    execution.crash(BROKEN)
    assert await soon(read_all(streams[0])) == ["done"]
    assert await soon(streams[1].batch()), "what came before the error is delivered"
    for stream in streams[1:]:
        with pytest.raises(InferenceError) as caught:
            await soon(stream.batch())
        assert (caught.value.code, caught.value.message) == (Code.INVALID_ARG, "no such token")


async def test_an_unexpected_exception_is_internal_and_its_text_is_only_logged(
    instance: ScriptedInstance, execute: Execute, caplog: pytest.LogCaptureFixture
) -> None:
    streams = execute("first", "second", "third").streams
    (await instance.begun()).crash(RuntimeError("/secret/path"))
    for stream in streams:
        with pytest.raises(InferenceError) as caught:
            await soon(stream.batch())
        assert caught.value.code is Code.INTERNAL
        assert "secret" not in caught.value.message
        assert "text" in caught.value.message, "the message names the model"
    (record,) = caplog.records
    assert record.exc_info is not None
    assert "/secret/path" in str(record.exc_info[1])


async def test_an_answer_with_an_unknown_index_is_an_internal_error(
    instance: ScriptedInstance, execute: Execute
) -> None:
    (stream,) = execute("first").streams
    execution = await instance.begun()
    execution.answer(text_response("for whom?"), 1)
    with pytest.raises(InferenceError) as caught:
        await soon(stream.batch())
    assert caught.value.code is Code.INTERNAL
    assert execution.stopped.is_set()


# Leaving.


async def test_cancelling_one_request_does_not_affect_its_batch(
    instance: ScriptedInstance, execute: Execute
) -> None:
    streams = execute("first", "second", "third").streams
    execution = await instance.begun()
    streams[0].cancel()
    await finish(execution, 0, 1, 2)
    assert execution.taken == 3, "the rows of the one who left are computed and dropped"
    assert await soon(read_all(streams[0])) == []
    assert await soon(read_all(streams[1])) == ["answer 1"]
    assert await soon(read_all(streams[2])) == ["answer 2"]


async def test_a_backend_is_notified_once_of_each_disconnect_in_a_batch(
    instance: ScriptedInstance, execute: Execute
) -> None:
    cancelled: list[InferRequest] = []
    streams = execute("first", "second", "third").streams
    execution = await instance.begun()
    for request in execution.requests:
        assert request.cancellation is not None
        request.cancellation.subscribe(partial(cancelled.append, request))
    streams[1].cancel()
    assert cancelled == [execution.requests[1]]
    streams[0].cancel()
    assert cancelled == [execution.requests[1], execution.requests[0]]
    await finish(execution, 2)
    assert await soon(read_all(streams[2])) == ["answer 2"]
    assert len(cancelled) == 2


async def test_an_execution_that_runs_to_the_end_cannot_be_cancelled_by_its_requests(
    instance: ScriptedInstance, statistics: ModelStatistics
) -> None:
    entry = new_entry(statistics, text_request("only", cancellation=ResponseStream()))
    call = SequenceCall(runs_to_end=True)
    task = asyncio.create_task(schedulers.Execution(instance, [entry], statistics, call=call).run())
    execution = await instance.begun()
    assert execution.requests[0].cancellation is None
    entry.stream.cancel()
    await settle()
    assert not execution.stopped.is_set()
    execution.end()
    await soon(task)


async def test_an_error_that_a_model_answers_with_is_an_answer_to_the_statistics(
    instance: ScriptedInstance, execute: Execute, statistics: ModelStatistics
) -> None:
    execute("first", "second")
    execution = await instance.begun()
    execution.answer(AnsweredError(Code.NOT_FOUND, "nothing of that name"), 0)
    execution.answer(BROKEN, 1)
    await finish(execution)
    assert (statistics.success.count, statistics.fail.count) == (1, 1)


async def test_the_execution_stops_when_all_readers_have_disconnected(
    instance: ScriptedInstance, execute: Execute
) -> None:
    running = execute("first", "second", "third")
    execution = await instance.begun()
    for stream in running.streams[:-1]:
        stream.cancel()
    await asyncio.sleep(0)
    assert not execution.stopped.is_set(), "somebody still waits"
    running.streams[-1].cancel()
    await soon(execution.stopped.wait())
    await soon(asyncio.wait([running.task]))
    assert not running.task.cancelled(), "the execution ends, and its task goes on"


async def test_the_execution_stops_when_the_last_reader_disconnects_and_the_others_are_done(
    instance: ScriptedInstance, execute: Execute
) -> None:
    streams = execute("first", "second", "third").streams
    execution = await instance.begun()
    execution.answer(text_response("done", final=True), 0)
    execution.answer(BROKEN, 1)
    assert await soon(read_all(streams[0])) == ["done"]
    streams[2].cancel()
    await soon(execution.stopped.wait())


async def test_the_execution_stops_when_the_last_request_is_done_and_the_others_have_disconnected(
    instance: ScriptedInstance, execute: Execute
) -> None:
    streams = execute("first", "second", "third").streams
    execution = await instance.begun()
    streams[0].cancel()
    streams[1].cancel()
    execution.answer(text_response("done", final=True), 2)
    assert await soon(read_all(streams[2])) == ["done"]
    await soon(execution.stopped.wait())


async def test_an_execution_whose_requests_are_all_done_returns_by_itself(
    instance: ScriptedInstance, execute: Execute
) -> None:
    (stream,) = execute("first").streams
    execution = await instance.begun()
    with stream:
        execution.answer(text_response("done", final=True))
        assert await soon(read_all(stream)) == ["done"]
    await asyncio.sleep(0)
    assert not execution.stopped.is_set(), "nobody left, so nothing is cut"
    execution.end()
    await soon(execution.stopped.wait())


async def test_abandoning_every_request_stops_the_execution(
    instance: ScriptedInstance, execute: Execute
) -> None:
    streams = execute("first", "second", "third").streams
    execution = await instance.begun()
    for stream in streams:
        stream.abandon(BROKEN)
    await soon(execution.stopped.wait())
    with pytest.raises(InferenceError, match="no such token"):
        await soon(streams[0].batch())


async def test_a_request_cancelled_before_its_execution_does_not_reach_the_instance(
    instance: ScriptedInstance, execute: Execute, statistics: ModelStatistics
) -> None:
    running = execute("first", "second")
    running.streams[0].cancel()
    running.streams[1].cancel()
    await soon(asyncio.wait([running.task]))
    assert instance.executions == []
    assert statistics.execution_count == 0


async def test_a_batch_executes_without_a_request_cancelled_before_it_began(
    instance: ScriptedInstance, execute: Execute
) -> None:
    streams = execute("first", "second", "third").streams
    streams[0].cancel()
    execution = await instance.begun()
    assert instance.asked == ["second", "third"]
    await finish(execution, 0, 1)
    assert await soon(read_all(streams[1])) == ["answer 0"]
    assert await soon(read_all(streams[2])) == ["answer 1"]


async def test_stopping_the_server_fails_executing_requests(
    instance: ScriptedInstance, execute: Execute
) -> None:
    running = execute("first", "second", "third")
    execution = await instance.begun()
    running.task.cancel()
    await soon(execution.stopped.wait())
    for stream in running.streams:
        with pytest.raises(InferenceError) as caught:
            await soon(stream.batch())
        assert caught.value.code is Code.UNAVAILABLE
