"""One execution: the answer of each request, and the time when it stops."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from functools import partial

import pytest

from gateway.backend import Answer, Note, NotSent
from gateway.errors import AnsweredError, Code, InferenceError
from gateway.messages import InferRequest, InferResponse
from gateway.observability.statistics import FailureReason, ModelStatistics
from gateway.schedulers import execution as schedulers
from gateway.schedulers.execution import LAG_BYTES, Entry, SequenceCall
from gateway.stream import DEFAULT_LIMIT, SHARED_LIMIT_BYTES, ResponseStream
from tests.builders import (
    FLAG,
    Execution,
    ScriptedInstance,
    StoppableInstance,
    new_entry,
    read_all,
    settle,
    soon,
    text_request,
    text_response,
    texts,
)

BROKEN = InferenceError(Code.INVALID_ARG, "no such token")


@dataclass(frozen=True)
class Running:
    """An execution under way, and the streams of its requests."""

    task: asyncio.Task[None]
    streams: list[ResponseStream]


Start = Callable[..., Running]


@pytest.fixture
def statistics() -> ModelStatistics:
    return ModelStatistics()


@pytest.fixture
async def instance() -> ScriptedInstance:
    return ScriptedInstance()


@pytest.fixture
async def start(instance: ScriptedInstance, statistics: ModelStatistics) -> AsyncIterator[Start]:
    """Start executions of texts; when the test ends, every one of them has ended by itself."""
    tasks: list[asyncio.Task[None]] = []

    def begin(*texts: str) -> Running:
        entries = [new_entry(statistics, text_request(text)) for text in texts]
        tasks.append(asyncio.create_task(schedulers.Execution(instance, entries, statistics).run()))
        return Running(tasks[-1], [entry.stream for entry in entries])

    yield begin
    await soon(asyncio.wait(tasks))
    assert statistics.pending == 0


async def finish(execution: Execution, *indices: int) -> None:
    """Answer these requests for the last time, and return."""
    for index in indices:
        execution.answer(text_response(f"answer {index}", final=True), index)
    execution.end()
    await soon(execution.stopped.wait())


# Answers.


async def test_each_request_gets_its_own_answers_in_any_order(
    instance: ScriptedInstance, start: Start
) -> None:
    streams = start("first", "second", "third").streams
    execution = await instance.begun()
    assert instance.asked == ["first", "second", "third"]
    execution.answer(text_response("2a"), 2)
    execution.answer(text_response("0a", final=True), 0)
    execution.answer(text_response("2b", final=True), 2)
    execution.answer(FLAG, 1)
    execution.end()
    found = [await soon(read_all(stream)) for stream in streams]
    assert found == [["0a"], [""], ["2a", "2b"]]


async def test_a_request_is_done_when_the_execution_returns(
    instance: ScriptedInstance, start: Start
) -> None:
    streams = start("first", "second", "third").streams
    execution = await instance.begun()
    execution.answer(text_response("only me"), 1)
    execution.end()
    assert [await soon(read_all(stream)) for stream in streams] == [[], ["only me"], []]


async def test_the_error_of_one_request_does_not_affect_its_batch(
    instance: ScriptedInstance, start: Start
) -> None:
    streams = start("first", "second", "third").streams
    execution = await instance.begun()
    execution.answer(BROKEN, 1)
    await finish(execution, 0, 2)
    with pytest.raises(InferenceError, match="no such token"):
        await soon(streams[1].batch())
    assert await soon(read_all(streams[0])) == ["answer 0"]
    assert await soon(read_all(streams[2])) == ["answer 2"]


async def test_an_error_raised_by_the_instance_fails_every_request_that_is_not_done(
    instance: ScriptedInstance, start: Start
) -> None:
    streams = start("first", "second", "third").streams
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
    instance: ScriptedInstance, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    streams = start("first", "second", "third").streams
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
    instance: ScriptedInstance, start: Start
) -> None:
    (stream,) = start("first").streams
    execution = await instance.begun()
    execution.answer(text_response("for whom?"), 1)
    with pytest.raises(InferenceError) as caught:
        await soon(stream.batch())
    assert caught.value.code is Code.INTERNAL
    assert execution.stopped.is_set()


# Leaving.


async def test_cancelling_one_request_does_not_affect_its_batch(
    instance: ScriptedInstance, start: Start
) -> None:
    streams = start("first", "second", "third").streams
    execution = await instance.begun()
    streams[0].cancel()
    await finish(execution, 0, 1, 2)
    assert execution.taken == 3, "the rows of the one who left are computed and dropped"
    assert await soon(read_all(streams[0])) == []
    assert await soon(read_all(streams[1])) == ["answer 1"]
    assert await soon(read_all(streams[2])) == ["answer 2"]


async def test_a_backend_is_notified_once_of_each_disconnect_in_a_batch(
    instance: ScriptedInstance, start: Start
) -> None:
    cancelled: list[InferRequest] = []
    streams = start("first", "second", "third").streams
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
    instance: ScriptedInstance, start: Start, statistics: ModelStatistics
) -> None:
    start("first", "second")
    execution = await instance.begun()
    execution.answer(AnsweredError(Code.NOT_FOUND, "nothing of that name"), 0)
    execution.answer(BROKEN, 1)
    await finish(execution)
    assert (statistics.success.count, statistics.fail.count) == (1, 1)


async def test_the_execution_stops_when_all_readers_have_disconnected(
    instance: ScriptedInstance, start: Start
) -> None:
    running = start("first", "second", "third")
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
    instance: ScriptedInstance, start: Start
) -> None:
    streams = start("first", "second", "third").streams
    execution = await instance.begun()
    execution.answer(text_response("done", final=True), 0)
    execution.answer(BROKEN, 1)
    assert await soon(read_all(streams[0])) == ["done"]
    streams[2].cancel()
    await soon(execution.stopped.wait())


async def test_the_execution_stops_when_the_last_request_is_done_and_the_others_have_disconnected(
    instance: ScriptedInstance, start: Start
) -> None:
    streams = start("first", "second", "third").streams
    execution = await instance.begun()
    streams[0].cancel()
    streams[1].cancel()
    execution.answer(text_response("done", final=True), 2)
    assert await soon(read_all(streams[2])) == ["done"]
    await soon(execution.stopped.wait())


async def test_an_execution_whose_requests_are_all_done_returns_by_itself(
    instance: ScriptedInstance, start: Start
) -> None:
    (stream,) = start("first").streams
    execution = await instance.begun()
    with stream:
        execution.answer(text_response("done", final=True))
        assert await soon(read_all(stream)) == ["done"]
    await asyncio.sleep(0)
    assert not execution.stopped.is_set(), "nobody left, so nothing is cut"
    execution.end()
    await soon(execution.stopped.wait())


async def test_abandoning_every_request_stops_the_execution(
    instance: ScriptedInstance, start: Start
) -> None:
    streams = start("first", "second", "third").streams
    execution = await instance.begun()
    for stream in streams:
        stream.abandon(BROKEN)
    await soon(execution.stopped.wait())
    with pytest.raises(InferenceError, match="no such token"):
        await soon(streams[0].batch())


async def test_a_request_cancelled_before_its_execution_does_not_reach_the_instance(
    instance: ScriptedInstance, start: Start, statistics: ModelStatistics
) -> None:
    running = start("first", "second")
    running.streams[0].cancel()
    running.streams[1].cancel()
    await soon(asyncio.wait([running.task]))
    assert instance.executions == []
    assert statistics.execution_count == 0


async def test_a_batch_executes_without_a_request_cancelled_before_it_began(
    instance: ScriptedInstance, start: Start
) -> None:
    streams = start("first", "second", "third").streams
    streams[0].cancel()
    execution = await instance.begun()
    assert instance.asked == ["second", "third"]
    await finish(execution, 0, 1)
    assert await soon(read_all(streams[1])) == ["answer 0"]
    assert await soon(read_all(streams[2])) == ["answer 1"]


async def test_stopping_the_server_fails_executing_requests(
    instance: ScriptedInstance, start: Start
) -> None:
    running = start("first", "second", "third")
    execution = await instance.begun()
    running.task.cancel()
    await soon(execution.stopped.wait())
    for stream in running.streams:
        with pytest.raises(InferenceError) as caught:
            await soon(stream.batch())
        assert caught.value.code is Code.UNAVAILABLE


# Bounds.


async def test_a_slow_reader_holds_back_its_producer(
    instance: ScriptedInstance, start: Start
) -> None:
    (stream,) = start("first").streams
    execution = await instance.begun()
    total = 3 * DEFAULT_LIMIT
    for number in range(total):
        execution.answer(text_response(str(number), final=number == total - 1))
    execution.end()
    with stream:
        taken: list[int] = []
        while responses := await soon(stream.batch()):
            taken.append(len(responses))
            assert execution.taken <= sum(taken)
    assert sum(taken) == total
    assert max(taken) == DEFAULT_LIMIT


def large(*, final: bool = False) -> InferResponse:
    """A response of which one fills a stream."""
    return replace(text_response("large", final=final), shared_bytes=SHARED_LIMIT_BYTES)


async def test_a_slow_reader_of_large_responses_does_not_stop_its_batch(
    instance: ScriptedInstance, start: Start
) -> None:
    slow, fast = start("first", "second").streams
    execution = await instance.begun()
    for number in range(8):
        execution.answer(large())
        execution.answer(text_response(str(number)), 1)
        assert texts(await soon(fast.batch())) == [str(number)]
    await finish(execution, 0, 1)
    assert await soon(read_all(fast)) == ["answer 1"]
    assert await soon(read_all(slow)) == ["large"] * 8 + ["answer 0"]


async def test_a_batch_waits_for_a_reader_that_lags_too_much(
    instance: ScriptedInstance, start: Start
) -> None:
    slow, fast = start("first", "second").streams
    execution = await instance.begun()
    most = 1 + LAG_BYTES // SHARED_LIMIT_BYTES
    for _ in range(most + 1):
        execution.answer(large())
    execution.answer(text_response("late"), 1)
    await settle()
    assert execution.taken == most
    assert len(await soon(slow.batch())) == most
    assert texts(await soon(fast.batch())) == ["late"]
    await finish(execution, 0, 1)
    for stream in (slow, fast):
        await soon(read_all(stream))


async def test_a_batch_of_lagging_readers_continues_with_the_first_that_reads(
    instance: ScriptedInstance, start: Start
) -> None:
    slow, fast = start("first", "second").streams
    execution = await instance.begun()
    execution.answer(large(), 1)
    execution.answer(large(), 0)
    execution.answer(text_response("next"), 1)
    await settle()
    assert execution.taken == 2
    assert texts(await soon(fast.batch())) == ["large"]
    assert texts(await soon(fast.batch())) == ["next"]
    await finish(execution, 0, 1)
    for stream in (slow, fast):
        await soon(read_all(stream))


async def test_a_blocked_producer_stops_when_its_reader_disconnects(
    instance: ScriptedInstance, start: Start
) -> None:
    (stream,) = start("first").streams
    execution = await instance.begun()
    for number in range(2 * DEFAULT_LIMIT):
        execution.answer(text_response(str(number)))
    await soon(asyncio.sleep(0))
    with stream:
        await soon(stream.batch())
    await soon(execution.stopped.wait())
    assert execution.taken <= DEFAULT_LIMIT + 1


# Accounts.


async def test_an_execution_counts_once_for_all_its_requests(
    instance: ScriptedInstance, start: Start, statistics: ModelStatistics
) -> None:
    running = start("first", "second", "third")
    await finish(await instance.begun(), 0, 1, 2)
    await soon(running.task)
    assert statistics.execution_count == 1
    counts = {size: found.compute_infer.count for size, found in statistics.batches.items()}
    assert counts == {3: 1}
    assert statistics.last_inference_ms > 0
    assert (statistics.success.count, statistics.fail.count) == (3, 0)


async def test_padding_rows_count_in_the_batch_only(
    instance: ScriptedInstance, statistics: ModelStatistics
) -> None:
    entry = new_entry(statistics, text_request("only"))
    padded = schedulers.Execution(instance, [entry], statistics, call=SequenceCall(padding_rows=2))
    task = asyncio.create_task(padded.run())
    (await instance.begun()).finish("done")
    assert await soon(read_all(entry.stream)) == ["done"]
    await soon(task)
    assert list(statistics.batches) == [3]
    assert (statistics.inference_count, statistics.success.count) == (1, 1)


async def test_a_failing_execution_counts_as_one_too(
    instance: ScriptedInstance, start: Start, statistics: ModelStatistics
) -> None:
    running = start("first", "second", "third")
    (await instance.begun()).crash(BROKEN)
    await soon(running.task)
    assert statistics.execution_count == 1
    assert (statistics.success.count, statistics.fail.count) == (0, 3)
    assert statistics.failures[FailureReason.BACKEND] == 3


async def test_tokens_generated_after_a_disconnect_are_wasted(
    instance: ScriptedInstance, start: Start, statistics: ModelStatistics
) -> None:
    streams = start("first", "second").streams
    execution = await instance.begun()
    streams[0].cancel()
    execution.answer(text_response("late", tokens=5), 0)
    execution.answer(text_response("wanted", tokens=3, final=True), 1)
    assert await soon(read_all(streams[1])) == ["wanted"]
    assert (statistics.completion_tokens, statistics.wasted_tokens) == (8, 5)


async def test_a_request_that_should_end_early_ends_as_its_model_likes(
    statistics: ModelStatistics,
) -> None:
    instance = StoppableInstance()
    entries = [new_entry(statistics, text_request(text)) for text in "ab"]
    task = asyncio.create_task(schedulers.Execution(instance, entries, statistics).run())
    execution = await instance.begun()
    stream = entries[0].stream
    stream.stop()
    assert instance.stopped == [execution.requests[0]]
    execution.answer(text_response("goes on"), 0)
    execution.answer(InferenceError(Code.CANCELLED, "it stops"), 0)
    assert [each.outputs != () for each in await soon(stream.batch())] == [True]
    with pytest.raises(InferenceError, match="it stops"):
        await soon(stream.batch())
    execution.answer(text_response("b", final=True), 1)
    execution.end()
    assert await soon(read_all(entries[1].stream)) == ["b"]
    await soon(task)


@pytest.mark.parametrize(
    "step", [NotSent(Code.UNAVAILABLE, "died"), (0, Note.RESCHEDULED)], ids=["unsent", "again"]
)
async def test_a_request_that_should_end_early_is_not_executed_again(
    statistics: ModelStatistics, step: Exception | Answer
) -> None:
    instance = StoppableInstance()
    entries = [new_entry(statistics, text_request("a"))]
    again: list[Entry] = []
    execution = schedulers.Execution(instance, entries, statistics, rescheduled=again.append)
    task = asyncio.create_task(execution.attempt())
    begun = await instance.begun()
    entries[0].stream.stop()
    begun.steps.put_nowait(step)
    begun.end()
    with pytest.raises(InferenceError) as caught:
        await soon(read_all(entries[0].stream))
    assert caught.value.code is Code.CANCELLED
    await soon(task)
    assert again == []


async def test_a_request_of_a_model_that_cannot_end_early_is_cancelled(
    instance: ScriptedInstance, start: Start
) -> None:
    running = start("a", "b")
    execution = await instance.begun()
    running.streams[0].stop()
    with pytest.raises(InferenceError) as caught:
        await soon(running.streams[0].batch())
    assert caught.value.code is Code.CANCELLED
    execution.answer(text_response("b", final=True), 1)
    execution.end()
    assert await soon(read_all(running.streams[1])) == ["b"]
