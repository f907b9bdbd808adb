"""The limit that queued requests have waited for, as their receipts have it."""

import asyncio
import time
from dataclasses import replace

import pytest

from gateway.backend import NotSent
from gateway.config import ModelConfig
from gateway.errors import Code
from gateway.observability.receipt import Receipt
from gateway.observability.receipt_parts import Bound
from gateway.schedulers.execution import Entry
from gateway.schedulers.rate_limiter import ExecutionLimiter
from tests.builders import TEXT, settle
from tests.gateway.conftest import Start
from tests.gateway.schedulers.queues import Queue, dynamic, finish, word
from tests.gateway.schedulers.test_rate_limiter import group

LONG_SECS = 0.03
"""A wait that is the longer part of the whole wait."""
DELAYED = dynamic(8, preferred_batch_size=(4,), max_queue_delay_microseconds=20_000)

every_config = pytest.mark.parametrize(
    "config", [TEXT, dynamic(8), DELAYED], ids=["direct", "dynamic", "delayed"]
)


def ask(queue: Queue, text: str = "a") -> Entry:
    """Submit a request with a receipt."""
    now_ns = time.perf_counter_ns()
    receipt = Receipt(now_ns, now_ns)
    entry = queue.ask(replace(word(text), receipt=receipt))
    receipt.accepted(entry.request, "1", entry.record)
    return entry


def bound(entry: Entry) -> Bound:
    """The limit for which an executed request has waited."""
    receipt, record = entry.request.receipt, entry.record
    assert isinstance(receipt, Receipt)
    assert receipt.batch is not None
    return receipt.batch.hold.over(record.submitted_ns, record.started_ns)


@every_config
async def test_a_request_that_waits_for_a_busy_instance_waited_for_instances(
    start: Start, config: ModelConfig
) -> None:
    queue = start(config)
    instance = queue.employ()
    queue.submit("first")
    first = await instance.begun()
    entry = ask(queue)
    await asyncio.sleep(LONG_SECS)
    finish(first)
    finish(await instance.begun())
    assert bound(entry) is Bound.INSTANCES
    await settle()


async def test_a_request_that_waits_while_an_instance_is_free_waited_for_the_delay(
    start: Start,
) -> None:
    queue = start(DELAYED)
    instance = queue.employ()
    for _ in range(2):  # the hold of the first batch is not that of the second one
        entry = ask(queue)
        finish(await instance.begun())
        assert bound(entry) is Bound.DELAY
        await settle()


async def test_the_hold_of_a_batch_ends_with_it(start: Start) -> None:
    queue = start(DELAYED)
    instance = queue.employ()
    held = ask(queue)
    execution = await instance.begun()
    busy = [ask(queue, text) for text in "bcde"]
    await asyncio.sleep(LONG_SECS)
    finish(execution)
    finish(await instance.begun())
    assert bound(held) is Bound.DELAY
    assert {bound(each) for each in busy} == {Bound.INSTANCES}
    await settle()


async def test_a_cancelled_request_leaves_no_hold(start: Start) -> None:
    queue = start(DELAYED)
    instance = queue.employ()
    await settle()
    ask(queue).stream.cancel()
    await asyncio.sleep(LONG_SECS)
    began_ns = time.perf_counter_ns()
    entry = ask(queue)
    finish(await instance.begun())
    receipt = entry.request.receipt
    assert isinstance(receipt, Receipt)
    assert receipt.batch is not None
    assert receipt.batch.hold.since_ns >= began_ns
    await settle()


@pytest.mark.parametrize("config", [TEXT, dynamic(1)], ids=["direct", "dynamic"])
async def test_a_request_without_resources_waited_for_its_turn(
    start: Start, config: ModelConfig
) -> None:
    limiter = ExecutionLimiter()
    queues = [start(config, limiter) for _ in range(2)]
    instances = [queue.employ(resources=group()) for queue in queues]
    queues[0].submit("first")
    first = await instances[0].begun()
    of_same, of_other = ask(queues[0]), ask(queues[1])
    await asyncio.sleep(LONG_SECS)
    finish(first)
    for instance in reversed(instances):
        finish(await instance.begun())
    assert bound(of_other) is Bound.TURN
    assert bound(of_same) is Bound.INSTANCES
    await settle()


async def test_a_request_that_is_queued_again_has_nothing_of_the_batch_before(start: Start) -> None:
    queue = start(dynamic(8))
    instance = queue.employ()
    queue.submit("first")
    first = await instance.begun()
    entry, other = ask(queue), ask(queue)
    finish(first)
    both = await instance.begun()
    receipt = entry.request.receipt
    assert isinstance(receipt, Receipt)
    assert receipt.batch is not None
    assert (receipt.batch.requests, entry.record.execution_rows) == (2, 2)
    other.stream.cancel()
    both.crash(NotSent(Code.UNAVAILABLE, "gone"))
    finish(await instance.begun())
    await settle()
    assert (receipt.batch.requests, entry.record.execution_rows) == (1, 0)
