"""A model with a cache answers from it and counts that; without a cache nothing changes."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest

from gateway.cache.cache import Insertion, Lookup, ResponseCache
from gateway.cache.local import LocalCache
from gateway.config import ModelConfig, ModelResponseCache
from gateway.config.scheduling import DynamicBatching, QueuePolicy
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest, InferResponse, Phases
from gateway.models.model import Model
from gateway.observability.metrics import CacheReading
from gateway.threads import LARGE_BYTES, Threads
from tests.builders import (
    FLAG,
    TEXT,
    ScriptedInstance,
    read_all,
    settle,
    soon,
    text_request,
    text_response,
    texts,
)
from tests.conftest import Serve

CACHED = replace(TEXT, response_cache=ModelResponseCache(enable=True))
BATCHING = DynamicBatching(
    preserve_ordering=True, default_queue_policy=QueuePolicy(max_queue_size=1)
)
ORDERED = replace(CACHED, dynamic_batching=BATCHING, max_batch_size=1)


class SlowCache(ResponseCache):
    """Settles lookups and insertions when the test says so."""

    def __init__(self) -> None:
        self.lookups: list[Lookup] = []
        self.inserted: list[tuple[InferResponse, Callable[[Insertion], None]]] = []

    def look_up(self, key: bytes) -> Lookup:
        self.lookups.append(Lookup())
        return self.lookups[-1]

    def insert(
        self, key: bytes, response: InferResponse, done: Callable[[Insertion], None]
    ) -> None:
        self.inserted.append((response, done))

    def reading(self) -> CacheReading:
        return CacheReading()


@pytest.fixture
async def instance() -> ScriptedInstance:
    """The model's only one."""
    return ScriptedInstance(concurrency=1)


def cached(serve: Serve, instance: ScriptedInstance, **options: Any) -> tuple[Model, LocalCache]:
    model = serve(instance, config=options.pop("config", CACHED), **options)
    cache = LocalCache(1 << 20)
    model.use_cache(cache, b"load", Threads("test", 1))
    return model, cache


def row(text: str) -> InferRequest:
    """A request for a model that batches."""
    request = text_request(text)
    return replace(request, inputs=tuple(replace(each, shape=(1, 1)) for each in request.inputs))


async def ask(model: Model, instance: ScriptedInstance, text: str = "hello") -> list[str]:
    """The answer to a request that the cache does not have."""
    with model.submit(text_request(text)) as stream:
        (await instance.begun()).finish(f"answer to {text}")
        return await soon(read_all(stream))


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


# A cache that answers later.


def slow(serve: Serve, instance: ScriptedInstance, config: ModelConfig = CACHED) -> Any:
    model, cache = serve(instance, config=config), SlowCache()
    model.use_cache(cache, b"load", Threads("test", 1))
    return model, cache


async def test_a_late_hit_answers(serve: Serve, instance: ScriptedInstance) -> None:
    model, cache = slow(serve, instance)
    with model.submit(text_request()) as stream:
        assert (stream.done, model.in_flight, model.statistics.pending) == (False, 1, 1)
        cache.lookups[0].settle(text_response("kept", final=True))
        assert await soon(read_all(stream)) == ["kept"]
    assert (model.statistics.cache_hit.count, model.statistics.queue.count) == (1, 1)
    assert cache.inserted == []
    assert instance.asked == []


async def test_a_late_miss_asks_the_model_and_counts_once_its_answer_is_kept(
    serve: Serve, instance: ScriptedInstance
) -> None:
    model, cache = slow(serve, instance)
    with model.submit(text_request()) as stream:
        cache.lookups[0].settle(None)
        (await instance.begun()).finish("made")
        assert await soon(read_all(stream)) == ["made"]
    [(response, done)] = cache.inserted
    assert (texts([response]), response.final) == (["made"], True)
    assert model.statistics.cache_miss.count == 0
    before = model.statistics.success.ns
    done(Insertion.REFUSED)
    assert model.statistics.cache_miss.count == 1
    assert model.statistics.success.ns == before + model.statistics.cache_miss.ns


async def test_a_disconnect_during_the_look_up_starts_no_execution(
    serve: Serve, instance: ScriptedInstance
) -> None:
    model, cache = slow(serve, instance)
    for found in (None, text_response("kept", final=True)):
        with model.submit(text_request()):
            pass
        cache.lookups[-1].settle(found)
    await settle()
    assert instance.asked == []
    assert (model.statistics.fail.count, model.statistics.success.count) == (2, 0)


