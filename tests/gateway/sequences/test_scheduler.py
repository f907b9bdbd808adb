"""The sequence batcher at work."""

from dataclasses import replace

import pytest

from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError
from tests.builders import (
    settle,
    text_response,
)
from tests.gateway.conftest import Start
from tests.gateway.schedulers.queues import finish, word
from tests.gateway.sequences.parts import (
    BROKEN,
    CONTROLS,
    answer,
    ask,
    direct,
    oldest,
    part,
    refusal,
    rows,
    told,
)

# One after the other.


async def test_requests_of_a_sequence_execute_one_after_the_other(
    start: Start, config: ModelConfig
) -> None:
    queue = start(config)
    instance = queue.employ()
    entries = [ask(queue, 1, "a", "start"), ask(queue, 1, "b"), ask(queue, 1, "c", "end")]
    for text, entry in zip("abc", entries, strict=True):
        execution = await instance.begun()
        assert rows(execution) == [text]
        await settle()
        assert len(instance.executions) == "abc".index(text) + 1
        finish(execution)
        assert await answer(entry) == [text]


async def test_requests_of_different_sequences_execute_together(
    start: Start, config: ModelConfig
) -> None:
    queue = start(config)
    instance = queue.employ()
    entries = [ask(queue, number, str(number), "start") for number in range(1, 6)]
    execution = await instance.begun()
    assert rows(execution) == ["1", "2", "3", "4"]
    finish(execution)
    assert [await answer(each) for each in entries[:4]] == [["1"], ["2"], ["3"], ["4"]]
    ask(queue, 2, "end", "end")
    while "5" not in instance.asked:
        finish(await instance.begun())
    assert await answer(entries[4]) == ["5"]


async def test_a_sequence_stays_on_its_instance(start: Start, config: ModelConfig) -> None:
    queue = start(config)
    instances = [queue.employ() for _ in range(2)]
    for number in (1, 2):
        ask(queue, number, f"start {number}", "start")
    executions = [await instance.begun() for instance in instances]
    assert [rows(each) for each in executions] == [["start 1"], ["start 2"]]
    ask(queue, 1, "second")
    ask(queue, 2, "last", "end")
    finish(executions[1])
    execution = await instances[1].begun()
    assert rows(execution) == ["last"]
    finish(execution)
    await settle()
    assert len(instances[1].executions) == 2
    finish(executions[0])
    finish(await instances[0].begun())
    await settle()
    assert instances[0].asked == ["start 1", "second"]


async def test_a_sequence_begins_on_an_instance_that_is_free(
    start: Start, config: ModelConfig
) -> None:
    queue = start(replace(config, max_batch_size=1))
    busy, free = queue.employ(), queue.employ()
    first = ask(queue, 1, "a", "start end")
    execution = await busy.begun()
    second = ask(queue, 2, "b", "start end")
    finish(await free.begun())
    assert await answer(second) == ["b"]
    finish(execution)
    assert await answer(first) == ["a"]
    assert (busy.asked, free.asked) == (["a"], ["b"])


async def test_sequences_that_arrive_together_begin_on_different_instances(
    start: Start,
) -> None:
    queue = start(oldest(candidates=1, max_batch_size=1))
    instances = [queue.employ(), queue.employ()]
    await settle()
    entries = [ask(queue, number, str(number), "start end") for number in (1, 2)]
    for instance, entry in zip(instances, entries, strict=True):
        finish(await instance.begun())
        assert await answer(entry) == instance.asked


async def test_an_id_as_a_number_and_as_a_string_are_two_sequences(start: Start) -> None:
    queue = start(direct())
    instance = queue.employ()
    ask(queue, 1, "number", "start")
    ask(queue, "1", "string", "start")
    execution = await instance.begun()
    assert rows(execution) == ["number", "string"]
    finish(execution)
    await settle()


async def test_a_second_start_continues_in_the_same_slot(
    start: Start, config: ModelConfig, caplog: pytest.LogCaptureFixture
) -> None:
    queue = start(config)
    instance = queue.employ()
    first = ask(queue, 1, "a", "start")
    finish(await instance.begun())
    assert await answer(first) == ["a"]
    second = ask(queue, 1, "b", "start")
    execution = await instance.begun()
    assert rows(execution) == ["b"]
    finish(execution)
    assert await answer(second) == ["b"]
    assert (
        "sequence 1 for model 'text' has a conflict. The previous sequence did not end before this "
        "sequence start. Previous sequence will be terminated early." in caplog.text
    )


