"""Instances of a fair queue that come and go, rules that change, and what requests cost."""

import asyncio

import pytest

from gateway.backend import Note, NotSent
from gateway.errors import Code, InferenceError
from gateway.messages import InferResponse, Usage
from gateway.policy.tenants import TenantRules, Tenants
from tests.builders import TEXT, read_all, settle, soon, text_response
from tests.gateway.conftest import Start
from tests.gateway.schedulers.every_scheduler import BROKEN
from tests.gateway.schedulers.fair_queues import (
    answer,
    ask,
    in_front,
    sample,
    served,
    tenants,
    text_of,
    wide,
)
from tests.gateway.schedulers.queues import Queue, dynamic, finish


@pytest.fixture
async def queue(start: Start) -> Queue:
    """Tenants `a` and `b` of equal weight in front of a queue without batches."""
    return start(TEXT, None, tenants())


# Instances.


async def test_what_waits_in_front_is_executed_by_the_instance_after_a_dead_one(
    queue: Queue,
) -> None:
    dead = queue.employ()
    first, *others = ask(queue, "a", *"1234")
    await dead.begun()
    dead.die("gone")
    queue.scheduler.remove(dead, BROKEN)
    with pytest.raises(InferenceError, match="broken"):
        await soon(read_all(first.stream))
    await settle()
    assert dead.asked == ["1"]
    (other,) = ask(queue, "b", "x")
    replacement = queue.employ()
    assert await served(replacement, 4) == ["2", "3", "x", "4"]
    for entry in (*others, other):
        assert await soon(read_all(entry.stream)) == ["done"]


async def test_a_request_that_no_instance_received_keeps_its_place(queue: Queue) -> None:
    dead = queue.employ()
    ask(queue, "a", *"1234")
    execution = await dead.begun()
    dead.die("gone")
    execution.crash(NotSent(Code.UNAVAILABLE, "gone"))
    await settle()
    queue.scheduler.remove(dead, BROKEN)
    assert await served(queue.employ(), 4) == ["1", "2", "3", "4"]


async def test_an_instance_freed_early_has_another_place(queue: Queue) -> None:
    instance = queue.employ()
    entries = ask(queue, "a", *"123456")
    executions = []
    for _ in entries:
        execution = await instance.begun()
        execution.steps.put_nowait((0, Note.FREED))
        executions.append(execution)
    for execution in executions:
        answer(execution)
    for entry in entries:
        assert await soon(read_all(entry.stream)) == ["done"]


async def test_instances_that_come_and_go_change_the_window(queue: Queue) -> None:
    ask(queue, "a", *"123456")
    await settle()
    first, second = queue.employ(), queue.employ()
    executions = [await first.begun(), await second.begun()]
    removed = asyncio.ensure_future(queue.scheduler.remove(second))
    for execution in executions:
        answer(execution)
    await soon(removed)
    assert await served(first, 4) == ["3", "4", "5", "6"]


# Rules that change.


async def test_requests_pass_while_no_tenant_has_rules_and_wait_once_one_has(
    start: Start,
) -> None:
    rules = Tenants()
    queue = start(TEXT, None, rules)
    instance = queue.employ()
    ask(queue, "a", *"123")
    rules.replace({"b": TenantRules()})
    ask(queue, "a", *"456")
    ask(queue, "b", "x")
    rules.replace({})
    ask(queue, "b", "y")
    assert await served(instance, 8) == [*"123456", "x", "y"]
    await settle()
    assert sample(in_front(queue).families({}), "gateway_tenant_in_flight", tenant="other") == 0


async def test_a_new_weight_counts_for_requests_that_wait(start: Start) -> None:
    rules = tenants()
    queue = start(TEXT, None, rules)
    instance = queue.employ()
    ask(queue, "a", *["a"] * 40)
    ask(queue, "b", *["b"] * 40)
    await served(instance, 10, tokens=10)
    rules.replace({"a": TenantRules(weight=4.0), "b": TenantRules()})
    found = "".join(await served(instance, 30, tokens=10))
    assert found.count("a") == pytest.approx(24, abs=2)
    await served(instance, 40)


