"""Behaviour of every scheduler: the same cases for each, with requests that share no batch."""

import asyncio
import weakref
from dataclasses import replace

import pytest

from gateway.backend import Note, NotSent
from gateway.config import ModelConfig
from gateway.config.scheduling import QueuePolicy
from gateway.errors import Code, InferenceError
from gateway.schedulers.rate_limiter import ExecutionLimiter
from tests.builders import (
    TEXT,
    Execution,
    ScriptedInstance,
    StoppableInstance,
    read_all,
    settle,
    soon,
    text_response,
)
from tests.gateway.conftest import Start
from tests.gateway.schedulers.queues import TOKENS, Queue, dynamic, word
from tests.gateway.sequences.parts import direct, oldest

pytestmark = pytest.mark.both

SLOW = QueuePolicy(default_timeout_microseconds=60_000_000, max_queue_size=100)
BROKEN = InferenceError(Code.INTERNAL, "broken")

SCHEDULERS = {
    "direct": TEXT,
    "dynamic": dynamic(1),
    "dynamic, with timeouts": dynamic(1, default_queue_policy=SLOW),
    "dynamic, in order": dynamic(1, preserve_ordering=True),
    "dynamic, by length": replace(TOKENS, max_batch_size=1),
    "sequences, direct": direct(slots=1),
    "sequences, oldest": oldest(candidates=1, max_batch_size=1),
    "sequences, oldest, in order": oldest(2, max_batch_size=1, preserve_ordering=True),
}
"""Requests for sequences are sequences of one request each."""


@pytest.fixture(params=[False, True], ids=["free", "rate limited"])
def limiter(request: pytest.FixtureRequest) -> ExecutionLimiter | None:
    return ExecutionLimiter() if request.param else None


@pytest.fixture(params=SCHEDULERS)
async def queue(
    request: pytest.FixtureRequest, start: Start, limiter: ExecutionLimiter | None
) -> Queue:
    config: ModelConfig = SCHEDULERS[request.param]
    return start(config, limiter)


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


async def test_a_request_on_its_way_to_an_instance_that_dies_keeps_its_place(queue: Queue) -> None:
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
    queue: Queue,
) -> None:
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


async def test_requests_for_a_dying_instance_execute_on_another(queue: Queue) -> None:
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
