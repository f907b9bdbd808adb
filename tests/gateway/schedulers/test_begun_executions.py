"""Single requests are executed at once and without a task, by instances that can."""

import asyncio
from dataclasses import dataclass, replace
from typing import Any

import pytest

from gateway.backend import NotSent, Reader
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest, Phases
from gateway.schedulers import dynamic as batcher
from gateway.schedulers.batching import TRY_EVERY
from gateway.schedulers.dynamic import ALONE
from tests.builders import TEXT, ScriptedInstance, read_all, settle, soon, text_response
from tests.conftest import tasks_left
from tests.gateway.conftest import Start
from tests.gateway.schedulers.dynamic_queues import BROKEN, refused
from tests.gateway.schedulers.every_scheduler import SLOW
from tests.gateway.schedulers.queues import Queue, asked, dynamic, finish

pytestmark = pytest.mark.both

CONFIGS = {"direct": TEXT, "dynamic": dynamic(8)}


@dataclass(slots=True, eq=False)
class Begun:
    """An execution without a task, as the test ends it."""

    request: InferRequest
    reader: Reader
    abandoned: int = 0

    def abandon(self) -> None:
        self.abandoned += 1

    def finish(self, text: str, phases: Phases | None = None) -> None:
        """Answer by the sink, for the last time, and end."""
        assert self.request.sink is not None
        response = replace(text_response(text, final=True), phases=phases)
        self.request.sink.put(response)
        self.reader.over(None)


class PromptInstance(ScriptedInstance):
    """Begins each request, answers `at_once`, or raises `refusal` instead."""

    def __init__(self, concurrency: int | None = 1) -> None:
        super().__init__(concurrency)
        self.singles = self
        self.accepted = True
        self.all_begun: list[Begun] = []
        self.at_once: InferenceError | None = None
        self.refusal: Exception | None = None

    def accepts(self, request: InferRequest) -> bool:
        return self.accepted

    def begin(self, request: InferRequest, reader: Reader) -> Begun:
        if self.refusal is not None:
            raise self.refusal
        begun = Begun(request, reader)
        self.all_begun.append(begun)
        if self.at_once is not None:
            reader.take(self.at_once)
            reader.over(None)
        return begun


@pytest.fixture(params=CONFIGS)
async def queue(
    request: pytest.FixtureRequest, start: Start, monkeypatch: pytest.MonkeyPatch
) -> Queue:
    monkeypatch.setattr(batcher, "ALONE", 0)
    return start(CONFIGS[request.param])


async def prompt(queue: Queue) -> PromptInstance:
    """A new instance of a queue that runs."""
    instance = PromptInstance()
    queue.add(instance)
    await settle()
    return instance


async def test_a_request_is_begun_and_answered_as_it_is_submitted(queue: Queue) -> None:
    instance, before = await prompt(queue), set(tasks_left())
    (entry,) = queue.submit("a")
    (begun,) = instance.all_begun
    assert [each.progress_ns > 0 for each in queue.scheduler.executions] == [True]
    begun.finish("b")
    assert entry.stream.done
    assert list(queue.scheduler.executions) == []
    queue.submit("c")
    instance.all_begun[1].finish("d")
    assert set(tasks_left()) == before
    assert queue.statistics.execution_count == 2
    assert queue.statistics.batches[1].compute_infer.count == 2


async def test_the_phases_of_an_answer_by_the_sink_are_counted(queue: Queue) -> None:
    instance = await prompt(queue)
    queue.submit("a")
    instance.all_begun[0].finish("a", Phases(input_ns=1, infer_ns=2, output_ns=3))
    found = queue.statistics.batches[1]
    assert (found.compute_input.ns, found.compute_output.ns) == (1, 3)


