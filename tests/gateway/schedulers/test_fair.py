"""The fair queue: which request of which tenant goes to the scheduler, and when."""

import asyncio
import time
from dataclasses import replace

import pytest

from gateway.config.scheduling import QueuePolicy, TimeoutAction
from gateway.errors import Code, InferenceError
from gateway.messages import Usage
from gateway.observability.statistics import QUEUE_TIMEOUT
from gateway.policy.tenants import TenantRules
from tests.builders import TEXT, ScriptedInstance, read_all, settle, soon, text_response
from tests.gateway.conftest import Start
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
from tests.gateway.schedulers.queues import Queue, asked, dynamic, finish

LATE_US = 3_600_000_000
LEVELS = dynamic(1, priority_levels=3, default_priority_level=2)


@pytest.fixture
async def queue(start: Start) -> Queue:
    """Tenants `a` and `b` of equal weight in front of a queue without batches."""
    return start(TEXT, None, tenants())


# Whose request is next.


async def test_a_quiet_tenant_is_served_next_during_a_flood(queue: Queue) -> None:
    instance = queue.employ()
    ask(queue, "a", *"12345678")
    await settle()
    ask(queue, "b", "mine")
    assert await served(instance, 9) == [*"123", "mine", *"45678"], "3 is older than mine"


async def test_the_scheduler_has_one_request_more_than_its_instances_execute(queue: Queue) -> None:
    """The second one waits in the scheduler, so that no place is ever free."""
    instance = queue.employ(concurrency=3)
    ask(queue, "a", *"123456")
    await settle()
    assert instance.asked == ["1", "2", "3"]
    for tenant, text in (("b", "x"), ("a", "y")):
        ask(queue, tenant, text)
    answer(instance.executions[0])
    await settle()
    assert instance.asked == ["1", "2", "3", "4"], "it was with the scheduler before x came"
    for execution in instance.executions[1:]:
        answer(execution)
    await settle()
    assert instance.asked[4:] == ["5", "x", "6"]
    for execution in instance.executions[4:]:
        answer(execution)
    await settle()
    answer(instance.executions[-1])
    assert instance.asked[7:] == ["y"]


@pytest.mark.parametrize("places", [None, 2])
async def test_an_engine_gets_as_many_requests_as_it_executes_and_one_more(
    queue: Queue, places: int | None
) -> None:
    engine = ScriptedInstance(concurrency=None)
    engine.places = places
    queue.add(engine)
    ask(queue, "a", *"12345")
    await settle()
    assert engine.asked == list("12345" if places is None else "123")
    assert len(await served(engine, 5)) == 5


async def test_short_answers_have_two_requests_ready(queue: Queue) -> None:
    engine = ScriptedInstance(concurrency=None)
    engine.places = 1
    queue.add(engine)
    ask(queue, "a", "1")
    execution = await engine.begun()
    usage = text_response("done", final=True, tokens=5)
    execution.answer(replace(usage, usage=Usage(prompt_tokens=7, completion_tokens=5)))
    execution.end()
    await settle()
    ask(queue, "a", *"234567")
    await settle()
    assert engine.asked == list("1234")
    await served(engine, 6, tokens=5)


async def test_batches_have_a_full_one_ready(start: Start) -> None:
    queue = start(dynamic(4), None, tenants())
    instance = queue.employ()
    ask(queue, "a", *map(str, range(20)))
    first = await instance.begun()
    ask(queue, "b", "x", "y")
    finish(first)
    second = await instance.begun()
    finish(second)
    third = await instance.begun()
    assert (len(asked(first)), len(asked(second)), len(asked(third))) == (4, 4, 4)
    assert asked(third)[:3] == ["8", "9", "x"], "nine rows were with the scheduler before"
    finish(third)
    while len(instance.asked) < 22:
        finish(await instance.begun())
    await settle()


async def test_rows_fill_the_window_of_batches(start: Start) -> None:
    queue = start(dynamic(4), None, tenants())
    instance = queue.employ()
    for _ in range(6):
        queue.ask(wide("a", "w", rows=3))
    ask(queue, "b", "x")
    texts = []
    while len(texts) < 19:
        execution = await instance.begun()
        texts += asked(execution)
        for index in range(len(execution.requests)):
            execution.answer(text_response("done", final=True), index)
        execution.end()
    assert texts.index("x") == 12, "three requests have nine rows, and the fourth is older"
    await settle()


async def test_tokens_are_shared_by_weight(start: Start) -> None:
    queue = start(TEXT, None, tenants(a=TenantRules(weight=3.0), b=TenantRules()))
    instance = queue.employ()
    ask(queue, "a", *["a"] * 60)
    ask(queue, "b", *["b"] * 60)
    found = "".join(await served(instance, 44, tokens=10))
    assert found.count("a") == pytest.approx(33, abs=2)
    await served(instance, 76, tokens=10)


