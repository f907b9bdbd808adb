"""Limits, timeouts and order of the dynamic batcher."""

import asyncio
import random
import time
import weakref
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from gateway.backend import Answer, Instance
from gateway.config import ModelInput
from gateway.config.data_type import DataType
from gateway.config.scheduling import TimeoutAction
from gateway.errors import Code, InferenceError, Refusal, RefusalReason
from gateway.messages import InferRequest, InferResponse
from gateway.observability.statistics import FailureReason
from gateway.schedulers.dynamic import WAITING_NS
from gateway.stream import ResponseStream
from gateway.tensor import Datatype, array_tensor
from tests.builders import DECOUPLED, read_all, settle, soon, text_response, uncollected
from tests.gateway.conftest import Start
from tests.gateway.schedulers.dynamic_queues import BROKEN, drain, policy, refused
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

# Refusals.


async def test_a_full_queue_refuses_at_once_and_counts_nothing(start: Start) -> None:
    """The text is a real Triton's; its statistics show no failure either."""
    queue = start(dynamic(1, default_queue_policy=policy(max_queue_size=2)))
    instance = queue.employ()
    queue.submit("-")
    first = await instance.begun()
    queue.submit("a", "b")
    with pytest.raises(Refusal) as caught:
        queue.ask(word("c", id="r2"))
    assert caught.value.code is Code.UNAVAILABLE
    assert caught.value.message == "[request id: r2] Exceeds maximum queue size"
    assert caught.value.refusal_reason is RefusalReason.OVERLOADED
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
    limits = policy(default_timeout_microseconds=60_000_000, allow_timeout_override=True)
    queue = start(dynamic(1, default_queue_policy=limits))
    instance = queue.employ()
    queue.submit("-")
    first = await instance.begun()
    began_ns = time.monotonic_ns()
    late = queue.ask(word("a", timeout_us=2000))
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
    with uncollected():
        await soon(entry.stream.only())
        del entry
        await settle()
        assert alive() is None


async def test_a_removed_instance_is_not_kept_by_a_task_that_waits(start: Start) -> None:
    queue = start(dynamic(4))
    instance = Echo(random.Random(0))
    alive = weakref.ref(instance)
    queue.scheduler.add(instance)
    with uncollected():
        await read_all(queue.ask(word("a")).stream)
        await queue.scheduler.remove(instance)
        del instance
        await settle()
        assert alive() is None


async def test_a_task_that_waits_ends_soon(start: Start) -> None:
    queue = start(dynamic(4))
    queue.scheduler.add(Echo(random.Random(0)))

    def tasks() -> int:
        return sum("_serve" in repr(each.get_coro()) for each in asyncio.all_tasks())

    for _ in range(2):
        await read_all(queue.ask(word("a")).stream)
        assert tasks() == 1
        for _ in range(30):  # three times as long; a pause of this process lengthens one step
            await asyncio.sleep(WAITING_NS / 1e10)
        assert tasks() == 0
