"""The dynamic batcher at work: shared executions, disconnects, and refusals."""

import asyncio
import time
from dataclasses import replace

import pytest

from gateway.backend import Note, NotSent
from gateway.config import ModelInput
from gateway.config.data_type import DataType
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest
from gateway.tensor import Datatype, Tensor
from tests.builders import read_all, settle, soon, text_response
from tests.gateway.conftest import Start
from tests.gateway.schedulers.dynamic_queues import BROKEN, drain, policy, refused
from tests.gateway.schedulers.queues import (
    MS,
    asked,
    dynamic,
    finish,
    lengths,
    word,
)

# Shared executions.


async def test_requests_of_one_turn_execute_together_and_immediately(start: Start) -> None:
    queue = start(dynamic(8))
    instance = queue.employ()
    await settle()
    entries = queue.submit("a", "b", "c")
    await asyncio.sleep(0)
    (execution,) = instance.executions
    assert asked(execution) == ["a", "b", "c"]
    finish(execution)
    assert [await soon(read_all(each.stream)) for each in entries] == [["a"], ["b"], ["c"]]


async def test_requests_that_arrive_while_the_instance_is_busy_execute_next(start: Start) -> None:
    queue = start(dynamic(4))
    instance = queue.employ()
    queue.submit("a")
    first = await instance.begun()
    queue.submit(*"bcdefg")
    finish(first)
    assert await drain(instance, 2) == ["bcde", "fg"]


async def test_a_backlog_of_seven_with_a_preferred_size_of_four(start: Start) -> None:
    """As a real Triton answers it: four, then three."""
    queue = start(dynamic(8, preferred_batch_size=(4,)))
    instance = queue.employ()
    queue.submit("-")
    first = await instance.begun()
    queue.submit(*"abcdefg")
    finish(first)
    assert await drain(instance, 2) == ["abcd", "efg"]


async def test_instances_take_batches_side_by_side(start: Start) -> None:
    queue = start(dynamic(2))
    instances = [queue.employ() for _ in range(2)]
    await settle()
    queue.submit(*"abcde")
    executions = [await instance.begun() for instance in instances]
    assert [asked(each) for each in executions] == [["a", "b"], ["c", "d"]]
    finish(executions[1])
    assert await drain(instances[1], 1) == ["e"]
    finish(executions[0])
    await settle()


async def test_requests_of_different_shapes_do_not_share_a_batch(start: Start) -> None:
    """As a real Triton: the order is kept, and a different shape ends the batch."""
    config = replace(
        dynamic(8), input=(ModelInput(name="x", data_type=DataType.TYPE_INT8, dims=(-1,)),)
    )
    queue = start(config)
    for width in (2, 2, 3, 2, 2):
        tensor = Tensor("x", Datatype.INT8, (1, width), bytes(width))
        queue.ask(InferRequest(model="text", inputs=(tensor,)))
    instance = queue.employ()
    found = []
    for _ in range(3):
        execution = await instance.begun()
        found.append(lengths(execution))
        execution.end()
    assert found == [[2, 2], [3], [2, 2]]
    await settle()


async def test_levels_execute_by_number_and_unknown_levels_are_the_default(start: Start) -> None:
    """As a real Triton, with max_batch_size 1 and the default level 2."""
    queue = start(dynamic(1, priority_levels=2, default_priority_level=2))
    instance = queue.employ()
    queue.submit("-")
    first = await instance.begun()
    for text, priority in [("l", 2), ("m", 2), ("h", 1), ("i", 1), ("9", 9), ("0", 0)]:
        queue.ask(word(text, priority=priority))
    finish(first)
    assert await drain(instance, 6) == ["h", "i", "l", "m", "9", "0"]


async def test_an_instance_that_batches_in_flight_executes_all_queued_requests(
    start: Start,
) -> None:
    queue = start(dynamic(4))
    instance = queue.employ(concurrency=None)
    await settle()
    queue.submit(*"abcdef")
    executions = [await instance.begun() for _ in range(2)]
    assert [asked(each) for each in executions] == [list("abcd"), list("ef")]
    queue.submit("g")
    executions.append(await instance.begun())
    for each in executions:
        finish(each)
    await settle()


# How long do they wait for each other?


async def test_requests_wait_for_others_as_long_as_the_delay(start: Start) -> None:
    queue = start(dynamic(8, preferred_batch_size=(4,), max_queue_delay_microseconds=20_000))
    instance = queue.employ()
    began_ns = time.monotonic_ns()
    queue.submit("a", "b")
    execution = await instance.begun()
    assert time.monotonic_ns() - began_ns >= 20 * MS
    assert asked(execution) == ["a", "b"]
    finish(execution)
    await settle()


async def test_a_preferred_size_does_not_wait(start: Start) -> None:
    queue = start(dynamic(8, preferred_batch_size=(4,), max_queue_delay_microseconds=60_000_000))
    instance = queue.employ()
    for text in "abcd":
        queue.submit(text)
        await settle()
    assert await drain(instance, 1) == ["abcd"]


async def test_a_request_of_another_shape_ends_the_wait(start: Start) -> None:
    config = replace(
        dynamic(8, preferred_batch_size=(4,), max_queue_delay_microseconds=60_000_000),
        input=(ModelInput(name="text_input", data_type=DataType.TYPE_STRING, dims=(-1,)),),
    )
    queue = start(config)
    instance = queue.employ()
    queue.submit("a")
    await settle()
    wide = Tensor("text_input", Datatype.BYTES, (1, 2), (b"b", b"c"))
    other = queue.ask(InferRequest(model="text", inputs=(wide,)))
    execution = await instance.begun()
    assert asked(execution) == ["a"]
    other.stream.cancel()
    finish(execution)
    await settle()


