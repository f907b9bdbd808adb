"""A cache that answers later, and large requests."""

import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest

from gateway.cache.cache import Insertion, Lookup, ResponseCache
from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError
from gateway.messages import InferResponse
from gateway.observability.statistics import CacheReading
from gateway.threads import LARGE_BYTES, Threads
from tests.builders import (
    ScriptedInstance,
    read_all,
    settle,
    soon,
    text_request,
    text_response,
    texts,
)
from tests.conftest import Serve
from tests.gateway.models.cached import CACHED, ORDERED, ask, cached, row


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


# A cache that answers later.


def slow(serve: Serve, instance: ScriptedInstance, config: ModelConfig = CACHED) -> Any:
    model, cache = serve(instance, config=config), SlowCache()
    model.use_cache(cache, b"load", Threads("test", 1))
    return model, cache


async def test_a_late_hit_answers(serve: Serve, instance: ScriptedInstance) -> None:
    model, cache = slow(serve, instance)
    with model.submit(text_request()) as stream:
        assert (stream.done, len(model.requests), model.statistics.pending) == (False, 1, 1)
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
        model.requests.abandon(InferenceError(Code.UNAVAILABLE, "closing"))
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
    assert (len(model.requests), instance.asked) == (0, [])


async def test_a_large_request_is_refused_once_the_threads_are_closed(
    serve: Serve, instance: ScriptedInstance, thread: Thread
) -> None:
    model = serve(instance, config=CACHED)
    model.use_cache(SlowCache(), b"load", thread.threads)
    thread.threads.close()
    with pytest.raises(InferenceError, match="Server exiting"):
        model.submit(text_request(LARGE))
    assert len(model.requests) == 0
