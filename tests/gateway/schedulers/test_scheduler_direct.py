"""The default scheduler: first in, first out, each request an execution of its own."""

from dataclasses import replace

from gateway.backend import NotSent
from gateway.config import InstanceGroup, RateLimiter, Resource
from gateway.errors import Code
from gateway.policy.caller import Caller
from gateway.schedulers.rate_limiter import ExecutionLimiter
from tests.builders import TEXT, read_all, settle, soon, text_request
from tests.gateway.conftest import Start
from tests.gateway.schedulers.queues import Queue, asked, finish
from tests.gateway.schedulers.test_begun_executions import PromptInstance


async def test_requests_are_not_combined_although_the_model_batches(start: Start) -> None:
    queue = start(replace(TEXT, max_batch_size=8))
    instance = queue.employ()
    entries = queue.submit("a", "b", "c")
    for text, entry in zip("abc", entries, strict=True):
        execution = await instance.begun()
        assert asked(execution) == [text]
        finish(execution)
        assert await soon(read_all(entry.stream)) == [text]
    await settle()
    assert len(instance.executions) == 3


# Instances that take any number of executions, without tasks.


async def unlimited(queue: Queue, group: InstanceGroup | None = None) -> PromptInstance:
    instance = PromptInstance(None)
    queue.add(instance, group or InstanceGroup())
    await settle()
    return instance


async def test_an_instance_that_takes_any_number_begins_each_request_at_once(
    start: Start,
) -> None:
    queue = start(TEXT)
    instance = await unlimited(queue)
    entries = queue.submit("a", "b", "c")
    assert len(instance.all_begun) == len(list(queue.scheduler.executions)) == 3
    for entry, begun in zip(entries, instance.all_begun, strict=True):
        begun.finish("d")
        assert await soon(read_all(entry.stream)) == ["d"]
    assert list(queue.scheduler.executions) == []
    assert queue.statistics.execution_count == 3


async def test_an_instance_that_takes_any_number_counts_its_requests_by_tenant(
    start: Start,
) -> None:
    """A receipt reads that count, and none of the executions."""
    queue = start(TEXT)
    first, second = await unlimited(queue), await unlimited(queue)
    entries = [queue.ask(text_request(caller=Caller(tenant=each))) for each in "abab"]
    shared = [each.shared for each in queue.scheduler.executions]
    assert shared == [{"a": 2}, {"b": 2}, {"a": 2}, {"b": 2}]
    first.all_begun[0].finish("x")
    entries.append(queue.ask(text_request()))
    assert shared[:2] == [{"a": 1, "": 1}, {"b": 2}]
    queue.scheduler.remove(second)
    entries.append(queue.ask(text_request(caller=Caller(tenant="b"))))
    assert shared[0] == {"a": 1, "": 1, "b": 1}
    for begun in first.all_begun[1:] + second.all_begun:
        begun.finish("x")
    for entry in entries:
        assert await soon(read_all(entry.stream)) == ["x"]
    assert shared[0] == {}


async def test_two_instances_that_take_any_number_have_requests_in_turn(start: Start) -> None:
    queue = start(TEXT)
    first, second = await unlimited(queue), await unlimited(queue)
    queue.submit("a", "b")
    assert (len(first.all_begun), len(second.all_begun)) == (1, 1)
    queue.scheduler.remove(first)
    queue.submit("c", "d")
    assert (len(first.all_begun), len(second.all_begun)) == (1, 3)
    for begun in first.all_begun + second.all_begun:
        begun.finish("e")


async def test_an_instance_that_takes_any_number_has_its_turns_of_the_rate_limiter(
    start: Start,
) -> None:
    queue = start(TEXT, limiter=ExecutionLimiter())
    resources = (Resource(name="R", count=1),)
    instance = await unlimited(queue, InstanceGroup(rate_limiter=RateLimiter(resources=resources)))
    queue.submit("a", "b")
    await settle()
    assert len(instance.all_begun) == 1
    instance.all_begun[0].finish("a")
    await settle()
    instance.all_begun[1].finish("b")


async def test_a_request_that_was_not_sent_begins_again_at_an_instance_that_takes_any_number(
    start: Start,
) -> None:
    queue = start(TEXT)
    instance = await unlimited(queue)
    (entry,) = queue.submit("a")
    instance.all_begun[0].reader.over(NotSent(Code.UNAVAILABLE, "full"))
    instance.all_begun[1].finish("a")
    assert await soon(read_all(entry.stream)) == ["a"]
