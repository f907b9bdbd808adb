"""Executions with slow readers; counts of executions; requests that end early."""

import asyncio
from dataclasses import replace

import pytest

from gateway.backend import Answer, Note, NotSent
from gateway.errors import Code, InferenceError
from gateway.messages import InferResponse
from gateway.observability.statistics import FailureReason, ModelStatistics
from gateway.schedulers import execution as schedulers
from gateway.schedulers.execution import LAG_BYTES, Entry
from gateway.schedulers.sequence_call import SequenceCall
from gateway.stream import DEFAULT_LIMIT, SHARED_LIMIT_BYTES
from tests.builders import (
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
from tests.gateway.schedulers.executions import BROKEN, Execute, finish

# Bounds.


async def test_a_slow_reader_holds_back_its_producer(
    instance: ScriptedInstance, execute: Execute
) -> None:
    (stream,) = execute("first").streams
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
    instance: ScriptedInstance, execute: Execute
) -> None:
    slow, fast = execute("first", "second").streams
    execution = await instance.begun()
    for number in range(8):
        execution.answer(large())
        execution.answer(text_response(str(number)), 1)
        assert texts(await soon(fast.batch())) == [str(number)]
    await finish(execution, 0, 1)
    assert await soon(read_all(fast)) == ["answer 1"]
    assert await soon(read_all(slow)) == ["large"] * 8 + ["answer 0"]


async def test_a_batch_waits_for_a_reader_that_lags_too_much(
    instance: ScriptedInstance, execute: Execute
) -> None:
    slow, fast = execute("first", "second").streams
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
    instance: ScriptedInstance, execute: Execute
) -> None:
    slow, fast = execute("first", "second").streams
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
    instance: ScriptedInstance, execute: Execute
) -> None:
    (stream,) = execute("first").streams
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
    instance: ScriptedInstance, execute: Execute, statistics: ModelStatistics
) -> None:
    running = execute("first", "second", "third")
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
    instance: ScriptedInstance, execute: Execute, statistics: ModelStatistics
) -> None:
    running = execute("first", "second", "third")
    (await instance.begun()).crash(BROKEN)
    await soon(running.task)
    assert statistics.execution_count == 1
    assert (statistics.success.count, statistics.fail.count) == (0, 3)
    assert statistics.failures[FailureReason.BACKEND] == 3


async def test_tokens_generated_after_a_disconnect_are_wasted(
    instance: ScriptedInstance, execute: Execute, statistics: ModelStatistics
) -> None:
    streams = execute("first", "second").streams
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
    instance: ScriptedInstance, execute: Execute
) -> None:
    running = execute("a", "b")
    execution = await instance.begun()
    running.streams[0].stop()
    with pytest.raises(InferenceError) as caught:
        await soon(running.streams[0].batch())
    assert caught.value.code is Code.CANCELLED
    execution.answer(text_response("b", final=True), 1)
    execution.end()
    assert await soon(read_all(running.streams[1])) == ["b"]
