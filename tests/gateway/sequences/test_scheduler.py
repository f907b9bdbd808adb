import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import pytest

from gateway.backend import Note
from gateway.config import ModelConfig
from gateway.config.data_type import DataType
from gateway.config.scheduling import Control, ControlInput, ControlKind, State
from gateway.errors import Code, InferenceError
from gateway.messages import InferResponse, RequestedOutput, SequenceTag
from gateway.schedulers.execution import Entry
from gateway.stream import DEFAULT_LIMIT
from gateway.tensor import text_tensor
from tests.builders import (
    DECOUPLED,
    WAIT_SECS,
    Execution,
    StoppableInstance,
    read_all,
    settle,
    soon,
    text_response,
    texts,
)
from tests.gateway.conftest import Start
from tests.gateway.schedulers.queues import Queue, finish, word
from tests.gateway.sequences.parts import (
    HOUR_US,
    ask,
    control,
    direct,
    oldest,
    part,
    rows,
)

NO_ID = SequenceTag(0)
BROKEN = InferenceError(Code.UNAVAILABLE, "broken")
SOON_US = 30_000
EITHER = {"direct": direct(), "oldest": oldest()}

CONTROLS = (
    ControlInput(
        name="START",
        control=(Control(kind=ControlKind.CONTROL_SEQUENCE_START, int32_false_true=(0, 1)),),
    ),
    ControlInput(
        name="END",
        control=(Control(kind=ControlKind.CONTROL_SEQUENCE_END, fp32_false_true=(0.0, 1.0)),),
    ),
    ControlInput(
        name="READY",
        control=(Control(kind=ControlKind.CONTROL_SEQUENCE_READY, bool_false_true=(False, True)),),
    ),
    ControlInput(
        name="ID",
        control=(
            Control(kind=ControlKind.CONTROL_SEQUENCE_CORRID, data_type=DataType.TYPE_UINT64),
        ),
    ),
)
KEPT = State(
    input_name="kept_in", output_name="kept_out", data_type=DataType.TYPE_STRING, dims=(1,)
)
GROWING = replace(KEPT, dims=(-1,))


@pytest.fixture(params=EITHER)
def config(request: pytest.FixtureRequest) -> ModelConfig:
    return EITHER[request.param]


async def answer(entry: Entry) -> list[str]:
    return await soon(read_all(entry.stream))


async def refusal(entry: Entry) -> tuple[Code, str]:
    with pytest.raises(InferenceError) as caught:
        await answer(entry)
    return caught.value.code, caught.value.message


async def forgotten(queue: Queue, sequence: int) -> None:
    """Wait until a sequence takes no more requests."""
    async with asyncio.timeout(WAIT_SECS):
        with suppress(InferenceError):
            while True:
                queue.scheduler.admit(part(sequence, "again"))
                await asyncio.sleep(0)


def told(execution: Execution, row: int) -> list[object]:
    request = execution.requests[row]
    return [control(request, name) for name in ("START", "END", "READY", "ID")]


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


# When is a batch due?


async def test_a_direct_batch_waits_until_enough_slots_are_ready(start: Start) -> None:
    queue = start(direct(delay_us=60_000_000, utilization=0.75))
    instance = queue.employ()
    for number in (1, 2):
        ask(queue, number, str(number), "start")
    await settle()
    assert instance.executions == []
    ask(queue, 3, "3", "start")
    execution = await instance.begun()
    assert rows(execution) == ["1", "2", "3"]
    finish(execution)
    await settle()


async def test_a_direct_batch_waits_no_longer_than_its_delay(start: Start) -> None:
    queue = start(direct(delay_us=SOON_US, utilization=1.0))
    instance = queue.employ()
    ask(queue, 1, "alone", "start")
    await settle()
    assert instance.executions == []
    execution = await instance.begun()
    assert rows(execution) == ["alone"]
    finish(execution)
    await settle()


async def test_the_oldest_strategy_forms_batches_as_the_dynamic_batcher(start: Start) -> None:
    queue = start(oldest(preferred_batch_size=(2,), max_queue_delay_microseconds=60_000_000))
    instance = queue.employ()
    ask(queue, 1, "1", "start")
    ask(queue, 1, "behind")
    await settle()
    assert instance.executions == []
    ask(queue, 2, "2", "start")
    execution = await instance.begun()
    assert rows(execution) == ["1", "2"]
    finish(execution)
    await settle()
    assert len(instance.executions) == 1
    ask(queue, 3, "3", "start")
    execution = await instance.begun()
    assert rows(execution) == ["behind", "3"]
    finish(execution)
    await settle()


async def test_the_oldest_strategy_keeps_the_order_if_it_is_asked_to(start: Start) -> None:
    queue = start(oldest(max_batch_size=1, preserve_ordering=True))
    instance = queue.employ(concurrency=2)
    first, second = ask(queue, 1, "1", "start"), ask(queue, 2, "2", "start")
    executions = [await instance.begun() for _ in range(2)]
    finish(executions[1])
    reading = asyncio.create_task(read_all(second.stream))
    await settle()
    assert not reading.done()
    finish(executions[0])
    assert await answer(first) == ["1"]
    assert await soon(reading) == ["2"]
    third = ask(queue, 2, "3", "end")
    finish(await instance.begun())
    assert await answer(third) == ["3"]


