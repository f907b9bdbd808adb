"""The sequence batcher when clients disconnect, and when instances end."""

import asyncio
from dataclasses import replace

import pytest

from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError
from gateway.stream import DEFAULT_LIMIT
from tests.builders import (
    DECOUPLED,
    settle,
    soon,
    text_response,
)
from tests.gateway.conftest import Start
from tests.gateway.schedulers.queues import finish, word
from tests.gateway.sequences.parts import (
    BROKEN,
    HOUR_US,
    SOON_US,
    answer,
    ask,
    direct,
    oldest,
    part,
    refusal,
    rows,
)

# Disconnects.


async def test_with_a_queued_request_all_that_its_sequence_has_queued_behind_is_cancelled(
    start: Start, config: ModelConfig
) -> None:
    queue = start(config)
    instance = queue.employ()
    executing = ask(queue, 1, "a", "start")
    execution = await instance.begun()
    queued = [ask(queue, 1, "b"), ask(queue, 1, "c")]
    neighbour = ask(queue, 2, "d", "start end")
    queued[0].stream.cancel()
    assert await refusal(queued[1]) == (Code.CANCELLED, "Request was cancelled")
    assert queue.statistics.failures["CANCELED"] == 2  # type: ignore[index]  # by its value
    with pytest.raises(InferenceError, match="must specify the START flag"):
        ask(queue, 1, "e")
    finish(execution)
    assert await answer(executing) == ["a"]
    finish(await instance.begun())
    assert await answer(neighbour) == ["d"]


@pytest.mark.parametrize("executing", [True, False])
async def test_requests_before_a_cancelled_one_are_executed(
    start: Start, config: ModelConfig, executing: bool
) -> None:
    queue = start(config)
    instance = queue.employ()
    if executing:
        ask(queue, 1, "first", "start")
        execution = await instance.begun()
    before, gone, behind = [ask(queue, 1, text, "start") for text in "abc"]
    gone.stream.cancel()
    assert await refusal(behind) == (Code.CANCELLED, "Request was cancelled")
    with pytest.raises(InferenceError, match="must specify the START flag"):
        ask(queue, 1, "d")
    if executing:
        finish(execution)
    finish(await instance.begun())
    assert await answer(before) == ["a"]
    assert instance.asked[-1] == "a"


async def test_a_sequence_cancelled_in_its_slot_makes_room(
    start: Start, config: ModelConfig
) -> None:
    queue = start(replace(config, max_batch_size=1))
    only = ask(queue, 1, "a", "start")
    others = [ask(queue, number, str(number), "start end") for number in range(2, 7)]
    only.stream.cancel()
    instance = queue.employ()
    for each in others:
        finish(await instance.begun())
        await answer(each)
    assert instance.asked == ["2", "3", "4", "5", "6"]


async def test_a_sequence_cancelled_before_its_task_runs_makes_room(
    start: Start, config: ModelConfig
) -> None:
    queue = start(replace(config, max_batch_size=1))
    instance = queue.employ()
    await settle()
    only = ask(queue, 1, "a", "start")
    only.stream.cancel()
    other = ask(queue, 2, "b", "start end")
    finish(await instance.begun())
    assert await answer(other) == ["b"]
    assert instance.asked == ["b"]


async def test_a_sequence_cancelled_in_the_backlog_is_forgotten(start: Start) -> None:
    queue = start(direct(slots=1))
    instance = queue.employ()
    ask(queue, 1, "a", "start")
    gone = [ask(queue, 2, "b", "start"), ask(queue, 2, "c")]
    other = ask(queue, 3, "d", "start end")
    gone[1].stream.cancel()
    assert await refusal(gone[0]) == (Code.CANCELLED, "Request was cancelled")
    finish(await instance.begun())
    ask(queue, 1, "end", "end")
    finish(await instance.begun())
    finish(await instance.begun())
    assert await answer(other) == ["d"]
    assert instance.asked == ["a", "end", "d"]


async def test_a_disconnect_during_an_execution_does_not_end_the_sequence(
    start: Start, config: ModelConfig
) -> None:
    queue = start(config)
    instance = queue.employ()
    gone, neighbour = ask(queue, 1, "a", "start"), ask(queue, 2, "b", "start")
    execution = await instance.begun()
    gone.stream.cancel()
    await settle()
    assert not execution.stopped.is_set()
    finish(execution)
    assert await answer(neighbour) == ["b"]
    following = ask(queue, 1, "c", "end")
    finish(await instance.begun())
    assert await answer(following) == ["c"]


async def test_an_execution_without_readers_stops_despite_padding_rows(
    start: Start,
) -> None:
    queue = start(direct())
    instance = queue.employ()
    for number in (1, 2):
        ask(queue, number, "start", "start")
    finish(await instance.begun())
    await settle()
    gone = ask(queue, 2, "a")
    execution = await instance.begun()
    assert rows(execution) == ["-", "a"]
    gone.stream.cancel()
    await soon(execution.stopped.wait())
    following = ask(queue, 2, "b")
    finish(await instance.begun())
    assert await answer(following) == ["b"]


# Instances that come and go.


