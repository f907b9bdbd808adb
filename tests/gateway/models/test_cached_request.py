"""A model with a cache answers from it and counts that; without a cache nothing changes."""

import asyncio
from dataclasses import replace

import pytest

from gateway.errors import Code, InferenceError, RetryLater
from gateway.messages import InferResponse, Phases
from gateway.models.model import Model
from gateway.stream import ResponseStream
from gateway.threads import Threads
from tests.builders import (
    FLAG,
    ScriptedInstance,
    read_all,
    settle,
    soon,
    text_request,
    text_response,
)
from tests.conftest import Serve
from tests.gateway.models.cached import CACHED, ORDERED, ask, cached, row


@pytest.fixture
async def instance() -> ScriptedInstance:
    """The model's only one."""
    return ScriptedInstance(concurrency=1)


async def hit(model: Model, text: str = "hello") -> list[str]:
    """The answer to a request, if it is there at once."""
    with model.submit(text_request(text)) as stream:
        assert stream.done
        return await soon(read_all(stream))


async def test_a_second_request_is_answered_without_the_model(
    serve: Serve, instance: ScriptedInstance
) -> None:
    model, cache = cached(serve, instance)
    assert model.cached
    assert await ask(model, instance) == ["answer to hello"]
    assert await hit(model) == ["answer to hello"]
    assert await ask(model, instance, "other") == ["answer to other"]
    assert instance.asked == ["hello", "other"]
    assert cache.reading().entries == 2


async def test_hits_and_misses_are_accounted_for_as_on_triton(
    serve: Serve, instance: ScriptedInstance
) -> None:
    model, _ = cached(serve, instance)
    await ask(model, instance)
    for _ in range(4):
        await hit(model)
    statistics = model.statistics
    assert (statistics.success.count, statistics.queue.count) == (5, 5)
    assert (statistics.inference_count, statistics.execution_count) == (1, 1)
    assert statistics.compute_infer.count == 1
    assert (statistics.cache_hit.count, statistics.cache_miss.count) == (4, 1)
    assert min(statistics.cache_hit.ns, statistics.cache_miss.ns) > 0
    assert statistics.success.ns >= statistics.cache_hit.ns + statistics.cache_miss.ns


async def test_concurrent_requests_all_run_and_the_first_response_is_cached(
    serve: Serve, instance: ScriptedInstance
) -> None:
    model, _ = cached(serve, instance)
    streams = [model.submit(text_request()) for _ in range(2)]
    for text, stream in zip(("first", "second"), streams, strict=True):
        with stream:
            (await instance.begun()).finish(text)
            assert await soon(read_all(stream)) == [text]
    assert await hit(model) == ["first"]
    assert (model.statistics.cache_miss.count, model.statistics.cache_hit.count) == (1, 1)


async def test_errors_are_not_kept(serve: Serve, instance: ScriptedInstance) -> None:
    model, cache = cached(serve, instance)
    with model.submit(text_request()) as stream:
        execution = await instance.begun()
        execution.answer(InferenceError(Code.INTERNAL, "no"))
        execution.end()
        with pytest.raises(InferenceError, match="no"):
            await soon(read_all(stream))
    assert cache.reading().entries == 0
    assert model.statistics.cache_miss.count == 0
    assert await ask(model, instance) == ["answer to hello"]


async def test_the_response_of_a_cancelled_request_is_not_cached(
    serve: Serve, instance: ScriptedInstance
) -> None:
    model, cache = cached(serve, instance)
    with model.submit(text_request()):
        execution = await instance.begun()
    execution.finish("late")
    await soon(execution.stopped.wait())
    assert cache.reading().entries == 0


@pytest.mark.parametrize(
    ("answers", "entries"),
    [
        ([text_response("a"), FLAG], 1),
        ([text_response("a"), text_response("b", final=True)], 0),
        ([FLAG], 0),
    ],
)
async def test_only_the_one_answer_of_a_request_is_kept(
    serve: Serve, instance: ScriptedInstance, answers: list[InferResponse], entries: int
) -> None:
    model, cache = cached(serve, instance)
    with model.submit(text_request()) as stream:
        execution = await instance.begun()
        for answer in answers:
            execution.answer(answer)
        execution.end()
        await soon(read_all(stream))
    assert cache.reading().entries == entries