async def test_an_instance_freed_early_takes_the_next_request_of_a_sequence(
    start: Start, config: ModelConfig
) -> None:
    queue = start(config)
    instance = queue.employ()
    first, second = ask(queue, 1, "a", "start"), ask(queue, 1, "b")
    one = await instance.begun()
    one.answer(text_response("more follows"))
    one.steps.put_nowait((0, Note.FREED))
    two = await instance.begun()
    assert rows(two) == ["b"]
    finish(two)
    assert await answer(second) == ["b"]
    one.finish("late")
    assert await answer(first) == ["more follows", "late"]


async def test_responses_wait_for_an_execution_freed_early(
    start: Start,
) -> None:
    queue = start(oldest(max_batch_size=1, preserve_ordering=True))
    instance = queue.employ()
    first, second = ask(queue, 1, "a", "start end"), ask(queue, 2, "b", "start end")
    one = await instance.begun()
    one.steps.put_nowait((0, Note.FREED))
    finish(await instance.begun())
    reading = asyncio.create_task(read_all(second.stream))
    await settle()
    assert not reading.done()
    finish(one)
    assert await answer(first) == ["a"]
    assert await soon(reading) == ["b"]


# Slots and backlog.


async def test_a_sequence_in_the_backlog_begins_when_another_ends(start: Start) -> None:
    queue = start(direct(slots=1))
    instance = queue.employ()
    ask(queue, 1, "a", "start")
    waiting = [ask(queue, 2, "b", "start"), ask(queue, 2, "c")]
    later = ask(queue, 3, "d", "start end")
    finish(await instance.begun())
    await settle()
    assert instance.asked == ["a"]
    ask(queue, 1, "end", "end")
    for text in ("end", "b", "c"):
        execution = await instance.begun()
        assert rows(execution) == [text]
        finish(execution)
    assert [await answer(each) for each in waiting] == [["b"], ["c"]]
    ask(queue, 2, "f", "end")
    for text in ("f", "d"):
        execution = await instance.begun()
        assert rows(execution) == [text]
        finish(execution)
    assert await answer(later) == ["d"]


async def test_a_thousand_sequences_of_one_request_pass_one_slot(
    start: Start, config: ModelConfig
) -> None:
    queue = start(config)
    entries = [ask(queue, number, str(number), "start end") for number in range(1, 1001)]
    instance = queue.employ()
    answered = 0
    while answered < 1000:
        execution = await instance.begun()
        answered += len(execution.requests)
        finish(execution)
    assert await answer(entries[-1]) == ["1000"]


async def test_an_idle_sequence_loses_its_slot_silently(start: Start, config: ModelConfig) -> None:
    batching = config.sequence_batching
    assert batching is not None
    short = replace(batching, max_sequence_idle_microseconds=SOON_US)
    queue = start(replace(config, max_batch_size=1, sequence_batching=short))
    instance = queue.employ()
    ask(queue, 1, "a", "start")
    finish(await instance.begun())
    others = [ask(queue, number, str(number), "start") for number in range(2, 6)]
    for each in others:
        finish(await instance.begun())
        await answer(each)
    with pytest.raises(InferenceError, match="must specify the START flag"):
        ask(queue, 1, "b")


async def test_queued_requests_of_an_idle_sequence_are_executed(start: Start) -> None:
    queue = start(direct(slots=1, max_sequence_idle_microseconds=SOON_US))
    instance = queue.employ()
    ask(queue, 1, "a", "start")
    second = ask(queue, 1, "b")
    next_sequence = ask(queue, 2, "c", "start")
    execution = await instance.begun()
    await forgotten(queue, 1)
    finish(execution)
    finish(await instance.begun())
    assert await answer(second) == ["b"]
    finish(await instance.begun())
    assert await answer(next_sequence) == ["c"]
    assert instance.asked == ["a", "b", "c"]


async def test_a_timeout_in_the_backlog_rejects_the_whole_sequence(start: Start) -> None:
    queue = start(direct(slots=1))
    instance = queue.employ()
    ask(queue, 1, "a", "start")
    patient = ask(queue, 2, "patient", "start end")
    late = [ask(queue, 3, "b", "start"), ask(queue, 3, "c", timeout_us=SOON_US)]
    text = "timeout of the corresponding sequence has been expired"
    assert [await refusal(each) for each in late] == [(Code.UNAVAILABLE, text)] * 2
    assert queue.statistics.failures["REJECTED"] == 2  # type: ignore[index]  # by its value
    with pytest.raises(InferenceError, match="must specify the START flag"):
        ask(queue, 3, "d")
    finish(await instance.begun())
    ask(queue, 1, "end", "end")
    finish(await instance.begun())
    finish(await instance.begun())
    assert await answer(patient) == ["patient"]


async def test_a_timeout_is_over_once_a_sequence_has_a_slot(start: Start) -> None:
    queue = start(direct(slots=1))
    instance = queue.employ()
    first = ask(queue, 1, "a", "start", timeout_us=1)
    second = ask(queue, 1, "b", timeout_us=1)
    await settle()
    finish(await instance.begun())
    finish(await instance.begun())
    assert [await answer(each) for each in (first, second)] == [["a"], ["b"]]


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