async def test_a_tenant_with_long_answers_is_served_less_often(queue: Queue) -> None:
    instance = queue.employ()
    ask(queue, "a", *["a"] * 40)
    ask(queue, "b", *["b"] * 40)
    found = ""
    for _ in range(40):
        execution = await instance.begun()
        text = text_of(execution)
        found += text
        answer(execution, tokens=30 if text == "a" else 10)
    assert found.count("b") == pytest.approx(30, abs=2)
    await served(instance, 40)


async def test_a_tenant_without_weight_is_served_while_no_other_waits(start: Start) -> None:
    queue = start(TEXT, None, tenants(a=TenantRules(), night=TenantRules(weight=0.0)))
    instance = queue.employ()
    ask(queue, "night", *"123")
    await settle()
    ask(queue, "a", *"xyz")
    assert await served(instance, 6) == ["1", "2", "x", "y", "z", "3"]


async def test_tenants_without_a_table_and_requests_without_a_tenant_have_shares(
    queue: Queue,
) -> None:
    instance = queue.employ()
    ask(queue, "a", *"1234")
    ask(queue, "unlisted", "x")
    ask(queue, "", "y")
    assert await served(instance, 6, tokens=10) == ["1", "2", "x", "y", "3", "4"]


# Order within a tenant.


async def test_requests_of_a_tenant_are_ordered_by_priority_and_then_by_arrival(
    queue: Queue,
) -> None:
    instance = queue.employ()
    ask(queue, "a", *"123")
    ask(queue, "a", "low", priority=9)
    ask(queue, "a", "high", "high too", priority=1)
    ask(queue, "b", "other")
    found = await served(instance, 7)
    assert found == ["1", "2", "high", "other", "high too", "low", "3"]


@pytest.mark.parametrize("config", [TEXT, LEVELS], ids=["plain", "levels"])
async def test_a_priority_is_at_most_the_highest_of_its_tenant(
    start: Start, config: object
) -> None:
    rules = tenants(a=TenantRules(highest_priority=2), b=TenantRules())
    queue = start(config, None, rules)  # type: ignore[arg-type]
    instance = queue.employ()
    ask(queue, "a", *"123", priority=2)
    ask(queue, "a", "capped", priority=1)
    ask(queue, "a", "low", priority=3)
    ask(queue, "a", "two", priority=2)
    found = await served(instance, 6)
    assert found[-3:] == ["capped", "two", "low"]
    assert {each.requests[0].priority for each in instance.executions} == {2, 3}


async def test_the_order_of_responses_is_that_of_release(start: Start) -> None:
    queue = start(dynamic(1, preserve_ordering=True), None, tenants())
    instance = queue.employ(concurrency=2)
    *_, last = ask(queue, "a", *"12345678")
    (quiet,) = ask(queue, "b", "x")
    order = []
    for name, entry in (("last", last), ("quiet", quiet)):
        entry.stream.listen(lambda name=name: order.append(name))  # type: ignore[misc]
    await served(instance, 9)
    await soon(read_all(last.stream))
    await soon(read_all(quiet.stream))
    assert order.index("quiet") < order.index("last")


# Requests that leave while they wait.


async def test_a_request_that_leaves_makes_room_at_once_and_costs_nothing(queue: Queue) -> None:
    instance = queue.employ()
    ask(queue, "a", *"12")
    third, fourth = ask(queue, "a", "3", "4")
    third.stream.cancel()
    assert queue.statistics.pending == 3
    assert sample(in_front(queue).families({}), "gateway_tenant_waiting", tenant="a") == 1
    assert [in_front(queue).waiting(tenant) for tenant in ("a", "unknown")] == [1, 0]
    assert await served(instance, 3) == ["1", "2", "4"]
    assert await soon(read_all(fourth.stream)) == ["done"]
    with pytest.raises(InferenceError) as caught:
        await soon(third.stream.only())
    assert caught.value.code is Code.CANCELLED


async def test_a_request_released_and_cancelled_before_its_execution_frees_its_place(
    queue: Queue,
) -> None:
    instance = queue.employ()
    _, ready = ask(queue, "a", "1", "2")
    ask(queue, "b", "x", "y")
    ready.stream.cancel()
    assert await served(instance, 3) == ["1", "x", "y"]


