"""The dynamic batcher at work: shared executions, disconnects, and refusals."""

import asyncio
import gc
import random
import time
import weakref
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from gateway.backend import Answer, Instance, Note, NotSent
from gateway.config import ModelInput
from gateway.config.data_type import DataType
from gateway.config.scheduling import QueuePolicy, TimeoutAction
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest, InferResponse
from gateway.observability.statistics import FailureReason
from gateway.schedulers.execution import Entry
from gateway.stream import ResponseStream
from gateway.tensor import Datatype, Tensor, array_tensor
from tests.builders import DECOUPLED, ScriptedInstance, read_all, settle, soon, text_response
from tests.gateway.conftest import Start
from tests.gateway.schedulers.queues import (
    MS,
    TOKENS,
    Queue,
    asked,
    dynamic,
    finish,
    lengths,
    sentence,
    word,
)

BROKEN = InferenceError(Code.INTERNAL, "broken")


def policy(**fields: object) -> QueuePolicy:
    return replace(QueuePolicy(), **fields)  # type: ignore[arg-type]


async def refused(entry: Entry) -> InferenceError:
    with pytest.raises(InferenceError) as caught:
        await soon(read_all(entry.stream))
    return caught.value


async def drain(instance: ScriptedInstance, count: int) -> list[str]:
    """Answer `count` executions, and return the text of each."""
    found = []
    for _ in range(count):
        execution = await instance.begun()
        found.append("".join(asked(execution)))
        finish(execution)
    await settle()
    return found


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


# Refusals.


async def test_a_full_queue_refuses_at_once_and_counts_nothing(start: Start) -> None:
    """The text is a real Triton's; its statistics show no failure either."""
    queue = start(dynamic(1, default_queue_policy=policy(max_queue_size=2)))
    instance = queue.employ()
    queue.submit("-")
    first = await instance.begun()
    queue.submit("a", "b")
    with pytest.raises(InferenceError) as caught:
        queue.ask(word("c", id="r2"))
    assert caught.value.code is Code.UNAVAILABLE
    assert caught.value.message == "[request id: r2] Exceeds maximum queue size"
    finish(first)
    assert await drain(instance, 2) == ["a", "b"]
    assert queue.statistics.fail.count == 0


async def test_requests_about_to_execute_do_not_count_in_the_queue_limit(start: Start) -> None:
    queue = start(dynamic(1, default_queue_policy=policy(max_queue_size=1)))
    instances = [queue.employ() for _ in range(2)]
    await settle()
    queue.submit("a", "b", "c")
    with pytest.raises(InferenceError, match="Exceeds maximum queue size"):
        queue.submit("d")
    executions = [await instance.begun() for instance in instances]
    for each in executions:
        finish(each)
    assert await drain(instances[0], 1) == ["c"]


async def test_a_timeout_is_answered_when_it_ends_although_the_instance_is_busy(
    start: Start,
) -> None:
    """The text and the reason are a real Triton's, which answers up to half a second later."""
    limits = policy(default_timeout_microseconds=2000)
    queue = start(dynamic(1, default_queue_policy=limits))
    instance = queue.employ()
    queue.submit("-")
    first = await instance.begun()
    began_ns = time.monotonic_ns()
    (late,) = queue.submit("a")
    error = await refused(late)
    assert time.monotonic_ns() - began_ns >= 2 * MS
    assert (error.code, error.message) == (Code.UNAVAILABLE, "Request timeout expired")
    assert queue.statistics.failures[FailureReason.REJECTED] == 1
    finish(first)
    await settle()
    assert instance.asked == ["-"]


async def test_a_request_may_shorten_its_timeout(start: Start) -> None:
    limits = policy(default_timeout_microseconds=60_000_000, allow_timeout_override=True)
    queue = start(dynamic(1, default_queue_policy=limits))
    patient = queue.ask(word("a"))
    hurried = queue.ask(word("b", timeout_us=1000))
    assert (await refused(hurried)).message == "Request timeout expired"
    assert await drain(queue.employ(), 1) == ["a"]
    assert await soon(read_all(patient.stream)) == ["a"]


async def test_an_executing_request_does_not_time_out(start: Start) -> None:
    queue = start(dynamic(1, default_queue_policy=policy(default_timeout_microseconds=200_000)))
    instance = queue.employ()
    (slow,) = queue.submit("slow")
    execution = await instance.begun()
    (late,) = queue.submit("late")
    await refused(late)
    finish(execution)
    assert await soon(read_all(slow.stream)) == ["slow"]


