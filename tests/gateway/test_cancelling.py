"""Cancelling requests by their id: every scheduler, every stage, and no other request."""

import gc
import weakref
from dataclasses import replace

import pytest

from gateway.config import ModelConfig
from gateway.config.scheduling import DynamicBatching, SequenceBatching
from gateway.dataplane import DataPlane
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest, SequenceTag
from gateway.policy.caller import Caller
from gateway.request_name import RequestName
from gateway.stream import INTERRUPTED, Interrupted, ResponseStream
from gateway.tensor import Datatype, Tensor
from tests.builders import (
    DECOUPLED,
    TEXT,
    LoadedModels,
    ScriptedInstance,
    read_all,
    settle,
    soon,
    text_request,
    text_response,
)
from tests.conftest import Serve

pytestmark = pytest.mark.both

SCHEDULERS = {
    "direct": TEXT,
    "decoupled": replace(TEXT, model_transaction_policy=DECOUPLED),
    "dynamic": replace(TEXT, max_batch_size=1, dynamic_batching=DynamicBatching()),
    "dynamic, in order": replace(
        TEXT, max_batch_size=1, dynamic_batching=DynamicBatching(preserve_ordering=True)
    ),
    "sequences": replace(
        TEXT, sequence_batching=SequenceBatching(max_sequence_idle_microseconds=3_600_000_000)
    ),
}


@pytest.fixture(params=SCHEDULERS)
def config(request: pytest.FixtureRequest) -> ModelConfig:
    found: ModelConfig = SCHEDULERS[request.param]
    return found


def dataplane_of(*models: object) -> DataPlane:
    return DataPlane(LoadedModels(*models))  # type: ignore[arg-type]


def named(request_id: str, model: str = "text", version: str = "") -> RequestName:
    return RequestName(model, version, request_id)


def request_for(config: ModelConfig, request_id: str, number: int = 1) -> InferRequest:
    """A request whose text is its id; where there are sequences one of its own."""
    shape = (1, 1) if config.batching else (1,)
    tag = SequenceTag(number, start=True, end=True) if config.sequence_batching else None
    text = Tensor("text_input", Datatype.BYTES, shape, (request_id.encode(),))
    return InferRequest(model=config.name, id=request_id, inputs=(text,), sequence=tag)


def canceled(model: object) -> int:
    statistics = model.statistics  # type: ignore[attr-defined]
    return next(n for reason, n in statistics.failures.items() if reason.value == "CANCELED")


async def test_an_executing_request_stops_and_its_reader_gets_a_last_response(
    serve: Serve, config: ModelConfig
) -> None:
    instance = ScriptedInstance(1)
    model = serve(instance, config=config)
    dataplane = dataplane_of(model)
    with dataplane.infer(request_for(config, "a")) as stream:
        execution = await instance.begun()
        execution.answer(text_response("partial"))
        await settle()
        dataplane.running.cancel(named("a"))
        await soon(execution.stopped.wait())
        assert await soon(read_all(stream)) == ["partial", ""]
    assert (len(model.requests), model.statistics.pending, canceled(model)) == (0, 0, 1)


async def test_a_queued_request_never_executes_and_the_others_do(
    serve: Serve, config: ModelConfig
) -> None:
    instance = ScriptedInstance(1)
    model = serve(instance, config=config)
    dataplane = dataplane_of(model)
    streams = [
        dataplane.infer(request_for(config, request_id, number))
        for number, request_id in enumerate("abc", 1)
    ]
    first = await instance.begun()
    dataplane.running.cancel(named("b"))
    assert await soon(streams[1].batch()) == [INTERRUPTED]
    first.finish("done a")
    (await instance.begun()).finish("done c")
    assert await soon(read_all(streams[0])) == ["done a"]
    assert await soon(read_all(streams[2])) == ["done c"]
    assert instance.asked == ["a", "c"]
    assert canceled(model) == 1