async def test_a_request_expires_in_front_as_in_its_queue(start: Start) -> None:
    policy = QueuePolicy(default_timeout_microseconds=LATE_US, allow_timeout_override=True)
    queue = start(dynamic(1, default_queue_policy=policy), None, tenants())
    instance = queue.employ()
    ask(queue, "a", "1", "2", "3", "4")
    (expiring,) = ask(queue, "b", "x", timeout_us=1000)
    (staying,) = ask(queue, "b", "y")
    with pytest.raises(InferenceError, match=QUEUE_TIMEOUT) as caught:
        await soon(read_all(expiring.stream))
    assert caught.value.code is Code.UNAVAILABLE
    assert len(await served(instance, 5)) == 5
    assert await soon(read_all(staying.stream)) == ["done"]


async def test_several_requests_of_a_tenant_expire_together(start: Start) -> None:
    policy = QueuePolicy(default_timeout_microseconds=1000)
    queue = start(dynamic(1, default_queue_policy=policy), None, tenants())
    entries = ask(queue, "a", *"12345")
    for entry in entries:
        with pytest.raises(InferenceError, match=QUEUE_TIMEOUT):
            await soon(read_all(entry.stream))


async def test_the_timeout_of_a_released_request_runs_from_its_arrival(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = QueuePolicy(default_timeout_microseconds=1_000_000)
    queue = start(dynamic(1, default_queue_policy=policy), None, tenants())
    instance = queue.employ()
    ask(queue, "a", *"123")
    first = await instance.begun()
    (late,) = ask(queue, "a", "4")
    now_ns = time.monotonic_ns
    monkeypatch.setattr(time, "monotonic_ns", lambda: now_ns() + 2_000_000_000)
    answer(first)
    with pytest.raises(InferenceError, match=QUEUE_TIMEOUT):
        await soon(read_all(late.stream))
    await settle()
    assert instance.asked == ["1"]


async def test_a_delayed_request_follows_the_others_of_its_tenant(start: Start) -> None:
    policy = QueuePolicy(
        default_timeout_microseconds=LATE_US,
        allow_timeout_override=True,
        timeout_action=TimeoutAction.DELAY,
    )
    queue = start(dynamic(1, default_queue_policy=policy), None, tenants())
    instance = queue.employ()
    ask(queue, "a", *"123")
    ask(queue, "a", "delayed", timeout_us=1)
    ask(queue, "a", *"45")
    await asyncio.sleep(0.005)
    assert await served(instance, 6) == ["1", "2", "3", "4", "5", "delayed"]


async def test_the_size_of_the_queue_counts_what_a_tenant_has_in_front_and_behind(
    start: Start,
) -> None:
    queue = start(dynamic(1, default_queue_policy=QueuePolicy(max_queue_size=6)), None, tenants())
    instance = queue.employ()
    await settle()
    ask(queue, "a", "executed")
    execution = await instance.begun()
    *_, last = ask(queue, "a", *"123456")
    with pytest.raises(InferenceError, match="Exceeds maximum queue size"):
        ask(queue, "a", "7")
    last.stream.cancel()
    ask(queue, "a", "8")
    ask(queue, "b", *"123456")
    for tenant in "ab":
        with pytest.raises(InferenceError, match="Exceeds maximum queue size"):
            ask(queue, tenant, "9")
    answer(execution)
    await served(instance, 12)


async def test_requests_of_others_behind_the_fair_queue_do_not_fill_the_queue(
    start: Start,
) -> None:
    """Two wait in the scheduler: as many as its own limit."""
    config = dynamic(4, default_queue_policy=QueuePolicy(max_queue_size=2))
    queue = start(config, None, tenants())
    instance = queue.employ()
    await settle()
    ask(queue, "a", "executed")
    execution = await instance.begun()
    ask(queue, "a", *"12")
    ask(queue, "b", "x")
    finish(execution)
    batch = await instance.begun()
    assert asked(batch) == ["1", "2", "x"]
    finish(batch)
    await settle()


async def test_a_request_that_an_idle_instance_takes_is_not_in_the_queue(start: Start) -> None:
    config = dynamic(1, default_queue_policy=QueuePolicy(max_queue_size=1))
    queue = start(config, None, tenants())
    instance = queue.employ()
    await settle()
    ask(queue, "a", *"12")
    with pytest.raises(InferenceError, match="Exceeds maximum queue size"):
        ask(queue, "a", "3")
    await served(instance, 2)


async def test_the_size_of_the_queue_is_that_of_a_level(start: Start) -> None:
    policies = {1: QueuePolicy(max_queue_size=3)}
    config = dynamic(1, priority_levels=2, default_priority_level=2, priority_queue_policy=policies)
    queue = start(config, None, tenants())
    ask(queue, "a", *"123", priority=2)
    ask(queue, "a", *"456", priority=1)
    with pytest.raises(InferenceError, match="Exceeds maximum queue size"):
        ask(queue, "a", "7", priority=1)
    ask(queue, "a", "8")
    ask(queue, "b", "9", priority=1)
    await served(queue.employ(), 8)