async def test_a_tenant_whose_weight_is_raised_waits_no_longer_for_what_it_had_before(
    start: Start,
) -> None:
    """A prompt of 4,000 tokens at a hundredth of the weight: 400,000 of others."""
    rules = tenants(a=TenantRules(weight=0.01), b=TenantRules())
    queue = start(TEXT, None, rules)
    instance = queue.employ()
    ask(queue, "b", "1")
    ask(queue, "a", "l")
    ask(queue, "b", *["b"] * 60)
    for text, tokens in (("1", 1), ("l", 4000)):
        execution = await instance.begun()
        assert text_of(execution) == text
        execution.answer(InferResponse(usage=Usage(prompt_tokens=tokens)))
        answer(execution)
        await settle()
    ask(queue, "a", "z")
    rules.replace({"a": TenantRules(), "b": TenantRules()})
    found: list[str] = []
    while not found or found[-1] != "z":
        execution = await instance.begun()
        found.append(text_of(execution))
        execution.answer(InferResponse(usage=Usage(prompt_tokens=100)))
        answer(execution)
    assert len(found) == pytest.approx(42, abs=4), "4,000 tokens of b, and a's own one"
    await served(instance, 61 - len(found))


async def test_a_request_that_has_ended_otherwise_takes_no_place(queue: Queue) -> None:
    instance = queue.employ()
    _, _, third, _ = ask(queue, "a", *"1234")
    third.stream.fail(BROKEN)
    assert await served(instance, 3) == ["1", "2", "4"]
    assert sample(in_front(queue).families({}), "gateway_queue_wait_seconds_count") == 3


# What requests cost.


async def test_the_estimate_of_a_prompt_is_taken_back_if_it_was_not_executed(
    queue: Queue,
) -> None:
    instance = queue.employ()
    ask(queue, "a", "0")
    execution = await instance.begun()
    execution.answer(InferResponse(usage=Usage(prompt_tokens=1)))
    await settle()
    ask(queue, "a", *"123456")
    (long,) = ask(queue, "b", "x" * 4000)
    assert long.service is not None
    assert long.service.estimate == 1000.0
    answer(execution, tokens=50)
    assert await served(instance, 1, tokens=50) == ["1"]
    await settle()
    assert sample(in_front(queue).families({}), "gateway_queue_wait_seconds_count") == 4
    long.stream.cancel()
    ask(queue, "b", "x", "y")
    found = await served(instance, 7, tokens=50)
    assert found.index("y") < found.index("6")


async def test_service_is_counted_by_tenant_and_kind(queue: Queue) -> None:
    instance = queue.employ()
    (entry,) = ask(queue, "a", "1")
    execution = await instance.begun()
    execution.answer(text_response("half", tokens=3))
    await settle()
    entry.stream.cancel()
    await settle()
    ask(queue, "unlisted", "2")
    answer(await instance.begun())
    await settle()
    name = "gateway_tenant_service_total"
    found = in_front(queue).families({"model": "text", "version": "1"})
    assert sample(found, name, tenant="a", kind="output", model="text", version="1") == 3
    assert sample(found, name, tenant="other", kind="compute_ms") > 0
    assert sample(found, "gateway_tenant_in_flight", tenant="a") == 0
    assert sample(found, "gateway_queue_wait_seconds_count", model="text") == 2


async def test_the_rows_of_a_batch_share_its_time(start: Start) -> None:
    queue = start(dynamic(4), None, tenants())
    instance = queue.employ()
    queue.ask(wide("a", "w", rows=3))
    ask(queue, "b", "x")
    execution = await instance.begun()
    assert len(execution.requests) == 2
    finish(execution)
    await settle()
    name = "gateway_tenant_service_total"
    a, b = (sample(in_front(queue).families({}), name, tenant=each) for each in "ab")
    assert a == pytest.approx(3 * b)
