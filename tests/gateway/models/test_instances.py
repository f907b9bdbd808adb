"""Instances in their slots: retired by an update, restarted and closed."""

import asyncio
from dataclasses import replace

import pytest

from gateway.backend import Instance
from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError
from gateway.messages import SequenceTag
from gateway.models.instance_groups import InstanceSlot, register_slots
from gateway.models.model import Model
from gateway.observability.statistics import ModelStatistics
from gateway.schedulers.rate_limiter import ExecutionLimiter
from gateway.stream import ResponseStream
from tests.builders import TEXT, ScriptedInstance, read_all, settle, soon, text_request
from tests.conftest import Serve, tasks_left
from tests.gateway.schedulers.queues import dynamic, finish, word
from tests.gateway.sequences.parts import direct, oldest, part

SEQUENCES = {"direct": direct(), "oldest": oldest()}
ALL = {"direct": TEXT, "dynamic": dynamic(1), "sequences": direct(slots=1)}


def dismiss(model: Model, instance: ScriptedInstance) -> None:
    """Serve without an instance from here on, as after an in-place update."""
    kept = [slot for slot in model.instances.slots if slot.instance is not instance]
    model.exchange(model.config, kept)


async def failure(stream: ResponseStream) -> tuple[Code, str]:
    with pytest.raises(InferenceError) as caught:
        await soon(read_all(stream))
    return caught.value.code, caught.value.message


# Dismissed instances.


@pytest.mark.parametrize("config", SEQUENCES.values(), ids=SEQUENCES)
async def test_a_sequence_ends_with_its_retired_instance(config: ModelConfig, serve: Serve) -> None:
    leaving, staying = ScriptedInstance(1), ScriptedInstance(1)
    model = serve(leaving, staying, config=config)
    first = model.submit(part(1, "a", "start"))
    finish(await leaving.begun())
    assert await soon(read_all(first)) == ["a"]
    dismiss(model, leaving)
    await settle()
    leaving.die("its worker has died")
    await soon(leaving.closed.wait())
    assert model.scheduler.sequences is not None
    assert not model.scheduler.sequences.continues(part(1, "b"))
    with pytest.raises(InferenceError, match="must specify the START flag"):
        model.submit(part(1, "b"))
    again = model.submit(part(1, "c", "start end"))
    finish(await staying.begun())
    assert await soon(read_all(again)) == ["c"]


@pytest.mark.parametrize("config", ALL.values(), ids=ALL)
async def test_a_request_fails_with_its_retired_instance(config: ModelConfig, serve: Serve) -> None:
    leaving, staying = ScriptedInstance(1), ScriptedInstance(1)
    model = serve(leaving, staying, config=config)
    request = word("a") if config.batching else text_request("a")
    if config.sequence_batching is not None:
        request = replace(request, sequence=SequenceTag(1, start=True, end=True))
    stream = model.submit(request)
    await leaving.begun()
    dismiss(model, leaving)
    await settle()
    assert not leaving.closes
    leaving.die("its worker has died")
    assert await failure(stream) == (
        Code.UNAVAILABLE,
        f"model '{config.name}' failed: its worker has died",
    )
    await soon(leaving.closed.wait())
    await soon(model.requests.drained())
    await settle()
    assert leaving.closes == 1


async def test_a_request_that_waits_in_a_retired_instance_fails_with_it(serve: Serve) -> None:
    leaving, staying = ScriptedInstance(1), ScriptedInstance(1)
    model = serve(leaving, staying, config=direct())
    model.submit(part(1, "a", "start"))
    execution = await leaving.begun()
    queued = model.submit(part(1, "b"))
    dismiss(model, leaving)
    await settle()
    leaving.die("its worker has died")
    assert await failure(queued) == (
        Code.UNAVAILABLE,
        "model 'text' failed: its worker has died",
    )
    await soon(execution.stopped.wait())
    await soon(leaving.closed.wait())


async def test_a_request_at_a_retired_instance_was_executed_though_the_model_is_given_up(
    serve: Serve,
) -> None:
    leaving, staying = ScriptedInstance(1), ScriptedInstance(1)
    config = replace(TEXT, parameters={"restart_tries": "0"})
    model = serve(leaving, staying, config=config)
    streams = [model.submit(text_request(text)) for text in "abc"]
    await leaving.begun()
    await staying.begun()
    dismiss(model, leaving)
    staying.die("its worker has died")
    errors = []
    for stream in streams:
        with pytest.raises(InferenceError, match="its worker has died") as caught:
            await soon(read_all(stream))
        errors.append(caught.value)
    assert [each.lacks_instance for each in errors] == [False, False, True]
    assert [each.dead_instance for each in errors] == [None, staying.number, None]


