"""Sequences in a fair queue: they begin in turn, and then are served at once."""

import asyncio
import time

import pytest

from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError
from gateway.observability.statistics import SEQUENCE_TIMEOUT
from gateway.schedulers.execution import Entry
from tests.builders import read_all, settle, soon
from tests.gateway.conftest import Start
from tests.gateway.schedulers.fair_queues import answer, in_front, of, sample, served, tenants
from tests.gateway.schedulers.queues import Queue, finish
from tests.gateway.sequences.parts import HOUR_US, direct, oldest, part, rows

CONFIGS = {"direct": direct(slots=1), "oldest": oldest(candidates=1, max_batch_size=1)}


@pytest.fixture(params=CONFIGS)
def config(request: pytest.FixtureRequest) -> ModelConfig:
    """One sequence at a time has the slot; the window has three requests."""
    return CONFIGS[request.param]


@pytest.fixture
async def queue(start: Start, config: ModelConfig) -> Queue:
    return start(config, None, tenants())


def ask(queue: Queue, tenant: str, number: int, text: str, flags: str = "", **more: int) -> Entry:
    """Submit a request of a sequence."""
    return queue.ask(of(tenant, part(number, text, flags, **more)))


def fill(queue: Queue) -> None:
    """Fill the window, and what waits in front of it, with sequences of one request of `a`."""
    for number in range(1, 7):
        ask(queue, "a", number, str(number), "start end")


async def test_a_sequence_begins_in_its_turn_and_its_requests_stay_together(queue: Queue) -> None:
    instance = queue.employ()
    await settle()
    fill(queue)
    for text, flags in (("x", "start"), ("y", ""), ("z", "end")):
        ask(queue, "b", 1, text, flags)
    found = await served(instance, 9)
    assert found == [*"1234", *"xyz", *"56"]


async def test_a_sequence_that_has_begun_passes_the_full_window(queue: Queue) -> None:
    """Those in the window wait for its slot: it must not wait for them."""
    instance = queue.employ()
    ask(queue, "b", 1, "x", "start")
    assert await served(instance, 1) == ["x"]
    await settle()
    fill(queue)
    ask(queue, "b", 1, "y")
    assert await served(instance, 1) == ["y"]
    ask(queue, "b", 1, "z", "end")
    assert await served(instance, 7) == ["z", *"123456"]


@pytest.mark.parametrize("flags", ["", "end"])
async def test_a_request_continues_a_sequence_that_waits(queue: Queue, flags: str) -> None:
    fill(queue)
    with pytest.raises(InferenceError, match="must specify the START flag"):
        ask(queue, "b", 1, "y", flags)
    ask(queue, "b", 1, "x", "start")
    ask(queue, "b", 1, "y", flags)
    if flags:
        with pytest.raises(InferenceError, match="must specify the START flag"):
            ask(queue, "b", 1, "z")
        ask(queue, "b", 1, "again", "start")
    ask(queue, "b", 1, "z", "end")
    await served(queue.employ(), 10 if flags else 9)


async def test_a_cancelled_sequence_that_has_not_begun_leaves_as_a_whole(queue: Queue) -> None:
    fill(queue)
    first, second, third = [
        ask(queue, "b", 1, text, flags) for text, flags in (("x", "start"), ("y", ""), ("z", "end"))
    ]
    second.stream.cancel()
    for entry in (first, third):
        with pytest.raises(InferenceError) as caught:
            await soon(read_all(entry.stream))
        assert caught.value.code is Code.CANCELLED
    with pytest.raises(InferenceError, match="must specify the START flag"):
        ask(queue, "b", 1, "w")
    assert sample(in_front(queue).families({}), "gateway_tenant_in_flight", tenant="a") == 6
    assert await served(queue.employ(), 6) == list("123456")


async def test_a_sequence_expires_in_front_as_in_the_backlog(queue: Queue) -> None:
    fill(queue)
    entries = [
        ask(queue, "b", 1, "x", "start", timeout_us=1000),
        ask(queue, "b", 1, "y", "end"),
    ]
    for entry in entries:
        with pytest.raises(InferenceError, match=SEQUENCE_TIMEOUT):
            await soon(read_all(entry.stream))
    assert await served(queue.employ(), 6) == list("123456")


async def test_the_timeout_in_the_backlog_runs_from_the_arrival(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance = queue.employ()
    ask(queue, "b", 1, "holds", "start")
    first = await instance.begun()
    for number in (1, 2):
        ask(queue, "a", number, str(number), "start end")
    late = ask(queue, "a", 7, "late", "start end", timeout_us=HOUR_US)
    now_ns = time.monotonic_ns
    monkeypatch.setattr(time, "monotonic_ns", lambda: now_ns() + 2 * 1000 * HOUR_US)
    answer(first)
    with pytest.raises(InferenceError, match=SEQUENCE_TIMEOUT):
        await soon(read_all(late.stream))
    ask(queue, "b", 1, "y", "end")
    await served(instance, 3)


async def test_the_drain_waits_for_sequences_in_front(queue: Queue) -> None:
    fill(queue)
    ask(queue, "b", 1, "x", "start")
    assert queue.sequences.are_open
    ended = asyncio.ensure_future(queue.sequences.ended())
    await settle()
    assert not ended.done()
    instance = queue.employ()
    assert await served(instance, 3) == ["1", "2", "x"]
    await settle()
    assert not ended.done()
    assert queue.sequences.continues(of("b", part(1, "y")))
    ask(queue, "b", 1, "y", "end")
    assert await served(instance, 5) == ["y", *"3456"]
    await soon(ended)
    assert not queue.sequences.are_open


@pytest.mark.parametrize("is_open", [True, False], ids=["begun", "waits"])
@pytest.mark.parametrize("wide", [direct(slots=4), oldest(candidates=4)], ids=["direct", "oldest"])
async def test_a_long_sequence_leaves_the_other_slots_to_others(
    start: Start, wide: ModelConfig, is_open: bool
) -> None:
    """It has more requests than the window of nine."""
    queue = start(wide, None, tenants())
    instance = queue.employ()
    ask(queue, "a", 1, "first", "start")
    if is_open:
        finish(await instance.begun())
        await settle()
    else:
        for number in range(2, 10):
            ask(queue, "a", number, str(number), "start end")
        ask(queue, "a", 10, "waits", "start")
    long = 1 if is_open else 10
    for _ in range(40):
        ask(queue, "a", long, "long")
    ask(queue, "b", 1, "x", "start")
    found: list[list[str]] = []
    while not found or "x" not in found[-1]:
        execution = await instance.begun()
        found.append(rows(execution))
        finish(execution)
    assert len(found) <= (2 if is_open else 5)
    ask(queue, "b", 1, "y", "end")
    while sum(each.count("long") for each in found) < 40:
        execution = await instance.begun()
        found.append(rows(execution))
        finish(execution)
    await settle()