async def test_a_delaying_timeout_lets_later_requests_execute_first(start: Start) -> None:
    """As a real Triton: the delayed one comes last, and is served."""
    limits = policy(
        timeout_action=TimeoutAction.DELAY,
        default_timeout_microseconds=60_000_000,
        allow_timeout_override=True,
    )
    queue = start(dynamic(1, default_queue_policy=limits))
    queue.ask(word("a", timeout_us=1))
    queue.ask(word("b"))
    queue.ask(word("c"))
    until_ns = time.monotonic_ns() + 1000
    while time.monotonic_ns() <= until_ns:
        pass
    assert await drain(queue.employ(), 3) == ["b", "c", "a"]


# In which order do responses leave?


async def test_responses_are_sent_in_the_order_of_their_requests(start: Start) -> None:
    queue = start(dynamic(1, preserve_ordering=True))
    first, second = queue.employ(), queue.employ()
    await settle()
    entries = queue.submit("a", "b")
    executions = [await first.begun(), await second.begun()]
    finish(executions[1])
    reader = asyncio.create_task(read_all(entries[1].stream))
    await settle()
    assert not reader.done()
    finish(executions[0])
    assert await soon(read_all(entries[0].stream)) == ["a"]
    assert await soon(reader) == ["b"]


@pytest.mark.parametrize("leaves", ["cancelled", "failed", "abandoned"])
async def test_responses_do_not_wait_for_a_cancelled_request(start: Start, leaves: str) -> None:
    queue = start(dynamic(1, preserve_ordering=True))
    first, second = queue.employ(), queue.employ()
    await settle()
    entries = queue.submit("a", "b")
    executions = [await first.begun(), await second.begun()]
    finish(executions[1])
    if leaves == "cancelled":
        entries[0].stream.cancel()
    elif leaves == "failed":
        executions[0].crash(BROKEN)
    else:
        entries[0].stream.abandon(BROKEN)
    assert await soon(read_all(entries[1].stream)) == ["b"]


async def test_a_cached_response_waits_for_earlier_requests(start: Start) -> None:
    queue = start(dynamic(1, preserve_ordering=True))
    instance = queue.employ()
    (executed,) = queue.submit("a")
    execution = await instance.begun()
    cached = ResponseStream()
    cached.put(text_response("cached", final=True))
    assert queue.scheduler.order is not None
    queue.scheduler.order.answered(cached)
    reader = asyncio.create_task(read_all(cached))
    await settle()
    assert not reader.done()
    finish(execution)
    assert await soon(read_all(executed.stream)) == ["a"]
    assert await soon(reader) == ["cached"]


async def test_a_decoupled_model_answers_in_order_without_waiting_for_itself(start: Start) -> None:
    config = replace(dynamic(8, preserve_ordering=True), model_transaction_policy=DECOUPLED)
    queue = start(config)
    instances = [queue.employ() for _ in range(2)]
    await settle()
    entries = queue.submit("a", "b")
    executions = [await instance.begun() for instance in instances]
    assert [asked(each) for each in executions] == [["a"], ["b"]]
    for _ in range(100):
        executions[1].answer(text_response("b"))
    executions[1].end()
    await settle()
    assert executions[1].taken == 64
    finish(executions[0])
    assert await soon(read_all(entries[0].stream)) == ["a"]
    assert await soon(read_all(entries[1].stream)) == ["b"] * 100


async def test_a_request_is_not_delayed_behind_requests_that_wait_for_it(start: Start) -> None:
    slow = policy(
        default_timeout_microseconds=60_000_000,
        allow_timeout_override=True,
        timeout_action=TimeoutAction.DELAY,
    )
    config = dynamic(8, preserve_ordering=True, default_queue_policy=slow)
    queue = start(replace(config, model_transaction_policy=DECOUPLED))
    delayed = queue.ask(word("a", timeout_us=1))
    until_ns = time.monotonic_ns() + 1000
    while time.monotonic_ns() <= until_ns:
        pass
    (entry,) = queue.submit("b")
    instance = queue.employ()
    for text, each in (("a", delayed), ("b", entry)):
        execution = await instance.begun()
        assert asked(execution) == [text]
        for _ in range(100):
            execution.answer(text_response(text))
        execution.end()
        assert await soon(read_all(each.stream)) == [text] * 100


# Batches by length.