async def test_an_instance_that_lives_is_closed_once_its_sequences_have_ended(
    serve: Serve,
) -> None:
    leaving, staying = ScriptedInstance(1), ScriptedInstance(1)
    model = serve(leaving, staying, config=direct())
    model.submit(part(1, "a", "start"))
    finish(await leaving.begun())
    dismiss(model, leaving)
    await settle()
    last = model.submit(part(1, "b", "end"))
    finish(await leaving.begun())
    assert await soon(read_all(last)) == ["b"]
    await soon(leaving.closed.wait())
    assert staying.executions == []


async def test_a_retired_slot_without_an_instance_is_unregistered(serve: Serve) -> None:
    dead, staying = ScriptedInstance(), ScriptedInstance()
    model = serve(dead, staying)
    register_slots(model.instances.slots, ExecutionLimiter())
    slot = model.instances.slots[0]
    assert slot.registration is not None
    dead.die("its worker has died")
    await soon(dead.closed.wait())
    model.exchange(model.config, model.instances.slots[1:])
    assert slot.registration is None


# Closings.


class RunningModel:
    """The life of a model that a test ends itself."""

    def __init__(self, *instances: ScriptedInstance, config: ModelConfig = TEXT) -> None:
        slots = [InstanceSlot(self.load, instance=each) for each in instances]
        self.loads = 0
        self.model = Model(config, 1, ModelStatistics(), slots)
        self.task = asyncio.create_task(self.model.run(lambda: None))

    async def load(self) -> Instance:
        self.loads += 1
        return await asyncio.Future()

    async def end(self) -> None:
        """Stop the model, and close it."""
        self.task.cancel()
        await soon(asyncio.wait([self.task]))
        await soon(self.model.close())
        assert tasks_left() == []


async def test_an_instance_is_closed_though_the_server_stops_as_it_is_retired() -> None:
    leaving, staying = ScriptedInstance(), ScriptedInstance()
    running = RunningModel(leaving, staying)
    await settle()
    running.task.cancel()
    dismiss(running.model, leaving)
    await running.end()
    assert (leaving.closes, staying.closes) == (1, 1)


async def test_an_instance_that_is_retired_while_the_server_stops_is_closed() -> None:
    leaving, staying = ScriptedInstance(), ScriptedInstance()
    running = RunningModel(leaving, staying)
    await settle()
    running.task.cancel()
    await soon(asyncio.wait([running.task]))
    dismiss(running.model, leaving)
    await running.end()
    assert (leaving.closes, staying.closes) == (1, 1)


async def test_a_retired_instance_with_an_open_sequence_is_closed_with_its_model() -> None:
    leaving, staying = ScriptedInstance(1), ScriptedInstance(1)
    running = RunningModel(leaving, staying, config=direct())
    await settle()
    running.model.submit(part(1, "a", "start"))
    finish(await leaving.begun())
    await settle()
    dismiss(running.model, leaving)
    await settle()
    assert leaving.closes == 0
    await running.end()
    assert (leaving.closes, staying.closes) == (1, 1)


async def test_a_stalled_instance_is_closed_though_the_server_stops_as_it_is_restarted() -> None:
    stalled = ScriptedInstance()
    running = RunningModel(stalled)
    await settle()
    running.task.cancel()
    running.model.instances.restart(stalled, "it has made no progress")
    await running.end()
    assert (stalled.closes, running.loads) == (1, 0)


# Readiness.


async def test_a_model_is_ready_while_one_of_its_instances_takes_requests(serve: Serve) -> None:
    first, second = ScriptedInstance(), ScriptedInstance()
    model = serve(first, second)
    assert model.ready
    dismiss(model, first)
    assert model.ready
    second.die("its worker has died")
    await soon(second.closed.wait())
    assert not model.ready
    with pytest.raises(InferenceError, match="is unavailable: its worker has died"):
        model.submit(text_request())


async def test_a_closed_model_is_not_ready() -> None:
    running = RunningModel(ScriptedInstance())
    assert running.model.ready
    await running.end()
    assert not running.model.ready


async def test_the_end_of_a_model_does_not_resolve_the_death_of_its_instance(serve: Serve) -> None:
    instance = ScriptedInstance()
    model = serve(instance)
    await settle()
    dismiss(model, instance)
    await soon(instance.closed.wait())
    assert instance.death is not None
    assert not instance.death.done()
