"""The one way in."""

import asyncio
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from gateway.backend_loader import BackendLoader
from gateway.config.scheduling import SequenceBatching
from gateway.dataplane import DataPlane
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest, SequenceTag
from gateway.models.repository import ModelRepository
from gateway.models.repository_control import RepositoryControl
from gateway.policy.caller import Caller, tenant_of
from gateway.settings import ControlMode, ModelSettings
from tests.builders import (
    TEXT,
    LoadedModels,
    ScriptedInstance,
    read_all,
    settle,
    soon,
    text_request,
)
from tests.conftest import Serve

HOUR_US = 3_600_000_000


def dataplane_of(models: LoadedModels, *, strict: bool = True) -> DataPlane:
    return DataPlane(models, strict_readiness=strict)  # type: ignore[arg-type]


async def test_a_request_goes_to_the_model_it_names(serve: Serve) -> None:
    wanted, other = ScriptedInstance(), ScriptedInstance()
    dataplane = dataplane_of(
        LoadedModels(serve(other), serve(wanted, config=replace(TEXT, name="wanted")))
    )
    with dataplane.infer(text_request("hi", model="wanted", version="1")) as stream:
        assert dataplane.in_flight == 1
        (await wanted.begun()).finish("done")
        assert await soon(read_all(stream)) == ["done"]
    assert other.executions == []
    assert dataplane.in_flight == 0


async def test_requests_are_queued_in_the_order_of_the_calls(serve: Serve) -> None:
    instance = ScriptedInstance()
    dataplane = dataplane_of(LoadedModels(serve(instance)))
    texts = [str(number) for number in range(5)]
    streams = [dataplane.infer(text_request(text)) for text in texts]
    for _ in texts:
        (await instance.begun()).finish("done")
    assert instance.asked == texts
    for stream in streams:
        assert await soon(read_all(stream)) == ["done"]


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (text_request(model="nope"), Code.NOT_FOUND),
        (text_request(version="7"), Code.NOT_FOUND),
        (InferRequest(model="text"), Code.INVALID_ARG),
    ],
    ids=["model", "version", "inputs"],
)
async def test_what_can_be_refused_is_refused_before_anything_is_queued(
    serve: Serve, request_: InferRequest, code: Code
) -> None:
    instance = ScriptedInstance()
    dataplane = dataplane_of(LoadedModels(serve(instance)))
    with pytest.raises(InferenceError) as caught:
        dataplane.infer(request_)
    assert caught.value.code is code
    await settle()
    assert (dataplane.in_flight, instance.executions) == (0, [])


async def test_an_unread_stream_is_dropped(serve: Serve) -> None:
    instance = ScriptedInstance()
    model = serve(instance)
    dataplane = dataplane_of(LoadedModels(model))
    with dataplane.infer(text_request()):
        execution = await instance.begun()
    assert (dataplane.in_flight, model.statistics.pending) == (0, 0)
    await soon(execution.stopped.wait())


async def test_an_exiting_server_takes_no_request_and_finishes_those_it_has(serve: Serve) -> None:
    instance = ScriptedInstance()
    dataplane = dataplane_of(LoadedModels(serve(instance)))
    with dataplane.infer(text_request()) as stream:
        execution = await instance.begun()
        dataplane.refuse_requests()
        assert dataplane.exiting
        with pytest.raises(InferenceError) as caught:
            dataplane.infer(text_request())
        assert (caught.value.code, caught.value.message) == (Code.UNAVAILABLE, "Server exiting")
        execution.finish("done")
        assert await soon(read_all(stream)) == ["done"]


@pytest.mark.parametrize(
    ("settled", "trouble", "strict", "ready"),
    [
        (True, {}, True, True),
        (True, {}, False, True),
        (False, {}, True, False),
        (False, {}, False, False),
        (True, {"m": "Internal: broken"}, True, False),
        (True, {"m": "Internal: broken"}, False, True),
    ],
)
def test_the_server_is_ready_when_it_has_settled_and_if_strict_without_failures(
    settled: bool, trouble: dict[str, str], strict: bool, ready: bool
) -> None:
    models = LoadedModels()
    models.settled, models.trouble = settled, trouble
    dataplane = dataplane_of(models, strict=strict)
    assert dataplane.ready is ready
    dataplane.refuse_requests()
    assert not dataplane.ready


class SickInstance(ScriptedInstance):
    """Says that it is not ready."""

    async def check_ready(self) -> None:
        raise InferenceError(Code.UNAVAILABLE, "not today")