async def test_requests_of_near_lengths_share_a_batch_within_the_budget(start: Start) -> None:
    queue = start(TOKENS)
    instance = queue.employ()
    await settle()
    for length in (10, 48, 11, 500, 50):
        queue.ask(sentence(length))
    found = []
    for _ in range(3):
        execution = await instance.begun()
        found.append(sorted(lengths(execution)))
        finish(execution)
    assert found == [[10, 11], [48, 50], [500]]
    await settle()


async def test_padded_inputs_of_unequal_lengths_are_refused_and_others_served(
    start: Start,
) -> None:
    queue = start(TOKENS)
    with pytest.raises(InferenceError, match="must have the same length"):
        queue.ask(sentence(4, mask=5))
    entry = queue.ask(sentence(4))
    finish(await queue.employ().begun())
    assert await soon(read_all(entry.stream)) == ["4"]


# Random events.


class Echo(Instance):
    """Answers each request with its text after a few turns of the loop; keeps sizes."""

    def __init__(self, choice: random.Random) -> None:
        self.sizes: list[int] = []
        self._choice = choice

    async def execute(self, requests: Sequence[InferRequest]) -> AsyncGenerator[Answer, None]:
        self.sizes.append(sum(request.inputs[0].shape[0] for request in requests))
        for _ in range(self._choice.randint(0, 3)):
            await asyncio.sleep(0)
        for index, request in enumerate(requests):
            yield index, InferResponse(outputs=request.inputs, final=True)

    async def close(self) -> None:
        """Nothing is held."""


CONFIGS = {
    "plain": dynamic(4),
    "delayed": dynamic(4, preferred_batch_size=(2, 4), max_queue_delay_microseconds=300),
    "in order": dynamic(4, preserve_ordering=True),
    "with levels": dynamic(4, priority_levels=3, default_priority_level=2),
    "limited": dynamic(4, default_queue_policy=policy(max_queue_size=3)),
    "timed": dynamic(4, default_queue_policy=policy(default_timeout_microseconds=200)),
    "by length": replace(
        TOKENS,
        max_batch_size=4,
        input=(ModelInput(name="text_input", data_type=DataType.TYPE_STRING, dims=(-1,)),),
        parameters={"padded_inputs": '{"text_input": 0}', "batch_token_budget": "8"},
    ),
}


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("seed", range(3))
async def test_every_request_gets_its_own_response_once_or_an_error(
    start: Start, kind: str, seed: int
) -> None:
    choice = random.Random(seed)
    queue = start(CONFIGS[kind])
    instances = [Echo(choice) for _ in range(2)]
    for instance in instances:
        queue.scheduler.add(instance)
    outcomes = await soon(
        asyncio.gather(*(_client(queue, choice, f"{number}") for number in range(40)))
    )
    answered = sum(each.count("answered") for each in outcomes)
    assert 0 < answered <= queue.statistics.success.count
    assert queue.statistics.inference_count <= sum(sum(each.sizes) for each in instances)
    assert all(size <= 4 for each in instances for size in each.sizes)
    assert kind in ("limited", "timed") or all("refused" not in each for each in outcomes)


async def _client(queue: Queue, choice: random.Random, name: str) -> list[str]:
    outcomes = []
    for number in range(10):
        text = f"{name}/{number}"
        try:
            entry = queue.ask(word(text, choice.randint(1, 4), priority=choice.randint(0, 4)))
            with entry.stream:
                for _ in range(choice.choice([0, 0, 1, 2])):
                    await asyncio.sleep(0)
                if choice.random() < 0.2:
                    outcomes.append("left")
                    entry.stream.cancel()
                else:
                    assert await read_all(entry.stream) == [text]
                    outcomes.append("answered")
        except InferenceError as error:
            assert error.code is Code.UNAVAILABLE  # noqa: PT017 - the text depends on the kind
            outcomes.append("refused")
            await asyncio.sleep(0)
    return outcomes


async def test_a_request_that_was_answered_is_not_kept_until_its_timeout(start: Start) -> None:
    queue = start(dynamic(4, default_queue_policy=policy(default_timeout_microseconds=60_000_000)))
    queue.scheduler.add(Echo(random.Random(0)))
    data = np.zeros((1, 1), np.int8)
    alive = weakref.ref(data)
    entry = queue.ask(InferRequest(model="text", inputs=(array_tensor("x", Datatype.INT8, data),)))
    del data
    gc.disable()
    try:
        await soon(entry.stream.only())
        del entry
        await settle()
        assert alive() is None
    finally:
        gc.enable()
