"""Ends of requests, instances and servers, the same for every scheduler."""

import asyncio

import pytest

from gateway.backend import Note, NotSent
from gateway.errors import Code, InferenceError
from tests.builders import (
    Execution,
    ScriptedInstance,
    StoppableInstance,
    read_all,
    settle,
    soon,
    text_response,
)
from tests.gateway.schedulers.every_scheduler import BROKEN
from tests.gateway.schedulers.queues import Queue

pytestmark = pytest.mark.both


async def test_stopping_ends_the_executions_with_an_error(queue: Queue) -> None:
    instance = ScriptedInstance()
    queue.add(instance)
    (entry,) = queue.submit("a")
    execution = await instance.begun()
    await queue.stop()
    assert execution.stopped.is_set()
    with pytest.raises(InferenceError) as caught:
        await soon(read_all(entry.stream))
    assert caught.value.code is Code.UNAVAILABLE


async def test_a_scheduler_with_a_backlog_stops_quietly(queue: Queue) -> None:
    instance = ScriptedInstance(concurrency=1)
    queue.add(instance)
    entries = queue.submit("a", "b", "c")
    await instance.begun()
    await queue.stop()
    await settle()
    assert instance.asked == ["a"]
    for entry in entries:
        entry.stream.abandon(BROKEN)


async def test_a_withdrawn_instance_ends_its_executions_and_takes_no_others(
    queue: Queue,
) -> None:
    leaving, staying = ScriptedInstance(concurrency=1), ScriptedInstance(concurrency=1)
    queue.add(leaving)
    first, second, third = queue.submit("a", "b", "c")
    execution = await leaving.begun()
    withdrawn = asyncio.ensure_future(queue.scheduler.remove(leaving))
    await settle()
    assert not withdrawn.done()
    queue.add(staying)
    (await staying.begun()).finish("done b")
    (await staying.begun()).finish("done c")
    execution.finish("done a")
    await soon(withdrawn)
    answers = [await soon(read_all(each.stream)) for each in (first, second, third)]
    assert answers == [["done a"], ["done b"], ["done c"]]
    assert (leaving.asked, staying.asked) == (["a"], ["b", "c"])


async def test_an_instance_freed_early_takes_the_next_request_and_no_other(
    queue: Queue,
) -> None:
    instance = ScriptedInstance(concurrency=1)
    queue.add(instance)
    entries = queue.submit("a", "b", "c")
    first = await let_go(instance)
    second = await instance.begun()
    await settle()
    assert instance.asked == ["a", "b"]
    second.finish("done b")
    (await instance.begun()).finish("done c")
    first.finish("done a")
    answers = [await soon(read_all(each.stream)) for each in entries]
    assert answers == [["done a"], ["done b"], ["done c"]]


async def let_go(instance: ScriptedInstance) -> Execution:
    """An execution that continues although its instance takes another one."""
    execution = await instance.begun()
    execution.steps.put_nowait((0, Note.FREED))
    return execution


async def test_executions_freed_early_get_the_error_of_a_dead_instance(queue: Queue) -> None:
    dead, replacement = ScriptedInstance(concurrency=1), ScriptedInstance(concurrency=1)
    queue.add(dead)
    entries = queue.submit("a", "b", "c")
    executions = [await let_go(dead), await dead.begun()]
    queue.scheduler.remove(dead, BROKEN)
    for entry, execution in zip(entries, executions, strict=False):
        with pytest.raises(InferenceError, match="broken"):
            await soon(read_all(entry.stream))
        await soon(execution.stopped.wait())
    queue.add(replacement)
    (await replacement.begun()).finish("done c")
    assert await soon(read_all(entries[2].stream)) == ["done c"]


async def test_an_instance_is_withdrawn_after_the_executions_freed_early(queue: Queue) -> None:
    instance = ScriptedInstance(concurrency=1)
    queue.add(instance)
    first, second = queue.submit("a", "b")
    executions = [await let_go(instance), await let_go(instance)]
    withdrawn = asyncio.ensure_future(queue.scheduler.remove(instance))
    executions[1].finish("done b")
    await settle()
    assert not withdrawn.done()
    executions[0].finish("done a")
    await soon(withdrawn)
    assert await soon(read_all(first.stream)) == ["done a"]
    assert await soon(read_all(second.stream)) == ["done b"]


async def test_an_idle_instance_is_withdrawn_at_once(queue: Queue) -> None:
    instance = ScriptedInstance(concurrency=1)
    queue.add(instance)
    await soon(queue.scheduler.remove(instance))
    (entry,) = queue.submit("a")
    await settle()
    assert instance.executions == []
    entry.stream.cancel()


async def test_a_cancelled_wait_for_a_removed_instance_disturbs_no_execution(queue: Queue) -> None:
    instance = ScriptedInstance(concurrency=1)
    queue.add(instance)
    (entry,) = queue.submit("a")
    execution = await instance.begun()
    asyncio.ensure_future(queue.scheduler.remove(instance)).cancel()
    await settle()
    execution.finish("done")
    assert await soon(read_all(entry.stream)) == ["done"]


# Instances that die.


async def test_an_instance_that_dies_after_its_removal_ends_the_wait_for_it(queue: Queue) -> None:
    dead = ScriptedInstance(concurrency=1)
    queue.add(dead)
    (entry,) = queue.submit("a")
    await dead.begun()
    removed = queue.scheduler.remove(dead)
    await soon(queue.scheduler.remove(dead, BROKEN))
    await soon(removed)
    with pytest.raises(InferenceError, match="broken"):
        await soon(read_all(entry.stream))
    assert not list(queue.scheduler.executions)