async def test_tokens_and_phases_of_an_answer_are_not_counted_again(
    serve: Serve, instance: ScriptedInstance
) -> None:
    model, _ = cached(serve, instance)
    answer = text_response("a", final=True, tokens=7)
    with model.submit(text_request()) as stream:
        execution = await instance.begun()
        execution.answer(replace(answer, phases=Phases(1, 2, 3)))
        execution.end()
        await soon(read_all(stream))
    assert await hit(model) == ["a"]
    assert model.statistics.completion_tokens == 7
    assert model.statistics.compute_infer.count == 1


async def test_another_load_has_answers_of_its_own(
    serve: Serve, instance: ScriptedInstance
) -> None:
    model, cache = cached(serve, instance)
    await ask(model, instance)
    again = ScriptedInstance()
    reloaded = serve(again, config=CACHED)
    reloaded.use_cache(cache, b"next load", Threads("test", 1))
    with reloaded.submit(text_request()) as stream:
        (await again.begun()).finish("new")
        assert await soon(read_all(stream)) == ["new"]
    assert await hit(model) == ["answer to hello"]
    assert await hit(reloaded) == ["new"]


async def test_a_hit_needs_no_room_in_a_full_model(
    serve: Serve, instance: ScriptedInstance
) -> None:
    config = replace(CACHED, parameters={"max_in_flight": "1"})
    model, _ = cached(serve, instance, config=config)
    await ask(model, instance)
    with model.submit(text_request("busy")) as busy:
        execution = await instance.begun()
        assert await hit(model) == ["answer to hello"]
        with pytest.raises(InferenceError, match="requests in flight"):
            model.submit(text_request("another"))
        execution.finish("done")
        assert await soon(read_all(busy)) == ["done"]


async def test_a_hit_needs_no_room_in_a_full_queue_but_waits_for_its_turn(
    serve: Serve, instance: ScriptedInstance
) -> None:
    model, _ = cached(serve, instance, config=ORDERED)
    with model.submit(row("known")) as stream:
        (await instance.begun()).finish("kept")
        assert await soon(read_all(stream)) == ["kept"]
    with model.submit(row("busy")) as busy:
        execution = await instance.begun()
        with model.submit(row("queued")) as queued, model.submit(row("known")) as found:
            with pytest.raises(InferenceError, match="Exceeds maximum queue size"):
                model.submit(row("too many"))
            reader = asyncio.create_task(read_all(found))
            await settle()
            assert not reader.done()
            execution.finish("one")
            (await instance.begun()).finish("two")
            assert await soon(reader) == ["kept"]
            assert await soon(read_all(busy)) == ["one"]
            assert await soon(read_all(queued)) == ["two"]


async def test_a_model_that_is_not_able_refuses_what_it_has_answered_before(
    serve: Serve, instance: ScriptedInstance
) -> None:
    model, _ = cached(serve, instance, config=replace(CACHED, parameters={"restart_tries": "0"}))
    await ask(model, instance)
    instance.die("gone")
    await settle()
    with pytest.raises(InferenceError, match="gone"):
        model.submit(text_request())


async def test_an_uncounted_request_is_neither_counted_nor_answered_from_the_cache(
    serve: Serve,
) -> None:
    instance = ScriptedInstance()
    model, cache = cached(serve, instance)
    await ask(model, instance)
    before = (cache.reading(), model.statistics.success.count, model.statistics.inference_count)
    with model.call(replace(text_request(), uncounted=True)) as stream:
        (await instance.begun()).finish("another answer")
        assert await soon(read_all(stream)) == ["another answer"]
    await settle()
    found = (cache.reading(), model.statistics.success.count, model.statistics.inference_count)
    assert found == before


class Refusing:
    """Wakes no model."""

    def check(self) -> None:
        raise RetryLater("no room", 5)

    def wish(self, stream: ResponseStream) -> None:
        raise AssertionError("a request waits")


async def test_a_cached_response_is_given_while_the_model_is_asleep_and_cannot_wake(
    serve: Serve, instance: ScriptedInstance
) -> None:
    model, _ = cached(serve, instance)
    await ask(model, instance)
    model.instances.begin_asleep()
    model.waking = Refusing()
    with model.submit(text_request("hello")) as stream:
        assert await soon(read_all(stream)) == ["answer to hello"]
    with pytest.raises(RetryLater, match="no room"):
        model.submit(text_request("other"))
