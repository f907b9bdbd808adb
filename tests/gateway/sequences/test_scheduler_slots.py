"""The sequence batcher: batches that are due, slots, and the backlog."""

import asyncio
from contextlib import suppress
from dataclasses import replace

import pytest

from gateway.backend import Note
from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError
from tests.builders import (
    WAIT_SECS,
    read_all,
    settle,
    soon,
    text_response,
)
from tests.gateway.conftest import Start
from tests.gateway.schedulers.queues import Queue, finish
from tests.gateway.sequences.parts import (
    SOON_US,
    answer,
    ask,
    direct,
    oldest,
    part,
    refusal,
    rows,
)


async def forgotten(queue: Queue, sequence: int) -> None:
    """Wait until a sequence takes no more requests."""
    async with asyncio.timeout(WAIT_SECS):
        with suppress(InferenceError):
            while True:
                queue.scheduler.admit(part(sequence, "again"))
                await asyncio.sleep(0)


# When is a batch due?


async def test_a_direct_batch_waits_until_enough_slots_are_ready(start: Start) -> None:
    queue = start(direct(delay_us=60_000_000, utilization=0.75))
    instance = queue.employ()
    for number in (1, 2):
        ask(queue, number, str(number), "start")
    await settle()
    assert instance.executions == []
    ask(queue, 3, "3", "start")
    execution = await instance.begun()
    assert rows(execution) == ["1", "2", "3"]
    finish(execution)
    await settle()


async def test_a_direct_batch_waits_no_longer_than_its_delay(start: Start) -> None:
    queue = start(direct(delay_us=SOON_US, utilization=1.0))
    instance = queue.employ()
    ask(queue, 1, "alone", "start")
    await settle()
    assert instance.executions == []
    execution = await instance.begun()
    assert rows(execution) == ["alone"]
    finish(execution)
    await settle()


async def test_the_oldest_strategy_forms_batches_as_the_dynamic_batcher(start: Start) -> None:
    queue = start(oldest(preferred_batch_size=(2,), max_queue_delay_microseconds=60_000_000))
    instance = queue.employ()
    ask(queue, 1, "1", "start")
    ask(queue, 1, "behind")
    await settle()
    assert instance.executions == []
    ask(queue, 2, "2", "start")
    execution = await instance.begun()
    assert rows(execution) == ["1", "2"]
    finish(execution)
    await settle()
    assert len(instance.executions) == 1
    ask(queue, 3, "3", "start")
    execution = await instance.begun()
    assert rows(execution) == ["behind", "3"]
    finish(execution)
    await settle()


async def test_the_oldest_strategy_keeps_the_order_if_it_is_asked_to(start: Start) -> None:
    queue = start(oldest(max_batch_size=1, preserve_ordering=True))
    instance = queue.employ(concurrency=2)
    first, second = ask(queue, 1, "1", "start"), ask(queue, 2, "2", "start")
    executions = [await instance.begun() for _ in range(2)]
    finish(executions[1])
    reading = asyncio.create_task(read_all(second.stream))
    await settle()
    assert not reading.done()
    finish(executions[0])
    assert await answer(first) == ["1"]
    assert await soon(reading) == ["2"]
    third = ask(queue, 2, "3", "end")
    finish(await instance.begun())
    assert await answer(third) == ["3"]


async def test_an_instance_freed_early_takes_the_next_request_of_a_sequence(
    start: Start, config: ModelConfig
) -> None:
    queue = start(config)
    instance = queue.employ()
    first, second = ask(queue, 1, "a", "start"), ask(queue, 1, "b")
    one = await instance.begun()
    one.answer(text_response("more follows"))
    one.steps.put_nowait((0, Note.FREED))
    two = await instance.begun()
    assert rows(two) == ["b"]
    finish(two)
    assert await answer(second) == ["b"]
    one.finish("late")
    assert await answer(first) == ["more follows", "late"]


async def test_responses_wait_for_an_execution_freed_early(
    start: Start,
) -> None:
    queue = start(oldest(max_batch_size=1, preserve_ordering=True))
    instance = queue.employ()
    first, second = ask(queue, 1, "a", "start end"), ask(queue, 2, "b", "start end")
    one = await instance.begun()
    one.steps.put_nowait((0, Note.FREED))
    finish(await instance.begun())
    reading = asyncio.create_task(read_all(second.stream))
    await settle()
    assert not reading.done()
    finish(one)
    assert await answer(first) == ["a"]
    assert await soon(reading) == ["b"]