async def test_many_requests_that_fail_as_they_begin(queue: Queue) -> None:
    queue_of_many = queue.submit(*map(str, range(1000)))
    instance = PromptInstance()
    instance.at_once = BROKEN
    queue.add(instance)
    await settle()
    if len(instance.executions):
        for _ in range(1000 // 8):
            (await instance.begun()).crash(BROKEN)
    for entry in queue_of_many:
        assert await refused(entry) is BROKEN


async def test_an_error_of_its_start_is_that_of_the_request(queue: Queue) -> None:
    instance = await prompt(queue)
    instance.refusal = BROKEN
    (entry,) = queue.submit("a")
    assert await refused(entry) is BROKEN
    instance.refusal = None
    queue.submit("b")
    instance.all_begun[0].finish("b")


async def test_a_disconnect_abandons_it_once_and_the_instance_stays_busy(queue: Queue) -> None:
    instance = await prompt(queue)
    (entry,) = queue.submit("a")
    (begun,) = instance.all_begun
    entry.stream.cancel()
    entry.stream.cancel()
    (other,) = queue.submit("b")
    await settle()
    assert begun.abandoned == len(instance.all_begun) == 1
    begun.reader.over(None)
    instance.all_begun[1].finish("b")
    assert await soon(read_all(other.stream)) == ["b"]


async def test_a_reader_that_disconnects_as_its_request_begins(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance = await prompt(queue)
    begin = instance.begin

    def begin_and_disconnect(request: InferRequest, reader: Reader) -> Begun:
        stream: Any = request.cancellation
        begun = begin(request, reader)
        stream.cancel()
        return begun

    monkeypatch.setattr(instance, "begin", begin_and_disconnect)
    queue.submit("a")
    (begun,) = instance.all_begun
    assert begun.abandoned == 1
    begun.reader.over(None)


async def test_a_request_that_was_not_sent_is_executed_by_another_instance(queue: Queue) -> None:
    instance = await prompt(queue)
    (entry,) = queue.submit("a")
    instance.die("gone")
    instance.all_begun[0].reader.over(NotSent(Code.UNAVAILABLE, "gone"))
    queue.scheduler.remove(instance, BROKEN)
    other = await prompt(queue)
    other.all_begun[0].finish("a")
    assert await soon(read_all(entry.stream)) == ["a"]
    assert queue.statistics.execution_count == 1


async def test_the_end_of_the_scheduler_cancels_tasks_before_it_waits(queue: Queue) -> None:
    instance = await prompt(queue)
    other = await prompt(queue)
    other.accepted = False
    entries = queue.submit("a")
    await settle()
    entries += queue.submit("b")
    execution = await other.begun()
    queue.task.cancel()
    await soon(execution.stopped.wait())
    (begun,) = instance.all_begun
    assert begun.abandoned == 1
    for entry in entries:
        assert (await refused(entry)).code is Code.UNAVAILABLE
    assert not queue.task.done()
    begun.reader.over(None)
    await soon(asyncio.wait([queue.task]))


@pytest.mark.parametrize("died", [True, False])
async def test_a_removal_waits_for_its_end(queue: Queue, died: bool) -> None:
    instance = await prompt(queue)
    (entry,) = queue.submit("a")
    (begun,) = instance.all_begun
    removed = asyncio.ensure_future(queue.scheduler.remove(instance, BROKEN if died else None))
    await settle()
    assert not removed.done()
    assert begun.abandoned == died
    if died:
        begun.reader.over(None)
        assert await refused(entry) is BROKEN
    else:
        begun.finish("a")
    await soon(removed)


async def test_an_error_of_a_listener_leaves_no_execution(queue: Queue) -> None:
    instance = await prompt(queue)
    (entry,) = queue.submit("a")
    entry.stream.listen(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    with pytest.raises(ZeroDivisionError):
        instance.all_begun[0].reader.over(BROKEN)
    assert list(queue.scheduler.executions) == []
    queue.submit("b")
    instance.all_begun[1].finish("b")


# The dynamic batcher.


async def after_lone_ones(start: Start, count: int = ALONE) -> tuple[Queue, PromptInstance]:
    """A batcher that has had batches of one request."""
    queue = start(dynamic(8))
    instance = await prompt(queue)
    for _ in range(count):
        queue.submit("-")
        finish(await instance.begun())
        await settle()
    assert instance.all_begun == []
    return queue, instance


async def test_a_request_is_begun_once_many_have_come_alone(start: Start) -> None:
    queue, instance = await after_lone_ones(start, ALONE - 1)
    queue.submit("a")
    finish(await instance.begun())
    await settle()
    queue.submit("b")
    instance.all_begun[0].finish("b")
    queue.submit("c")
    instance.all_begun[1].finish("c")


async def test_requests_of_one_turn_are_a_batch_again_after_the_first_that_is_not(
    start: Start,
) -> None:
    queue, instance = await after_lone_ones(start)
    queue.submit("a", "b", "c")
    await settle()
    assert (len(instance.all_begun), len(instance.executions)) == (1, ALONE)
    instance.all_begun[0].finish("a")
    finish(await instance.begun())
    await settle()
    for texts in (["d", "e", "f"], ["g"], ["h", "i"]):
        queue.submit(*texts)
        batch = await instance.begun()
        assert asked(batch) == texts
        finish(batch)
        await settle()
    assert len(instance.all_begun) == 1


@pytest.mark.parametrize("has_task", [True, False])
async def test_a_request_is_not_alone_while_another_instance_executes(
    start: Start, has_task: bool
) -> None:
    queue, instance = await after_lone_ones(start)
    other = PromptInstance()
    queue.add(other)
    instance.accepted = not has_task
    queue.submit("a")
    await settle()
    queue.submit("b")
    finish(await other.begun())
    assert (len(instance.all_begun), other.all_begun) == (0 if has_task else 1, [])
    if has_task:
        finish(await instance.begun())
    else:
        instance.all_begun[0].finish("a")


async def test_a_batch_waits_now_and_then_for_others(start: Start) -> None:
    queue, instance = await after_lone_ones(start)
    for number in range(TRY_EVERY - 1 - ALONE):
        queue.submit("a")
        instance.all_begun[number].finish("a")
    queue.submit("b")
    queue.submit("c")
    batch = await instance.begun()
    assert asked(batch) == ["b", "c"]
    finish(batch)


async def beginning(
    start: Start, monkeypatch: pytest.MonkeyPatch, **fields: object
) -> tuple[Queue, PromptInstance]:
    """A batcher that expects the first request to come alone."""
    monkeypatch.setattr(batcher, "ALONE", 0)
    queue = start(dynamic(8, **fields))
    return queue, await prompt(queue)


async def test_a_request_with_a_deadline_needs_a_task_once_it_is_queued(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, instance = await beginning(start, monkeypatch, default_queue_policy=SLOW)
    queue.submit("a")
    queue.submit("b")
    (begun,) = instance.all_begun
    begun.finish("a")
    finish(await instance.begun())
    assert len(instance.all_begun) == 1


async def test_a_request_that_was_begun_and_not_received_is_queued_in_its_place(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, instance = await beginning(start, monkeypatch, default_queue_policy=SLOW)
    queue.submit("a", "b")
    instance.die("gone")
    instance.all_begun[0].reader.over(NotSent(Code.UNAVAILABLE, "gone"))
    queue.scheduler.remove(instance, BROKEN)
    other = await prompt(queue)
    batch = await other.begun()
    assert asked(batch) == ["a", "b"]
    finish(batch)


@pytest.mark.parametrize(
    "fields", [{"max_queue_delay_microseconds": 1}, {"preserve_ordering": True}], ids=str
)
async def test_delays_and_orders_need_a_task(
    start: Start, monkeypatch: pytest.MonkeyPatch, fields: dict[str, object]
) -> None:
    queue, instance = await beginning(start, monkeypatch, **fields)
    queue.submit("a")
    assert instance.all_begun == []
    finish(await instance.begun())