async def test_sequences_that_have_begun_fail_with_their_instance(
    start: Start, config: ModelConfig
) -> None:
    queue = start(replace(config, max_batch_size=2))
    dead = queue.employ()
    executing = ask(queue, 1, "a", "start")
    queued = ask(queue, 1, "b")
    execution = await dead.begun()
    unbegun = ask(queue, 2, "c", "start end")
    queue.scheduler.remove(dead, BROKEN)
    assert [await refusal(each) for each in (executing, queued)] == [
        (Code.UNAVAILABLE, "broken")
    ] * 2
    await soon(execution.stopped.wait())
    with pytest.raises(InferenceError, match="must specify the START flag"):
        ask(queue, 1, "d")
    replacement = queue.employ()
    finish(await replacement.begun())
    assert await answer(unbegun) == ["c"]
    assert (dead.asked, replacement.asked) == (["a"], ["c"])


async def test_the_last_request_of_a_sequence_fails_with_its_dead_instance(
    start: Start, config: ModelConfig
) -> None:
    queue = start(config)
    dead = queue.employ()
    first = ask(queue, 1, "a", "start")
    finish(await dead.begun())
    assert await answer(first) == ["a"]
    other = ask(queue, 2, "b", "start end")
    await dead.begun()
    last = ask(queue, 1, "c", "end")
    queue.scheduler.remove(dead, BROKEN)
    assert await refusal(last) == (Code.UNAVAILABLE, "broken")
    assert await refusal(other) == (Code.UNAVAILABLE, "broken")


async def test_an_instance_is_withdrawn_after_its_sequences(
    start: Start, config: ModelConfig
) -> None:
    queue = start(replace(config, max_batch_size=2))
    leaving = queue.employ()
    ask(queue, 1, "a", "start")
    finish(await leaving.begun())
    await settle()
    withdrawn = asyncio.ensure_future(queue.scheduler.remove(leaving))
    staying = queue.employ()
    other = ask(queue, 2, "b", "start end")
    finish(await staying.begun())
    assert await answer(other) == ["b"]
    last = ask(queue, 1, "c", "end")
    await settle()
    assert not withdrawn.done()
    finish(await leaving.begun())
    assert await answer(last) == ["c"]
    await soon(withdrawn)
    assert (leaving.asked, staying.asked) == (["a", "c"], ["b"])


async def test_an_instance_is_withdrawn_when_its_last_queued_request_is_cancelled(
    start: Start,
) -> None:
    queue = start(oldest(max_queue_delay_microseconds=HOUR_US, preferred_batch_size=(2,)))
    leaving = queue.employ()
    for text in ("a", "b"):
        ask(queue, ord(text), text, "start")
    finish(await leaving.begun())
    await settle()
    ask(queue, ord("a"), "never executed", "end").stream.cancel()
    last = ask(queue, ord("b"), "neither", "end")
    withdrawn = asyncio.ensure_future(queue.scheduler.remove(leaving))
    await settle()
    assert not withdrawn.done()
    last.stream.cancel()
    await soon(withdrawn)


async def test_only_requests_of_open_sequences_continue(start: Start, config: ModelConfig) -> None:
    queue = start(config)
    instance = queue.employ()
    await soon(queue.sequences.ended())
    for number in (1, 2):
        ask(queue, number, str(number), "start")
    goes_on = queue.sequences.continues
    assert [goes_on(part(1, "x")), goes_on(part(1, "x", "end"))] == [True, True]
    assert not any(goes_on(each) for each in (part(1, "x", "start"), part(3, "x"), word("x")))
    ended = asyncio.create_task(queue.sequences.ended())
    finish(await instance.begun())
    ask(queue, 1, "a", "end")
    finish(await instance.begun())
    await settle()
    assert (goes_on(part(1, "x")), ended.done()) == (False, False)
    ask(queue, 2, "b", "end")
    await soon(ended)
    finish(await instance.begun())
    await settle()


async def test_an_idle_sequence_has_ended(start: Start, config: ModelConfig) -> None:
    batching = config.sequence_batching
    assert batching is not None
    soon_idle = replace(batching, max_sequence_idle_microseconds=SOON_US)
    queue = start(replace(config, sequence_batching=soon_idle))
    instance = queue.employ()
    ask(queue, 1, "a", "start")
    finish(await instance.begun())
    await soon(queue.sequences.ended())
    assert not queue.sequences.continues(part(1, "b"))


async def test_a_decoupled_model_answers_in_order_without_waiting_for_itself(start: Start) -> None:
    config = replace(oldest(preserve_ordering=True), model_transaction_policy=DECOUPLED)
    queue = start(config)
    instance = queue.employ()
    first, second = ask(queue, 1, "a", "start end"), ask(queue, 2, "b", "start end")
    execution = await instance.begun()
    assert len(execution.requests) == 1
    for _ in range(2 * DEFAULT_LIMIT):
        execution.answer(text_response("part"))
    execution.finish("last")
    assert len(await answer(first)) == 2 * DEFAULT_LIMIT + 1
    finish(await instance.begun())
    assert await answer(second) == ["b"]