async def test_a_queue_that_is_full_after_the_lookup_fails_the_request(
    serve: Serve, instance: ScriptedInstance
) -> None:
    model, cache = slow(serve, instance, ORDERED)
    with model.submit(row("busy")) as busy:
        cache.lookups[0].settle(None)
        execution = await instance.begun()
        streams = [model.submit(row(str(number))) for number in range(2)]
        for lookup in cache.lookups[1:]:
            lookup.settle(None)
        with pytest.raises(InferenceError, match="Exceeds maximum queue size"):
            await soon(read_all(streams[1]))
        streams[0].cancel()
        execution.finish("one")
        assert await soon(read_all(busy)) == ["one"]


async def test_lookups_under_way_take_room(serve: Serve, instance: ScriptedInstance) -> None:
    model, _ = slow(serve, instance, replace(CACHED, parameters={"max_in_flight": "1"}))
    with (
        model.submit(text_request()),
        pytest.raises(InferenceError, match="requests in flight"),
    ):
        model.submit(text_request("another"))


async def test_a_model_that_closes_ends_its_lookups(
    serve: Serve, instance: ScriptedInstance
) -> None:
    model, cache = slow(serve, instance)
    with model.submit(text_request()) as stream:
        model.abandon(InferenceError(Code.UNAVAILABLE, "closing"))
        with pytest.raises(InferenceError, match="closing"):
            await soon(read_all(stream))
    cache.lookups[0].settle(None)
    assert instance.asked == []


# Large requests, whose keys are computed in a thread.

LARGE = "x" * LARGE_BYTES


class Thread:
    """The one thread of a model's cache, which computes no key while it is held."""

    def __init__(self) -> None:
        self.threads = Threads("test", 1)
        self._gate = threading.Event()
        self._held = self.threads.start(self._gate.wait, 20.0)

    async def free(self) -> None:
        """Let it compute."""
        self._gate.set()
        await soon(self._held)


@pytest.fixture
async def thread() -> AsyncIterator[Thread]:
    found = Thread()
    yield found
    await found.free()
    found.threads.close()


async def test_a_large_request_is_answered_from_the_cache(
    serve: Serve, instance: ScriptedInstance
) -> None:
    model, cache = cached(serve, instance)
    assert await ask(model, instance, LARGE) == [f"answer to {LARGE}"]
    with model.submit(text_request(LARGE)) as stream:
        assert not stream.done
        assert await soon(read_all(stream)) == [f"answer to {LARGE}"]
    assert instance.asked == [LARGE]
    assert cache.reading().entries == 1
    assert (model.statistics.cache_hit.count, model.statistics.cache_miss.count) == (1, 1)


@pytest.mark.parametrize(("size", "waits"), [(LARGE_BYTES - 4, False), (LARGE_BYTES - 3, True)])
async def test_a_large_request_is_hashed_in_a_thread(
    serve: Serve, instance: ScriptedInstance, thread: Thread, size: int, *, waits: bool
) -> None:
    model, cache = serve(instance, config=CACHED), SlowCache()
    model.use_cache(cache, b"load", thread.threads)
    with model.submit(text_request("x" * size)):
        assert len(cache.lookups) == (not waits)


async def test_requests_behind_a_large_one_are_looked_up_behind_it(
    serve: Serve, instance: ScriptedInstance, thread: Thread
) -> None:
    model, cache = serve(instance, config=CACHED), SlowCache()
    model.use_cache(cache, b"load", thread.threads)
    with model.submit(text_request(LARGE)) as first, model.submit(text_request()) as second:
        await settle()
        assert cache.lookups == []
        await thread.free()
        while len(cache.lookups) < 2:
            await settle()
        for lookup, text in zip(cache.lookups, ("first", "second"), strict=True):
            lookup.settle(text_response(text, final=True))
        found = [await soon(read_all(stream)) for stream in (first, second)]
    assert found == [["first"], ["second"]]


async def test_a_disconnect_during_the_hashing_starts_no_execution(
    serve: Serve, instance: ScriptedInstance, thread: Thread
) -> None:
    model, cache = serve(instance, config=CACHED), SlowCache()
    model.use_cache(cache, b"load", thread.threads)
    with model.submit(text_request()) as behind:
        with model.submit(text_request(LARGE)):
            pass
        await settle()
        cache.lookups[0].settle(text_response("kept", final=True))
        assert await soon(read_all(behind)) == ["kept"]
    assert len(cache.lookups) == 1
    assert (model.in_flight, instance.asked) == (0, [])


async def test_a_large_request_is_refused_once_the_threads_are_closed(
    serve: Serve, instance: ScriptedInstance, thread: Thread
) -> None:
    model = serve(instance, config=CACHED)
    model.use_cache(SlowCache(), b"load", thread.threads)
    thread.threads.close()
    with pytest.raises(InferenceError, match="Server exiting"):
        model.submit(text_request(LARGE))
    assert model.in_flight == 0