# Slots and backlog.


async def test_a_sequence_in_the_backlog_begins_when_another_ends(start: Start) -> None:
    queue = start(direct(slots=1))
    instance = queue.employ()
    ask(queue, 1, "a", "start")
    waiting = [ask(queue, 2, "b", "start"), ask(queue, 2, "c")]
    later = ask(queue, 3, "d", "start end")
    finish(await instance.begun())
    await settle()
    assert instance.asked == ["a"]
    ask(queue, 1, "end", "end")
    for text in ("end", "b", "c"):
        execution = await instance.begun()
        assert rows(execution) == [text]
        finish(execution)
    assert [await answer(each) for each in waiting] == [["b"], ["c"]]
    ask(queue, 2, "f", "end")
    for text in ("f", "d"):
        execution = await instance.begun()
        assert rows(execution) == [text]
        finish(execution)
    assert await answer(later) == ["d"]


async def test_a_thousand_sequences_of_one_request_pass_one_slot(
    start: Start, config: ModelConfig
) -> None:
    queue = start(config)
    entries = [ask(queue, number, str(number), "start end") for number in range(1, 1001)]
    instance = queue.employ()
    answered = 0
    while answered < 1000:
        execution = await instance.begun()
        answered += len(execution.requests)
        finish(execution)
    assert await answer(entries[-1]) == ["1000"]


async def test_an_idle_sequence_loses_its_slot_silently(start: Start, config: ModelConfig) -> None:
    batching = config.sequence_batching
    assert batching is not None
    short = replace(batching, max_sequence_idle_microseconds=SOON_US)
    queue = start(replace(config, max_batch_size=1, sequence_batching=short))
    instance = queue.employ()
    ask(queue, 1, "a", "start")
    finish(await instance.begun())
    others = [ask(queue, number, str(number), "start") for number in range(2, 6)]
    for each in others:
        finish(await instance.begun())
        await answer(each)
    with pytest.raises(InferenceError, match="must specify the START flag"):
        ask(queue, 1, "b")


async def test_queued_requests_of_an_idle_sequence_are_executed(start: Start) -> None:
    queue = start(direct(slots=1, max_sequence_idle_microseconds=SOON_US))
    instance = queue.employ()
    ask(queue, 1, "a", "start")
    second = ask(queue, 1, "b")
    next_sequence = ask(queue, 2, "c", "start")
    execution = await instance.begun()
    await forgotten(queue, 1)
    finish(execution)
    finish(await instance.begun())
    assert await answer(second) == ["b"]
    finish(await instance.begun())
    assert await answer(next_sequence) == ["c"]
    assert instance.asked == ["a", "b", "c"]


async def test_a_timeout_in_the_backlog_rejects_the_whole_sequence(start: Start) -> None:
    queue = start(direct(slots=1))
    instance = queue.employ()
    ask(queue, 1, "a", "start")
    patient = ask(queue, 2, "patient", "start end")
    late = [ask(queue, 3, "b", "start"), ask(queue, 3, "c", timeout_us=SOON_US)]
    text = "timeout of the corresponding sequence has been expired"
    assert [await refusal(each) for each in late] == [(Code.UNAVAILABLE, text)] * 2
    assert queue.statistics.failures["REJECTED"] == 2  # type: ignore[index]  # by its value
    with pytest.raises(InferenceError, match="must specify the START flag"):
        ask(queue, 3, "d")
    finish(await instance.begun())
    ask(queue, 1, "end", "end")
    finish(await instance.begun())
    finish(await instance.begun())
    assert await answer(patient) == ["patient"]


async def test_a_timeout_is_over_once_a_sequence_has_a_slot(start: Start) -> None:
    queue = start(direct(slots=1))
    instance = queue.employ()
    first = ask(queue, 1, "a", "start", timeout_us=1)
    second = ask(queue, 1, "b", timeout_us=1)
    await settle()
    finish(await instance.begun())
    finish(await instance.begun())
    assert [await answer(each) for each in (first, second)] == [["a"], ["b"]]
