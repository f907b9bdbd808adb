"""Requests without progress are logged, and stalled instances restarted."""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import replace

import pytest

from gateway.backend import Answer, Instance
from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest, SequenceTag
from gateway.models import instances as instances_module
from gateway.models.instance_groups import InstanceSlot
from gateway.models.loaded_models import ProgressWatch
from gateway.models.model import Model
from gateway.observability.request_record import Record
from gateway.observability.statistics import ModelStatistics
from gateway.stream import DEFAULT_LIMIT, ResponseStream
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
from tests.gateway.schedulers.queues import dynamic
from tests.gateway.sequences.parts import direct, oldest

STALL_SECS = 10.0
CONFIGS = {
    "direct": TEXT,
    "dynamic": dynamic(1),
    "sequences, direct": direct(slots=1),
    "sequences, oldest": oldest(candidates=1, max_batch_size=1),
}


class Stalling(ScriptedInstance):
    """An instance that notes why it was killed, and calls other models if a test says so."""

    def __init__(self, concurrency: int | None = 1) -> None:
        super().__init__(concurrency)
        self.killed = ""
        self.called: list[str] = []

    def kill(self, reason: str) -> None:
        self.killed = reason

    @property
    def waits_for(self) -> Iterable[str]:
        return self.called


class Spare:
    """The instance that a model loads instead of another."""

    def __init__(self) -> None:
        self.instance = Stalling()

    async def load(self) -> Instance:
        return self.instance


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restart without waiting."""
    monkeypatch.setattr(instances_module, "FIRST_BACKOFF_SECS", 0.0)


def ask(model: Model, text: str = "a", number: int = 1) -> InferRequest:
    request = text_request(text)
    if model.config.batching:
        tensor = replace(request.inputs[0], shape=(1, 1))
        request = replace(request, inputs=(tensor,))
    if model.config.sequence_batching is not None:
        request = replace(request, sequence=SequenceTag(number, start=True, end=True))
    return request


def look(watch: ProgressWatch, model: Model, secs: float) -> None:
    """Look as if `secs` had passed."""
    watch.look([model], time.perf_counter_ns() + round(secs * 1e9))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
async def test_a_stalled_instance_is_restarted_and_its_requests_get_a_clear_error(
    config: ModelConfig, serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    stalling, spare, watch = Stalling(), Spare(), ProgressWatch(STALL_SECS)
    model = serve(stalling, config=config, load=spare.load)
    first = model.submit(ask(model))
    await stalling.begun()
    second = model.submit(ask(model, number=2))
    look(watch, model, STALL_SECS / 2)
    assert not stalling.killed
    look(watch, model, STALL_SECS + 1)
    assert not model.ready
    assert stalling.killed == "it has made no progress for 10 s"
    with pytest.raises(InferenceError) as caught:
        await soon(read_all(first))
    assert caught.value.code is Code.UNAVAILABLE
    assert caught.value.message == (
        f"model '{config.name}' failed: it has made no progress for 10 s"
    )
    (await spare.instance.begun()).finish("served")
    assert await soon(read_all(second)) == ["served"]
    assert stalling.closes == 1
    assert model.ready
    assert model.statistics.stalls == 1
    stalls = [each for each in caplog.records if each.message == "instance stalled"]
    assert [vars(each)["reason"] for each in stalls] == ["it has made no progress for 10 s"]


async def test_an_execution_that_no_reader_waits_for_can_stall_too(serve: Serve) -> None:
    class Deaf(Stalling):
        """Continues after a stop."""

        async def execute(self, requests: Sequence[InferRequest]) -> AsyncGenerator[Answer, None]:
            try:
                async for each in super().execute(requests):
                    yield each
            finally:
                await asyncio.Event().wait()

    stalling, spare, watch = Deaf(), Spare(), ProgressWatch(STALL_SECS)
    model = serve(stalling, load=spare.load)
    first = model.submit(text_request("a"))
    await stalling.begun()
    first.cancel()
    second = model.submit(text_request("b"))
    await settle()
    assert len(model.requests) == 1
    look(watch, model, STALL_SECS + 1)
    (await spare.instance.begun()).finish("served")
    assert await soon(read_all(second)) == ["served"]


async def test_an_instance_that_stalls_while_its_model_ends_is_not_restarted() -> None:
    class Lingering(Stalling):
        """Takes its time to stop."""

        may_end = asyncio.Event()

        async def execute(self, requests: Sequence[InferRequest]) -> AsyncGenerator[Answer, None]:
            try:
                async for each in super().execute(requests):
                    yield each
            finally:
                await self.may_end.wait()

    stalling, spare, watch = Lingering(), Spare(), ProgressWatch(STALL_SECS)
    model = Model(TEXT, 1, ModelStatistics(), [InstanceSlot(spare.load, instance=stalling)])
    running = asyncio.create_task(model.run(lambda: None))
    with model.submit(text_request("a")):
        await stalling.begun()
        running.cancel()
        await settle()
        assert not running.done()
        look(watch, model, STALL_SECS + 1)
    stalling.may_end.set()
    await soon(asyncio.wait([running]))
    assert running.cancelled()
    await soon(model.close())
    assert stalling.closes == 1
    assert model.statistics.stalls == 0


async def test_a_defect_of_one_model_does_not_stop_the_watch(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stalling, watch = Stalling(), ProgressWatch(STALL_SECS)
    broken, model = serve(Stalling()), serve(stalling, load=Spare().load)
    with model.submit(text_request("a")), monkeypatch.context() as patched:
        await stalling.begun()

        def fail() -> Iterable[tuple[Record, ResponseStream]]:
            raise RuntimeError("a defect")

        patched.setattr(broken.requests, "items", fail)
        watch.look([broken, model], time.perf_counter_ns() + round((STALL_SECS + 1) * 1e9))
    assert stalling.killed
    (record,) = (each for each in caplog.records if each.message == "progress check failed")
    assert vars(record)["model"] == "text"
    assert "a defect" in str(record.exc_info)


async def test_progress_of_any_execution_is_progress_of_its_instance(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance, watch = Stalling(concurrency=None), ProgressWatch(STALL_SECS)
    model = serve(instance)
    with model.submit(text_request("a")) as quiet, model.submit(text_request("b")) as lively:
        await instance.begun()
        execution = await instance.begun()
        later = time.perf_counter_ns() + round((STALL_SECS + 1) * 1e9)
        with monkeypatch.context() as patched:
            patched.setattr(time, "perf_counter_ns", lambda: later)
            execution.answer(text_response("half"))
            assert await soon(lively.batch())
        watch.look([model], later + 1)
        assert not instance.killed
        watch.look([model], later + round((STALL_SECS + 1) * 1e9))
        assert instance.killed
        quiet.cancel()


async def test_a_slow_reader_is_no_stall(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    instance, watch = Stalling(), ProgressWatch(STALL_SECS)
    model = serve(instance)
    with model.submit(text_request("a")) as slow, model.submit(text_request("b")):
        execution = await instance.begun()
        for _ in range(DEFAULT_LIMIT):
            execution.answer(text_response("part"))
        await settle()
        look(watch, model, 1000)
        assert not instance.killed
        assert [vars(each)["waits_for"] for each in caplog.records] == ["its reader"]
        await soon(slow.batch())
        look(watch, model, 1000)
        assert instance.killed


async def test_waiting_for_another_model_is_no_stall(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    instance, watch = Stalling(), ProgressWatch(STALL_SECS)
    model = serve(instance)
    with model.submit(text_request("a")):
        await instance.begun()
        instance.called = ["other", "other"]
        look(watch, model, 1000)
        assert not instance.killed
        assert [vars(each)["waits_for"] for each in caplog.records] == ["model other"]


async def test_without_the_option_nothing_is_restarted(serve: Serve) -> None:
    instance, watch = Stalling(), ProgressWatch()
    model = serve(instance)
    with model.submit(text_request("a")):
        await instance.begun()
        look(watch, model, 1e6)
        assert not instance.killed
        assert model.ready


async def test_the_oldest_request_without_progress_is_logged_once_and_rarely_again(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    instance, watch = Stalling(), ProgressWatch()
    model = serve(instance)
    with model.submit(text_request("a")), model.submit(text_request("b")):
        await instance.begun()
        look(watch, model, 59)
        assert not caplog.records
        for secs in (61, 66, 600, 662):
            look(watch, model, secs)
    found = [(each.message, vars(each)["secs"], vars(each)["requests"]) for each in caplog.records]
    assert found == [("request without progress", 61, 2), ("request without progress", 662, 2)]
    assert vars(caplog.records[0])["waits_for"].startswith("instance ")


async def test_a_queued_request_is_logged_as_queued(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    instance, watch = Stalling(), ProgressWatch(STALL_SECS)
    model = serve(instance)
    with model.submit(text_request("a")) as first, model.submit(text_request("b")):
        await instance.begun()
        instance.called = ["other"]
        look(watch, model, 61)
        first.cancel()
        look(watch, model, 66)
        assert [vars(each)["waits_for"] for each in caplog.records] == ["model other", "the queue"]


async def test_the_age_of_the_oldest_request_is_known(serve: Serve) -> None:
    instance = Stalling()
    model = serve(instance)
    assert model.requests.oldest_secs() == 0
    with model.submit(text_request("a")):
        await instance.begun()
        first = model.requests.oldest_secs()
        assert 0 < first < model.requests.oldest_secs()
    assert model.requests.oldest_secs() == 0