async def test_a_sequence_without_start_is_refused_and_others_continue(
    start: Start, config: ModelConfig
) -> None:
    queue = start(config)
    instance = queue.employ()
    ask(queue, 1, "a", "start")
    with pytest.raises(InferenceError, match="sequence 2 to model 'text' must specify the START"):
        ask(queue, 2, "b")
    finish(await instance.begun())
    last = ask(queue, 1, "c", "end")
    finish(await instance.begun())
    assert await answer(last) == ["c"]
    with pytest.raises(InferenceError, match="sequence 1 to model 'text' must specify the START"):
        ask(queue, 1, "after its end")


async def test_a_failed_request_does_not_end_its_sequence(
    start: Start, config: ModelConfig
) -> None:
    queue = start(config)
    instance = queue.employ()
    first = ask(queue, 1, "a", "start")
    (await instance.begun()).crash(BROKEN)
    assert await refusal(first) == (Code.UNAVAILABLE, "broken")
    second = ask(queue, 1, "b")
    finish(await instance.begun())
    assert await answer(second) == ["b"]


# Inputs of the model.


async def test_control_inputs_contain_the_flags_of_a_request(start: Start) -> None:
    queue = start(direct(control_input=CONTROLS))
    instance = queue.employ()
    for text, flags in (("a", "start"), ("b", ""), ("c", "end")):
        ask(queue, 7, text, flags)
    found = []
    for _ in range(3):
        execution = await instance.begun()
        found.append(told(execution, 0))
        finish(execution)
    assert found == [[1, 0.0, True, 7], [0, 0.0, True, 7], [0, 1.0, True, 7]]
    ask(queue, 8, "alone", "start end")
    execution = await instance.begun()
    assert told(execution, 0) == [1, 1.0, True, 8]
    assert [each.shape for each in execution.requests[0].inputs] == [(1, 1)] * 5
    finish(execution)
    await settle()


async def test_an_empty_slot_has_a_padding_row(start: Start) -> None:
    queue = start(direct(control_input=CONTROLS))
    instance = queue.employ()
    for number in (1, 2, 3):
        ask(queue, number, "start", "start")
    finish(await instance.begun())
    await settle()
    before = queue.statistics.inference_count
    entries = [ask(queue, 3, "third"), ask(queue, 1, "first")]
    execution = await instance.begun()
    assert rows(execution) == ["first", "-", "third"]
    assert told(execution, 1) == [0, 0.0, False, 0]
    finish(execution)
    assert [await answer(each) for each in entries] == [["third"], ["first"]]
    await settle()
    assert queue.statistics.inference_count == before + 2
    assert {size: each.compute_infer.count for size, each in queue.statistics.batches.items()} == {
        3: 2
    }


async def test_rows_beyond_the_last_ready_one_are_omitted(start: Start) -> None:
    queue = start(direct())
    instance = queue.employ()
    for number in (1, 2, 3):
        ask(queue, number, "start", "start")
    finish(await instance.begun())
    await settle()
    ask(queue, 2, "second")
    execution = await instance.begun()
    assert rows(execution) == ["-", "second"]
    finish(execution)
    await settle()


async def test_a_request_of_another_shape_waits_for_the_next_execution(start: Start) -> None:
    config = direct()
    variable = replace(config, input=(replace(config.input[0], dims=(-1,)),))
    queue = start(variable)
    instance = queue.employ()
    queue.ask(part(1, "one", "start"))
    queue.ask(replace(part(2, "wide", "start"), inputs=word("wide", width=2).inputs))
    queue.ask(part(3, "three", "start"))
    execution = await instance.begun()
    assert rows(execution) == ["one", "-", "three"]
    finish(execution)
    execution = await instance.begun()
    assert rows(execution) == ["-", "wide"]
    finish(execution)
    await settle()


async def test_an_error_of_a_padding_row_is_ignored(start: Start) -> None:
    queue = start(direct())
    instance = queue.employ()
    for number in (1, 2):
        ask(queue, number, "start", "start")
    finish(await instance.begun())
    await settle()
    entry = ask(queue, 2, "second")
    execution = await instance.begun()
    execution.answer(BROKEN, 0)
    execution.answer(text_response("answered", final=True), 1)
    execution.end()
    assert await answer(entry) == ["answered"]
