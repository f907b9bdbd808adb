"""The sequence batcher with iterative sequences and implicit states."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from gateway.backend import Note
from gateway.config import ModelConfig
from gateway.config.data_type import DataType
from gateway.config.scheduling import State
from gateway.errors import Code, InferenceError
from gateway.messages import InferResponse, RequestedOutput, SequenceTag
from gateway.tensor import text_tensor
from tests.builders import (
    DECOUPLED,
    Execution,
    StoppableInstance,
    settle,
    soon,
    text_response,
    texts,
)
from tests.gateway.conftest import Start
from tests.gateway.schedulers.queues import finish, word
from tests.gateway.sequences.parts import (
    BROKEN,
    CONTROLS,
    SOON_US,
    answer,
    ask,
    direct,
    oldest,
    refusal,
    rows,
    told,
)

NO_ID = SequenceTag(0)


KEPT = State(
    input_name="kept_in", output_name="kept_out", data_type=DataType.TYPE_STRING, dims=(1,)
)


GROWING = replace(KEPT, dims=(-1,))


# Iterative sequences.


async def test_a_request_may_be_executed_again_and_again(start: Start) -> None:
    config = direct(iterative_sequence=True, control_input=CONTROLS)
    queue = start(replace(config, model_transaction_policy=DECOUPLED))
    instance = queue.employ()
    entry = queue.ask(word("a", sequence=NO_ID))
    for text in ("one", "two"):
        execution = await instance.begun()
        assert told(execution, 0) == [text == "one", 0.0, True, 1]
        execution.answer(text_response(text))
        execution.steps.put_nowait((0, Note.RESCHEDULED))
        execution.end()
    execution = await instance.begun()
    assert told(execution, 0) == [0, 0.0, True, 1]
    execution.finish("three")
    assert await answer(entry) == ["one", "two", "three"]
    statistics = queue.statistics
    assert (statistics.success.count, statistics.execution_count) == (1, 3)


async def test_a_sequence_that_is_not_executed_again_ends(start: Start) -> None:
    queue = start(direct(slots=1, iterative_sequence=True))
    instance = queue.employ()
    entry = ask(queue, 5, "a", "start")
    finish(await instance.begun())
    assert await answer(entry) == ["a"]
    with pytest.raises(InferenceError, match="sequence 5 to model 'text' must specify the START"):
        ask(queue, 5, "b")
    following = queue.ask(word("c", sequence=NO_ID))
    finish(await instance.begun())
    assert await answer(following) == ["c"]


@pytest.mark.parametrize("strategy", [direct, oldest])
async def test_a_sequence_is_not_idle_between_and_during_its_rounds(
    start: Start, strategy: Callable[..., ModelConfig]
) -> None:
    queue = start(strategy(iterative_sequence=True, max_sequence_idle_microseconds=SOON_US))
    instance = queue.employ()
    entry = ask(queue, 5, "a", "start")
    for _ in range(2):
        execution = await instance.begun()
        await asyncio.sleep(3 * SOON_US / 1e6)
        execution.steps.put_nowait((0, Note.RESCHEDULED))
        execution.end()
    finish(await instance.begun())
    assert await answer(entry) == ["a"]
    with pytest.raises(InferenceError, match="must specify the START flag"):
        ask(queue, 5, "b")


async def test_a_client_may_disconnect_between_two_rounds(start: Start) -> None:
    queue = start(direct(slots=1, iterative_sequence=True))
    instance = queue.employ()
    entry, other = queue.ask(word("a", sequence=NO_ID)), queue.ask(word("b", sequence=NO_ID))
    execution = await instance.begun()
    execution.steps.put_nowait((0, Note.RESCHEDULED))
    await settle()
    entry.stream.cancel()
    execution.end()
    finish(await instance.begun())
    assert await answer(other) == ["b"]
    assert instance.asked == ["a", "b"]


async def test_a_stopped_request_is_not_executed_again(start: Start) -> None:
    queue = start(direct(slots=1, iterative_sequence=True))
    instance = StoppableInstance(concurrency=1)
    queue.add(instance)
    entry, other = queue.ask(word("a", sequence=NO_ID)), queue.ask(word("b", sequence=NO_ID))
    execution = await instance.begun()
    entry.stream.stop()
    execution.steps.put_nowait((0, Note.RESCHEDULED))
    execution.end()
    assert (await refusal(entry))[0] is Code.CANCELLED
    finish(await instance.begun())
    assert await answer(other) == ["b"]
    assert instance.asked == ["a", "b"]


async def test_rounds_of_iterative_sequences_keep_no_order(start: Start) -> None:
    queue = start(oldest(max_batch_size=1, iterative_sequence=True, preserve_ordering=True))
    instance = queue.employ()
    first, second = queue.ask(word("a", sequence=NO_ID)), queue.ask(word("b", sequence=NO_ID))
    execution = await instance.begun()
    execution.steps.put_nowait((0, Note.RESCHEDULED))
    execution.end()
    finish(await instance.begun())
    assert await answer(second) == ["b"]
    finish(await instance.begun())
    assert await answer(first) == ["a"]


async def test_only_iterative_sequences_are_executed_again(
    start: Start, config: ModelConfig
) -> None:
    queue = start(config)
    instance = queue.employ()
    entry = ask(queue, 1, "a", "start")
    execution = await instance.begun()
    execution.steps.put_nowait((0, Note.RESCHEDULED))
    execution.end()
    code, message = await refusal(entry)
    assert code is Code.INTERNAL
    assert "not configured to handle such a flag" in message


# ImplicitStates.


def keeping(text: str, kept: str, shape: tuple[int, int] = (1, 1)) -> InferResponse:
    state = replace(text_tensor("kept_out", [kept]), shape=shape)
    state = replace(state, data=(kept.encode(),) * shape[1])
    response = text_response(text, final=True)
    return replace(response, outputs=(*response.outputs, state))


def kept(execution: Execution, row: int = 0) -> list[str]:
    tensor = execution.requests[row].input("kept_in")
    assert tensor is not None
    return [each.decode() for each in tensor.elements()]


async def test_a_state_in_the_response_is_an_input_of_the_next_request(
    start: Start,
) -> None:
    queue = start(direct(state=(KEPT,)))
    instance = queue.employ()
    seen = []
    for text, flags in (("a", "start"), ("b", ""), ("c", "start"), ("d", "end")):
        entry = ask(queue, 1, text, flags)
        execution = await instance.begun()
        seen.append(kept(execution))
        execution.answer(keeping(text, f"after {text}"))
        execution.end()
        assert await answer(entry) == [text]
    assert seen == [[""], ["after a"], [""], ["after c"]]


async def test_a_failed_request_does_not_change_the_state(
    start: Start, config: ModelConfig
) -> None:
    batching = config.sequence_batching
    assert batching is not None
    queue = start(replace(config, sequence_batching=replace(batching, state=(KEPT,))))
    instance = queue.employ()
    ask(queue, 1, "a", "start")
    execution = await instance.begun()
    execution.answer(keeping("a", "kept"))
    execution.end()
    failed = ask(queue, 1, "b")
    (await instance.begun()).crash(BROKEN)
    await refusal(failed)
    ask(queue, 1, "c")
    execution = await instance.begun()
    assert kept(execution) == ["kept"]
    execution.end()
    await settle()


async def test_a_state_is_stored_after_the_client_disconnects(
    start: Start, config: ModelConfig
) -> None:
    batching = config.sequence_batching
    assert batching is not None
    queue = start(replace(config, sequence_batching=replace(batching, state=(KEPT,))))
    instance = queue.employ()
    gone = ask(queue, 1, "a", "start")
    execution = await instance.begun()
    gone.stream.cancel()
    following = ask(queue, 1, "b", "end")
    await settle()
    execution.answer(keeping("a", "kept"))
    execution.end()
    execution = await instance.begun()
    assert kept(execution) == ["kept"]
    execution.answer(keeping("b", "unused"))
    execution.end()
    assert await answer(following) == ["b"]


async def test_an_execution_with_states_stops_when_its_instance_dies(
    start: Start, config: ModelConfig
) -> None:
    batching = config.sequence_batching
    assert batching is not None
    queue = start(replace(config, sequence_batching=replace(batching, state=(KEPT,))))
    dead = queue.employ()
    entry = ask(queue, 1, "a", "start")
    execution = await dead.begun()
    queue.scheduler.remove(dead, BROKEN)
    assert await refusal(entry) == (Code.UNAVAILABLE, "broken")
    await soon(execution.stopped.wait())


async def test_states_of_other_shapes_share_no_execution(start: Start, config: ModelConfig) -> None:
    batching = config.sequence_batching
    assert batching is not None
    queue = start(replace(config, sequence_batching=replace(batching, state=(GROWING,))))
    instance = queue.employ()
    for number in (1, 2):
        ask(queue, number, "start", "start")
    execution = await instance.begun()
    execution.answer(keeping("1", "x", shape=(1, 3)), 0)
    execution.answer(keeping("2", "y"), 1)
    execution.end()
    await settle()
    for number in (1, 2):
        ask(queue, number, str(number))
    execution = await instance.begun()
    assert [each for each in rows(execution) if each != "-"] == ["1"]
    assert kept(execution) == ["x", "x", "x"]
    finish(execution)
    execution = await instance.begun()
    assert [each for each in rows(execution) if each != "-"] == ["2"]
    assert kept(execution) == ["y"]
    finish(execution)
    await settle()


async def test_a_state_is_shown_if_it_is_an_output_and_asked_for(start: Start) -> None:
    config = direct(state=(KEPT,))
    shown = replace(config.output[0], name="kept_out")
    queue = start(replace(config, output=(*config.output, shown)))
    instance = queue.employ()
    seen = []
    for wanted in ((), ("text_output", "kept_out"), ("text_output",)):
        entry = ask(queue, 1, "a", "start", outputs=tuple(map(RequestedOutput, wanted)))
        execution = await instance.begun()
        asked = [each.name for each in execution.requests[0].outputs]
        assert not wanted or "kept_out" in asked
        execution.answer(keeping("text", "state"))
        execution.end()
        responses = [response async for response in entry.stream]
        seen.append(texts(responses))
    assert seen == [["textstate"], ["textstate"], ["text"]]


async def test_requests_wait_for_the_first_instance(start: Start, config: ModelConfig) -> None:
    queue = start(config)
    entries = [ask(queue, 1, "a", "start"), ask(queue, 1, "b", "end")]
    await settle()
    instance = queue.employ()
    finish(await instance.begun())
    finish(await instance.begun())
    assert [await answer(each) for each in entries] == [["a"], ["b"]]