@pytest.mark.parametrize(("strict", "ready"), [(True, False), (False, True)])
async def test_a_strict_server_asks_its_models_whether_they_are_ready(
    serve: Serve, caplog: pytest.LogCaptureFixture, strict: bool, ready: bool
) -> None:
    dataplane = dataplane_of(LoadedModels(serve(SickInstance())), strict=strict)
    assert dataplane.ready
    assert await dataplane.check_ready() is ready
    assert ("Model 'text' version 1 is not ready: not today" in caplog.text) is strict


@pytest.mark.parametrize("caller", [None, Caller(tenant="a")])
async def test_while_it_exits_the_requests_of_open_sequences_are_taken_until_these_have_ended(
    serve: Serve, caller: Caller | None
) -> None:
    instance = ScriptedInstance(1)
    batching = SequenceBatching(max_sequence_idle_microseconds=HOUR_US)
    config = replace(TEXT, sequence_batching=batching)
    dataplane = dataplane_of(LoadedModels(serve(instance, config=config)))
    of_caller = partial(text_request, caller=caller)
    tag = SequenceTag(1, tenant=tenant_of(caller))
    with dataplane.infer(of_caller(sequence=replace(tag, start=True))) as stream:
        (await instance.begun()).finish("begun")
        assert await soon(read_all(stream)) == ["begun"]
    dataplane.refuse_requests()
    assert not dataplane.taking_requests
    ended = asyncio.create_task(dataplane.sequences_ended())
    await settle()
    assert dataplane.taking_requests
    for new in (None, replace(tag, start=True), replace(tag, correlation_id=2)):
        with pytest.raises(InferenceError, match="Server exiting"):
            dataplane.infer(of_caller(sequence=new))
    with dataplane.infer(of_caller(sequence=replace(tag, end=True))) as stream:
        await soon(ended)
        assert not dataplane.taking_requests
        (await instance.begun()).finish("ended")
        assert await soon(read_all(stream)) == ["ended"]


async def test_a_model_may_call_another_for_a_request_under_way_while_the_server_exits(
    serve: Serve,
) -> None:
    instance = ScriptedInstance()
    dataplane = dataplane_of(LoadedModels(serve(instance)))
    dataplane.refuse_requests()
    with dataplane.call(text_request()) as stream:
        (await instance.begun()).finish("done")
        assert await soon(read_all(stream)) == ["done"]


async def test_models_without_an_opinion_are_ready(serve: Serve) -> None:
    assert await dataplane_of(LoadedModels(serve(ScriptedInstance()))).check_ready()


async def test_models_are_found_by_name_and_version(serve: Serve) -> None:
    model = serve(ScriptedInstance())
    dataplane = dataplane_of(LoadedModels(model))
    assert dataplane.model("text") is model
    assert dataplane.model("text", "1") is model
    assert dataplane.ready_versions("text") == [model]
    assert list(dataplane.models()) == [model]
    with pytest.raises(InferenceError, match="'nope' is not found"):
        dataplane.ready_versions("nope")


async def test_exiting_is_a_change_of_readiness(tmp_path: Path) -> None:
    settings = ModelSettings(repositories=(tmp_path,))
    control = RepositoryControl(ModelRepository((tmp_path,)), settings, BackendLoader())
    dataplane = DataPlane(control)
    changed = asyncio.create_task(dataplane.changed())
    await settle()
    assert not changed.done()
    dataplane.refuse_requests()
    await soon(changed)


async def test_a_model_that_was_looked_up_before_a_reload_gives_way_to_the_new_one(
    serve: Serve,
) -> None:
    old, new = ScriptedInstance(), ScriptedInstance()
    retired = serve(old)
    retired.retired = True
    dataplane = dataplane_of(LoadedModels(serve(new)))
    with dataplane.infer(text_request(), retired) as stream:
        (await new.begun()).finish("done")
        assert await soon(read_all(stream)) == ["done"]
    assert old.executions == []


async def test_an_exiting_server_loads_and_unloads_nothing(tmp_path: Path) -> None:
    settings = ModelSettings(repositories=(tmp_path,), control_mode=ControlMode.EXPLICIT)
    control = RepositoryControl(ModelRepository((tmp_path,)), settings, BackendLoader())
    dataplane = DataPlane(control)
    dataplane.refuse_requests()
    for operation in (dataplane.load("a"), dataplane.unload("a")):
        with pytest.raises(InferenceError) as caught:
            await operation
        assert (caught.value.code, caught.value.message) == (Code.UNAVAILABLE, "Server exiting")