async def test_a_queued_request_is_never_handed_to_an_instance_that_has_died(queue: Queue) -> None:
    dead = ScriptedInstance(concurrency=1)
    queue.add(dead)
    first, second = queue.submit("a", "b")
    execution = await dead.begun()
    dead.die("gone")
    execution.crash(BROKEN)
    with pytest.raises(InferenceError, match="broken"):
        await soon(read_all(first.stream))
    await settle()
    assert dead.asked == ["a"], "the scheduler has not learned yet that the instance has died"
    queue.scheduler.remove(dead, BROKEN)
    replacement = ScriptedInstance(concurrency=1)
    queue.add(replacement)
    (await replacement.begun()).finish("served")
    assert await soon(read_all(second.stream)) == ["served"]


@pytest.fixture
def on_its_way(queue: Queue) -> Queue:
    """A queue whose requests reach an instance in a later turn of the event loop."""
    if queue.has_no_tasks:
        pytest.skip("a request without a task reaches its instance at once")
    return queue


async def test_a_request_on_its_way_to_an_instance_that_dies_keeps_its_place(
    on_its_way: Queue,
) -> None:
    queue = on_its_way
    dead = ScriptedInstance(concurrency=2)
    queue.add(dead)
    await settle()
    entries = queue.submit("a", "b", "c")
    dead.die("gone")
    await settle()
    assert dead.asked == []
    queue.scheduler.remove(dead, BROKEN)
    await settle()
    assert queue.statistics.pending == 3
    replacement = ScriptedInstance(concurrency=1)
    queue.add(replacement)
    for text, entry in zip("abc", entries, strict=True):
        (await replacement.begun()).finish(text)
        assert await soon(read_all(entry.stream)) == [text]
    assert replacement.asked == ["a", "b", "c"]


async def test_a_request_on_its_way_to_an_instance_that_is_removed_keeps_its_place(
    on_its_way: Queue,
) -> None:
    queue = on_its_way
    removed = ScriptedInstance(concurrency=1)
    queue.add(removed)
    await settle()
    (entry,) = queue.submit("a")
    queue.scheduler.remove(removed, BROKEN)
    await settle()
    assert removed.asked == []
    replacement = ScriptedInstance(concurrency=1)
    queue.add(replacement)
    (await replacement.begun()).finish("served")
    assert await soon(read_all(entry.stream)) == ["served"]


async def test_requests_for_a_dying_instance_execute_on_another(on_its_way: Queue) -> None:
    queue = on_its_way
    if queue.keeps_sequences:
        pytest.skip("a sequence waits for the instance that has its slot")
    dead, alive = ScriptedInstance(concurrency=1), ScriptedInstance(concurrency=1)
    queue.add(dead)
    queue.add(alive)
    await settle()
    entries = queue.submit("a", "b")
    dead.die("gone")
    for _ in entries:
        (await alive.begun()).finish("served")
    for entry in entries:
        assert await soon(read_all(entry.stream)) == ["served"]
    assert dead.asked == []


async def test_requests_that_an_instance_has_not_taken_are_executed_by_the_next_one(
    queue: Queue,
) -> None:
    if queue.keeps_sequences:
        pytest.skip("a sequence ends with the instance that has its slot")
    dead = ScriptedInstance(concurrency=1)
    queue.add(dead)
    first, second = queue.submit("a", "b")
    execution = await dead.begun()
    dead.die("gone")
    execution.crash(NotSent(Code.UNAVAILABLE, "gone"))
    await settle()
    assert queue.statistics.pending == 2
    queue.scheduler.remove(dead, BROKEN)
    replacement = ScriptedInstance(concurrency=1)
    queue.add(replacement)
    for text, entry in (("a", first), ("b", second)):
        (await replacement.begun()).finish(text)
        assert await soon(read_all(entry.stream)) == [text]
    assert replacement.asked == ["a", "b"]
    await settle()
    assert queue.statistics.execution_count == 2


async def test_a_stopped_request_that_its_instance_has_not_taken_is_executed_by_no_other(
    queue: Queue,
) -> None:
    dead = StoppableInstance(concurrency=1)
    queue.add(dead)
    first, second = queue.submit("a", "b")
    execution = await dead.begun()
    first.stream.stop()
    assert not first.stream.done, "its instance ends it"
    dead.die("gone")
    execution.crash(NotSent(Code.UNAVAILABLE, "gone"))
    with pytest.raises(InferenceError) as caught:
        await soon(read_all(first.stream))
    assert caught.value.code is Code.CANCELLED
    queue.scheduler.remove(dead, BROKEN)
    replacement = ScriptedInstance(concurrency=1)
    queue.add(replacement)
    (await replacement.begun()).finish("served")
    assert await soon(read_all(second.stream)) == ["served"]
    assert replacement.asked == ["b"]


async def test_stopping_an_execution_in_its_own_step_does_not_affect_the_next(
    queue: Queue,
) -> None:
    instance = ScriptedInstance(concurrency=1)
    queue.add(instance)
    first, second = queue.submit("a", "b")
    execution = await instance.begun()
    first.stream.listen(first.stream.cancel)
    execution.answer(text_response("half"))
    await soon(execution.stopped.wait())
    (await instance.begun()).finish("served")
    assert await soon(read_all(second.stream)) == ["served"]
