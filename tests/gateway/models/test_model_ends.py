"""Death and restart of a model's instances, and the end of a model."""

import asyncio
import logging
from collections import deque
from dataclasses import replace

import pytest

from gateway.backend import Instance
from gateway.errors import Code, InferenceError
from gateway.models import instances as instances_module
from gateway.models.instances import backoff_secs
from gateway.models.model import Model
from gateway.observability.statistics import FailureReason
from gateway.observability.trace import TIMESTAMPS, FileTrace
from tests.builders import (
    TEXT,
    ScriptedInstance,
    read_all,
    settle,
    soon,
    text_request,
    text_response,
)
from tests.conftest import Serve

STOPPING = InferenceError(Code.UNAVAILABLE, "the server is shutting down")


class Spares:
    """Loads of a model when an instance has died: instances, or errors, in this order."""

    def __init__(self, *spares: Instance | Exception) -> None:
        self._spares = deque(spares)
        self.loads = 0

    async def load(self) -> Instance:
        self.loads += 1
        spare = self._spares.popleft()
        if isinstance(spare, Exception):
            raise spare
        return spare


class Changes:
    """Counts how often a model says that its readiness may have changed."""

    def __init__(self) -> None:
        self._happened = asyncio.Semaphore(0)

    def note(self) -> None:
        self._happened.release()

    async def next(self) -> None:
        await soon(self._happened.acquire())