async def test_one_request_of_a_batch_is_cancelled_and_the_others_complete(serve: Serve) -> None:
    config = replace(TEXT, max_batch_size=2, dynamic_batching=DynamicBatching())
    instance = ScriptedInstance(1)
    dataplane = dataplane_of(serve(instance, config=config))
    streams = [dataplane.infer(request_for(config, request_id)) for request_id in "ab"]
    execution = await instance.begun()
    assert len(execution.requests) == 2
    dataplane.running.cancel(named("a"))
    for index in range(2):
        execution.answer(text_response("done", final=True), index)
    execution.end()
    with pytest.raises(Interrupted):
        await soon(streams[0].only())
    assert await soon(read_all(streams[1])) == ["done"]


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        (named("b"), Code.NOT_FOUND, "model 'text' runs no request with the id 'b'"),
        (named("a", version="2"), Code.NOT_FOUND, "unknown model"),
        (named("a", model="other"), Code.NOT_FOUND, "runs no request with the id 'a'"),
        (named("a", model="nope"), Code.NOT_FOUND, "unknown model: 'nope'"),
        (named(""), Code.INVALID_ARG, "the id is missing"),
    ],
    ids=["id", "version", "model", "unknown model", "no id"],
)
async def test_what_names_nothing_that_runs_is_refused_and_stops_nothing(
    serve: Serve, name: RequestName, code: Code, message: str
) -> None:
    instance = ScriptedInstance()
    other = serve(ScriptedInstance(), config=replace(TEXT, name="other"))
    dataplane = dataplane_of(serve(instance), other)
    with dataplane.infer(text_request(id="a")) as stream:
        execution = await instance.begun()
        with pytest.raises(InferenceError, match=message) as caught:
            dataplane.running.cancel(name)
        assert caught.value.code is code
        execution.finish("done")
        assert await soon(read_all(stream)) == ["done"]


async def test_a_version_may_be_named(serve: Serve) -> None:
    instance = ScriptedInstance()
    dataplane = dataplane_of(serve(instance))
    with dataplane.infer(text_request(id="a")) as stream:
        dataplane.running.cancel(named("a", version="1"))
        assert await soon(stream.batch()) == [INTERRUPTED]


async def test_a_request_is_cancelled_only_once(serve: Serve) -> None:
    dataplane = dataplane_of(serve(ScriptedInstance()))
    with dataplane.infer(text_request(id="a")) as stream:
        dataplane.running.cancel(named("a"))
        with pytest.raises(InferenceError) as caught:
            dataplane.running.cancel(named("a"))
        assert caught.value.code is Code.NOT_FOUND
        assert await soon(stream.batch()) == [INTERRUPTED]


async def test_all_requests_of_an_id_are_cancelled(serve: Serve) -> None:
    dataplane = dataplane_of(serve(ScriptedInstance()))
    streams = [dataplane.infer(text_request(id=request_id)) for request_id in "aab"]
    dataplane.running.cancel(named("a"))
    assert [stream.done for stream in streams] == [True, True, False]
    streams[2].cancel()


async def test_of_several_with_one_id_the_callers_own_are_meant(serve: Serve) -> None:
    dataplane = dataplane_of(serve(ScriptedInstance()))
    mine, others = (dataplane.infer(text_request(id="a")) for _ in range(2))
    dataplane.running.cancel(named("a"), {mine})
    assert (mine.done, others.done) == (True, False)
    with pytest.raises(InferenceError):
        dataplane.running.cancel(named("a"), {mine})
    with pytest.raises(InferenceError):
        dataplane.running.cancel(named("a"), only_own=True)
    assert not others.done
    dataplane.running.cancel(named("a"))
    assert others.done


async def test_a_request_without_an_id_cannot_be_named(serve: Serve) -> None:
    dataplane = dataplane_of(serve(ScriptedInstance()))
    with dataplane.infer(text_request()) as stream:
        with pytest.raises(InferenceError):
            dataplane.running.cancel(named(""))
        assert not stream.done


async def test_a_request_of_a_model_that_is_being_unloaded_can_be_cancelled(serve: Serve) -> None:
    instance = ScriptedInstance()
    models = LoadedModels(serve(instance))
    dataplane = DataPlane(models)  # type: ignore[arg-type]
    with dataplane.infer(text_request(id="a")) as stream:
        models.forget()
        dataplane.running.cancel(named("a"))
        assert await soon(stream.batch()) == [INTERRUPTED]


async def test_no_request_is_kept_alive_for_its_id(serve: Serve) -> None:
    instance = ScriptedInstance()
    dataplane = dataplane_of(serve(instance))
    left = []
    for _ in range(50):
        with dataplane.infer(text_request(id="a")) as stream:
            left.append(weakref.ref(stream))
            (await instance.begun()).finish("done")
            await soon(read_all(stream))
    del stream
    await settle()
    gc.collect()
    assert [each for each in left if each() is not None] == []


async def test_requests_of_revoked_keys_end_although_the_end_of_one_fails(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    dataplane = dataplane_of(serve(ScriptedInstance(2)))
    caller, ended = Caller(tenant="a"), []

    def abandon(stream: ResponseStream, error: InferenceError) -> None:
        ended.append(error.code)
        if len(ended) == 1:
            raise RuntimeError

    monkeypatch.setattr(ResponseStream, "abandon", abandon)
    with (
        dataplane.infer(text_request(caller=caller)),
        dataplane.infer(text_request(caller=caller)),
        dataplane.infer(text_request(caller=Caller(tenant="b"))),
    ):
        caller.valid = False
        dataplane.running.abandon_invalid()
    assert ended == [Code.CANCELLED] * 2
    assert caplog.messages == ["request not ended"]