async def test_nothing_executes_after_the_only_queued_request_is_cancelled(start: Start) -> None:
    queue = start(dynamic(8, preferred_batch_size=(4,), max_queue_delay_microseconds=1000))
    instance = queue.employ()
    (gone,) = queue.submit("a")
    gone.stream.cancel()
    queue.submit("b")
    assert await drain(instance, 1) == ["b"]


# Disconnects.


async def test_a_disconnect_does_not_affect_the_rest_of_the_batch(start: Start) -> None:
    queue = start(dynamic(8))
    entries = queue.submit("a", "b", "c")
    instance = queue.employ()
    execution = await instance.begun()
    entries[1].stream.cancel()
    await settle()
    assert not execution.stopped.is_set()
    finish(execution)
    assert await soon(read_all(entries[0].stream)) == ["a"]
    assert await soon(read_all(entries[2].stream)) == ["c"]


async def test_all_clients_of_a_batch_leaving_stops_its_execution(start: Start) -> None:
    queue = start(dynamic(8))
    entries = queue.submit("a", "b", "c")
    instance = queue.employ()
    execution = await instance.begun()
    for entry in entries:
        entry.stream.cancel()
    await soon(execution.stopped.wait())
    queue.submit("d")
    assert await drain(instance, 1) == ["d"]


async def test_a_cancelled_request_leaves_the_queue_immediately(start: Start) -> None:
    queue = start(dynamic(8, default_queue_policy=policy(max_queue_size=1)))
    (entry,) = queue.submit("a")
    with pytest.raises(InferenceError):
        queue.submit("b")
    entry.stream.cancel()
    queue.submit("c")
    assert await drain(queue.employ(), 1) == ["c"]


async def test_the_death_of_an_instance_fails_its_batch_only(start: Start) -> None:
    queue = start(dynamic(2))
    dead, alive = queue.employ(), queue.employ()
    await settle()
    entries = queue.submit(*"abcde")
    await dead.begun()
    queue.scheduler.remove(dead, BROKEN)
    assert [await refused(each) for each in entries[:2]] == [BROKEN, BROKEN]
    assert await drain(alive, 2) == ["cd", "e"]
    assert len(dead.executions) == 1


async def test_of_a_batch_taken_in_part_the_rest_is_queued_again(start: Start) -> None:
    queue = start(dynamic(8))
    dead = queue.employ()
    entries = queue.submit("a", "b", "c", "d")
    execution = await dead.begun()
    execution.answer(text_response("a", final=True), 0)
    execution.answer(BROKEN, 1)
    await settle()
    entries[2].stream.cancel()
    dead.die("gone")
    execution.crash(NotSent(Code.UNAVAILABLE, "gone"))
    await settle()
    assert queue.statistics.pending == 1
    assert queue.statistics.execution_count == 1
    assert list(queue.statistics.batches) == [2]
    queue.scheduler.remove(dead, BROKEN)
    replacement = queue.employ()
    assert await drain(replacement, 1) == ["d"]
    assert await soon(read_all(entries[0].stream)) == ["a"]
    assert (await refused(entries[1])).message == "broken"
    assert await soon(read_all(entries[3].stream)) == ["d"]
    assert queue.statistics.execution_count == 2


async def test_an_execution_of_which_nothing_was_taken_is_not_counted(start: Start) -> None:
    queue = start(dynamic(8))
    instance = queue.employ()
    first, second = queue.submit("a", "b")
    execution = await instance.begun()
    first.stream.cancel()
    instance.die("gone")
    execution.crash(NotSent(Code.UNAVAILABLE, "gone"))
    await settle()
    assert (queue.statistics.pending, queue.statistics.execution_count) == (1, 0)
    second.stream.cancel()


async def test_requests_queued_again_execute_on_a_free_instance_immediately(start: Start) -> None:
    queue = start(dynamic(8))
    dead = queue.employ()
    first, second = queue.submit("a", "b")
    execution = await dead.begun()
    alive = queue.employ()
    execution.answer(text_response("a", final=True), 0)
    execution.steps.put_nowait((0, Note.FREED))
    await settle()
    dead.die("gone")
    execution.crash(NotSent(Code.UNAVAILABLE, "gone"))
    assert await drain(alive, 1) == ["b"]
    assert await soon(read_all(first.stream)) == ["a"]
    assert await soon(read_all(second.stream)) == ["b"]


async def test_an_answer_of_a_batch_taken_in_part_keeps_its_place(start: Start) -> None:
    queue = start(dynamic(2, preserve_ordering=True))
    slow, dead = queue.employ(), queue.employ()
    entries = queue.submit("a", "b", "c", "d")
    before, execution = await slow.begun(), await dead.begun()
    execution.answer(text_response("c", final=True), 0)
    await settle()
    dead.die("gone")
    execution.crash(NotSent(Code.UNAVAILABLE, "gone"))
    await settle()
    assert entries[2].stream.take() is None, "the answer is held"
    finish(before)
    assert await drain(slow, 1) == ["d"]
    for text, entry in zip("abcd", entries, strict=True):
        assert await soon(read_all(entry.stream)) == [text]