@pytest.fixture
def changes() -> Changes:
    return Changes()


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restart without waiting."""
    monkeypatch.setattr(instances_module, "FIRST_BACKOFF_SECS", 0.0)


# Death and restart.


async def test_a_model_lives_while_an_instance_does(serve: Serve, changes: Changes) -> None:
    instances = [ScriptedInstance(concurrency=1), ScriptedInstance(concurrency=1)]
    model = serve(
        *instances, config=replace(TEXT, parameters={"restart_tries": "0"}), on_change=changes.note
    )
    assert (model.ready, model.trouble) == (True, "")
    with model.submit(text_request("a")) as first, model.submit(text_request("b")) as second:
        healthy = await instances[1].begun()
        instances[0].die("out of memory")
        await changes.next()
        with pytest.raises(InferenceError, match="out of memory"):
            await soon(read_all(first))
        assert (model.ready, model.trouble) == (True, "")
        assert tuple(model.instances) == (instances[1],)
        await soon(instances[0].closed.wait())
        await settle()
        healthy.finish("alive")
        assert await soon(read_all(second)) == ["alive"]


@pytest.mark.usefixtures("at_once")
async def test_a_model_without_instances_is_not_ready_and_has_a_reason(
    serve: Serve, changes: Changes
) -> None:
    instance, spare = ScriptedInstance(), ScriptedInstance()
    spares = Spares(spare)
    model = serve(instance, load=spares.load, on_change=changes.note)
    instance.die("its engine has stopped")
    await changes.next()
    assert not model.ready
    assert model.trouble.startswith("its engine has stopped; ")
    with pytest.raises(InferenceError) as caught:
        model.submit(text_request())
    assert caught.value.code is Code.UNAVAILABLE
    assert caught.value.message == f"model 'text' is unavailable: {model.trouble}"
    await changes.next()
    assert (model.ready, model.trouble) == (True, "")
    assert (instance.closes, spares.loads) == (1, 1)
    with model.submit(text_request()) as stream:
        (await spare.begun()).finish("restarted")
        assert await soon(read_all(stream)) == ["restarted"]


@pytest.mark.usefixtures("at_once")
async def test_open_requests_of_a_dead_instance_get_a_clear_error(
    serve: Serve, changes: Changes
) -> None:
    instance = ScriptedInstance()
    model = serve(instance, load=Spares(ScriptedInstance()).load, on_change=changes.note)
    with model.submit(text_request()) as stream:
        execution = await instance.begun()
        execution.answer(text_response("half an answer"))
        instance.die("its engine has stopped")
        assert await soon(stream.batch())
        with pytest.raises(InferenceError) as caught:
            await soon(stream.batch())
        assert caught.value.code is Code.UNAVAILABLE
        assert caught.value.message == "model 'text' failed: its engine has stopped"
        await soon(execution.stopped.wait())
    assert len(model.requests) == 0
    assert model.statistics.failures[FailureReason.BACKEND] == 1


@pytest.mark.usefixtures("at_once")
async def test_a_queued_request_outlives_the_instance_it_waited_for(serve: Serve) -> None:
    instance, spare = ScriptedInstance(concurrency=1), ScriptedInstance(concurrency=1)
    model = serve(instance, load=Spares(spare).load)
    with model.submit(text_request("running")), model.submit(text_request("queued")) as queued:
        await instance.begun()
        instance.die("its engine has stopped")
        (await spare.begun()).finish("served by the next one")
        assert spare.asked == ["queued"]
        assert await soon(read_all(queued)) == ["served by the next one"]


@pytest.mark.usefixtures("at_once")
async def test_restarts_are_tried_again_and_then_given_up(
    serve: Serve, changes: Changes, caplog: pytest.LogCaptureFixture
) -> None:
    instance = ScriptedInstance(concurrency=1)
    spares = Spares(
        InferenceError(Code.UNAVAILABLE, "no memory"), RuntimeError("a defect of the runtime")
    )
    model = serve(
        instance,
        config=replace(TEXT, parameters={"restart_tries": "2"}),
        load=spares.load,
        on_change=changes.note,
    )
    with (
        model.submit(text_request("running")) as running,
        model.submit(text_request("queued")) as queued,
    ):
        await instance.begun()
        instance.die("its engine has stopped")
        with pytest.raises(InferenceError) as executed:
            await soon(read_all(running))
        assert executed.value.dead_instance == instance.number
        with pytest.raises(InferenceError) as caught:
            await soon(read_all(queued))
        assert (caught.value.code, caught.value.dead_instance) == (Code.UNAVAILABLE, None)
        assert caught.value.lacks_instance
        assert "its engine has stopped; given up after 2 restarts" in caught.value.message
    assert spares.loads == 2
    assert model.trouble == "its engine has stopped; given up after 2 restarts"
    with pytest.raises(InferenceError, match="given up after 2 restarts") as caught:
        model.submit(text_request())
    assert caught.value.lacks_instance
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert "model given up" in told


@pytest.mark.usefixtures("at_once")
async def test_an_instance_that_dies_again_and_again_is_given_up(
    serve: Serve, changes: Changes
) -> None:
    instances = [ScriptedInstance() for _ in range(3)]
    spares = Spares(*instances[1:])
    model = serve(
        instances[0],
        config=replace(TEXT, parameters={"restart_tries": "2"}),
        load=spares.load,
        on_change=changes.note,
    )
    for instance in instances:
        instance.die("killed")
        await changes.next()  # it is not ready
        if instance is not instances[-1]:
            await changes.next()  # and replaced
    await soon(instances[-1].closed.wait())
    await settle()
    assert (model.ready, model.trouble) == (False, "killed; given up after 2 restarts")
    assert spares.loads == 2
    assert [instance.closes for instance in instances] == [1, 1, 1]


@pytest.mark.usefixtures("at_once")
async def test_the_restart_counter_is_reset_after_a_stable_time(
    serve: Serve, changes: Changes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instances_module, "STABLE_SECS", -1.0)  # every instance lived long enough
    instances = [ScriptedInstance() for _ in range(4)]
    model = serve(
        instances[0],
        config=replace(TEXT, parameters={"restart_tries": "1"}),
        load=Spares(*instances[1:]).load,
        on_change=changes.note,
    )
    for instance in instances[:-1]:
        instance.die("killed")
        await changes.next()  # it is not ready
        await changes.next()  # and replaced
    assert tuple(model.instances) == (instances[-1],)


async def test_giving_up_one_instance_does_not_affect_the_requests_of_another(
    serve: Serve, changes: Changes
) -> None:
    dead, alive = ScriptedInstance(concurrency=1), ScriptedInstance(concurrency=1)
    model = serve(
        dead, alive, config=replace(TEXT, parameters={"restart_tries": "0"}), on_change=changes.note
    )
    with model.submit(text_request("a")), model.submit(text_request("b")) as stream:
        execution = await alive.begun()
        dead.die("killed")
        await soon(dead.closed.wait())
        await settle()
        execution.finish("undisturbed")
        assert await soon(read_all(stream)) == ["undisturbed"]


@pytest.mark.parametrize(
    ("tries", "secs"), [(0, 0.5), (1, 1.0), (2, 2.0), (3, 4.0), (6, 30.0), (5000, 30.0)]
)
def test_every_try_waits_twice_as_long_up_to_a_limit(tries: int, secs: float) -> None:
    assert backoff_secs(tries) == secs


# The end.


async def test_an_idle_model_is_drained(serve: Serve) -> None:
    await soon(serve(ScriptedInstance()).requests.drained())


async def test_a_model_is_drained_when_its_last_request_has_ended(serve: Serve) -> None:
    instance = ScriptedInstance()
    model = serve(instance)
    with model.submit(text_request()) as first, model.submit(text_request()) as second:
        executions = [await instance.begun(), await instance.begun()]
        drained = asyncio.create_task(model.requests.drained())
        executions[0].finish("one")
        assert await soon(read_all(first)) == ["one"]
        assert not drained.done()
        executions[1].finish("two")
        assert await soon(read_all(second)) == ["two"]
        await soon(drained)


async def test_abandoned_requests_get_the_error_and_their_executions_stop(serve: Serve) -> None:
    instance = ScriptedInstance(concurrency=1)
    model = serve(instance)
    with model.submit(text_request("a")) as running, model.submit(text_request("b")) as queued:
        execution = await instance.begun()
        model.requests.abandon(STOPPING)
        await soon(model.requests.drained())
        for stream in (running, queued):
            with pytest.raises(InferenceError, match="the server is shutting down"):
                await soon(read_all(stream))
        await soon(execution.stopped.wait())
    assert instance.asked == ["a"]


async def test_closing_releases_every_instance_once(serve: Serve) -> None:
    instances = [ScriptedInstance(), ScriptedInstance()]
    model: Model = serve(*instances)
    await soon(model.close())
    await soon(model.close())
    assert [instance.closes for instance in instances] == [1, 1]
    assert not model.ready


async def test_a_model_is_needed_while_it_is_held_or_has_requests(
    serve: Serve,
) -> None:
    instance = ScriptedInstance()
    model = serve(instance)
    model.hold()
    model.hold()
    waiting = asyncio.create_task(model.unneeded())
    model.release()
    await settle()
    assert not waiting.done()
    with model.submit(text_request()) as stream:
        model.release()
        await settle()
        assert not waiting.done()
        (await instance.begun()).finish("last")
        assert await soon(read_all(stream)) == ["last"]
    await soon(waiting)


async def test_a_request_on_behalf_of_a_traced_one_has_a_trace_of_its_own(serve: Serve) -> None:
    instance = ScriptedInstance()
    model = serve(instance)
    kept: list[FileTrace] = []
    trace = FileTrace(1, (TIMESTAMPS,), kept.append, iter((2,)))
    with model.submit(text_request(trace=trace)) as stream:
        execution = await instance.begun()
        [request] = execution.requests
        assert isinstance(request.trace, FileTrace)
        assert request.trace.id == 2
        execution.finish("done")
        await soon(read_all(stream))
    trace.ended(1)
    trace.sent()
    assert kept == [trace]
    assert trace.objects[0]["parent_id"] == 1
