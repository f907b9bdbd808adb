"""Behaviour of every scheduler: the same cases for each, with requests that share no batch."""

import weakref

import pytest

from gateway.errors import InferenceError
from tests.builders import (
    Execution,
    ScriptedInstance,
    read_all,
    settle,
    soon,
)
from tests.gateway.schedulers.every_scheduler import BROKEN
from tests.gateway.schedulers.queues import Queue, word

pytestmark = pytest.mark.both


async def begun(instance: ScriptedInstance, count: int) -> list[Execution]:
    return [await instance.begun() for _ in range(count)]


async def test_requests_are_executed_in_the_order_they_came(queue: Queue) -> None:
    instance = ScriptedInstance(concurrency=1)
    queue.add(instance)
    entries = queue.submit("a", "b", "c")
    for text, entry in zip("abc", entries, strict=True):
        execution = await instance.begun()
        assert instance.asked[-1] == text
        execution.finish(f"done {text}")
        assert await soon(read_all(entry.stream)) == [f"done {text}"]
    assert [len(execution.requests) for execution in instance.executions] == [1, 1, 1]


@pytest.mark.parametrize("concurrency", [1, 3])
async def test_an_instance_takes_as_many_executions_as_it_says_and_no_more(
    queue: Queue, concurrency: int
) -> None:
    instance = ScriptedInstance(concurrency)
    queue.add(instance)
    texts = [str(number) for number in range(concurrency + 1)]
    queue.submit(*texts)
    executions = await begun(instance, concurrency)
    await settle()
    assert instance.asked == texts[:-1]
    executions[0].finish("done")
    executions.append(await instance.begun())
    assert instance.asked == texts
    for execution in executions[1:]:
        execution.finish("done")
    await settle()


async def test_an_instance_that_batches_in_flight_takes_every_request_immediately(
    queue: Queue,
) -> None:
    instance = ScriptedInstance(concurrency=None)
    queue.add(instance)
    entries = queue.submit(*map(str, range(20)))
    for execution in await begun(instance, 20):
        execution.finish("done")
    for entry in entries:
        assert await soon(read_all(entry.stream)) == ["done"]


async def test_instances_share_the_queue(queue: Queue) -> None:
    if queue.keeps_sequences:
        pytest.skip("a sequence waits for the instance that has its slot")
    instances = [ScriptedInstance(concurrency=1) for _ in range(2)]
    for instance in instances:
        queue.add(instance)
    queue.submit("a", "b", "c")
    first, second = [await instance.begun() for instance in instances]
    assert [instance.asked for instance in instances] == [["a"], ["b"]]
    second.finish("done")
    third = await instances[1].begun()
    assert instances[1].asked == ["b", "c"]
    first.finish("done")
    third.finish("done")
    await settle()


async def test_a_request_waits_for_an_instance(queue: Queue) -> None:
    (entry,) = queue.submit("early")
    await settle()
    assert queue.statistics.pending == 1
    instance = ScriptedInstance()
    queue.add(instance)
    execution = await instance.begun()
    assert queue.statistics.pending == 0
    execution.finish("at last")
    assert await soon(read_all(entry.stream)) == ["at last"]


async def test_a_request_cancelled_in_the_queue_never_reaches_the_instance(queue: Queue) -> None:
    instance = ScriptedInstance(concurrency=1)
    queue.add(instance)
    _first, second, third = queue.submit("a", "b", "c")
    execution = await instance.begun()
    assert queue.statistics.pending == 2
    second.stream.cancel()
    assert queue.statistics.pending == 1
    execution.finish("done")
    execution = await instance.begun()
    assert instance.asked == ["a", "c"]
    execution.finish("served")
    assert await soon(read_all(third.stream)) == ["served"]


class Body:
    """Something large that a request holds on to."""


async def test_a_request_cancelled_in_the_queue_is_released_immediately(queue: Queue) -> None:
    instance = ScriptedInstance(concurrency=1)
    queue.add(instance)
    queue.submit("a")
    execution = await instance.begun()
    body = Body()
    held = weakref.ref(body)
    entry = queue.ask(word("b", parameters={"body": body}))
    entry.stream.cancel()
    del body, entry
    assert held() is None
    execution.finish("done")
    await settle()
    assert instance.asked == ["a"]


async def test_a_request_cancelled_at_once_never_reaches_the_instance(queue: Queue) -> None:
    instance = ScriptedInstance(concurrency=1)
    queue.add(instance)
    await settle()
    first, second = queue.submit("a", "b")
    first.stream.cancel()
    execution = await instance.begun()
    assert instance.asked == ["b"]
    execution.finish("served")
    assert await soon(read_all(second.stream)) == ["served"]


async def test_cancelling_a_running_request_frees_its_instance(queue: Queue) -> None:
    instance = ScriptedInstance(concurrency=1)
    queue.add(instance)
    first, second = queue.submit("a", "b")
    execution = await instance.begun()
    first.stream.cancel()
    await soon(execution.stopped.wait())
    (await instance.begun()).finish("served")
    assert await soon(read_all(second.stream)) == ["served"]


@pytest.mark.parametrize("error", [BROKEN, RuntimeError("slipped through")])
async def test_a_failed_execution_frees_its_instance(queue: Queue, error: Exception) -> None:
    instance = ScriptedInstance(concurrency=1)
    queue.add(instance)
    first, second = queue.submit("a", "b")
    (await instance.begun()).crash(error)
    with pytest.raises(InferenceError):
        await soon(read_all(first.stream))
    (await instance.begun()).finish("served")
    assert await soon(read_all(second.stream)) == ["served"]


async def test_requests_executing_on_a_dead_instance_get_the_error(queue: Queue) -> None:
    dead, alive = ScriptedInstance(concurrency=1), ScriptedInstance(concurrency=1)
    queue.add(dead)
    queue.add(alive)
    first, second = queue.submit("a", "b")
    execution = await dead.begun()
    queue.scheduler.remove(dead, BROKEN)
    with pytest.raises(InferenceError, match="broken"):
        await soon(read_all(first.stream))
    await soon(execution.stopped.wait())
    (await alive.begun()).finish("done")
    assert await soon(read_all(second.stream)) == ["done"]


async def test_requests_queued_for_a_dead_instance_execute_on_its_replacement(queue: Queue) -> None:
    dead = ScriptedInstance(concurrency=1)
    queue.add(dead)
    _, waiting = queue.submit("a", "b")
    execution = await dead.begun()
    queue.scheduler.remove(dead, BROKEN)
    await soon(execution.stopped.wait())
    await settle()
    assert dead.asked == ["a"]
    replacement = ScriptedInstance(concurrency=1)
    queue.add(replacement)
    (await replacement.begun()).finish("served")
    assert await soon(read_all(waiting.stream)) == ["served"]


@pytest.mark.parametrize("concurrency", [None, 2])
async def test_an_idle_instance_that_was_removed_gets_nothing(
    queue: Queue, concurrency: int | None
) -> None:
    removed, kept = ScriptedInstance(concurrency), ScriptedInstance(concurrency)
    queue.add(removed)
    queue.add(kept)
    queue.scheduler.remove(removed, BROKEN)
    queue.submit("a", "b")
    for execution in await begun(kept, 2):
        execution.finish("done")
    await settle()
    assert removed.executions == []
