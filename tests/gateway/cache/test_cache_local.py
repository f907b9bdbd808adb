"""The cache in the process keeps what was used last, and never more than it may."""

import logging
import random
import tracemalloc
from collections import OrderedDict

import pytest

from gateway.cache.cache import Insertion, LocalCache, entry_bytes, portable
from gateway.messages import InferResponse
from tests.builders import text_response, texts

ONE = portable(text_response("one", final=True))
SIZE = entry_bytes(ONE)


def answer(size: int) -> InferResponse:
    return portable(text_response("x" * size, final=True))


def insert(cache: LocalCache, name: str, response: InferResponse = ONE) -> Insertion:
    outcomes: list[Insertion] = []
    cache.insert(name.encode(), response, outcomes.append)
    assert len(outcomes) == 1
    return outcomes[0]


def kept(cache: LocalCache, *names: str) -> list[str]:
    return [name for name in names if cache.look_up(name.encode()).response is not None]


def test_an_inserted_response_is_found_at_once() -> None:
    cache = LocalCache(10 * SIZE)
    assert cache.look_up(b"a").missed
    assert insert(cache, "a") is Insertion.KEPT
    lookup = cache.look_up(b"a")
    assert lookup.done
    assert lookup.response is not None
    assert texts([lookup.response]) == ["one"]


def test_the_first_answer_stays() -> None:
    cache = LocalCache(10 * SIZE)
    assert insert(cache, "a") is Insertion.KEPT
    assert insert(cache, "a", answer(9)) is Insertion.PRESENT
    assert cache.look_up(b"a").response == ONE
    assert cache.used_bytes == SIZE


def test_the_least_recently_used_entry_is_evicted_first() -> None:
    cache = LocalCache(3 * SIZE)
    for name in "abc":
        insert(cache, name)
    assert kept(cache, "a") == ["a"]
    insert(cache, "d")
    assert kept(cache, *"abcd") == ["a", "c", "d"]


def test_an_answer_of_the_whole_size_fits_and_one_byte_more_does_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cache = LocalCache(entry_bytes(answer(100)))
    insert(cache, "small")
    assert insert(cache, "large", answer(101)) is Insertion.REFUSED
    assert kept(cache, "small") == ["small"]
    assert insert(cache, "whole", answer(100)) is Insertion.KEPT
    assert kept(cache, "small", "whole") == ["whole"]
    assert cache.reading().utilization == 1.0
    [record] = caplog.records
    assert record.getMessage().startswith(
        f"Failed to insert key [{b'large'.hex()}] into response cache: "
    )


def test_only_the_first_answer_that_is_too_large_is_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cache = LocalCache(1)
    with caplog.at_level(logging.DEBUG, "sluice.cache"):
        assert {insert(cache, name) for name in "abc"} == {Insertion.REFUSED}
    assert [record.levelname for record in caplog.records] == ["WARNING", "DEBUG", "DEBUG"]
    assert (cache.reading().entries, cache.used_bytes) == (0, 0)


@pytest.mark.parametrize("seed", range(20))
def test_the_cache_evicts_the_least_recently_used_beyond_its_bytes(seed: int) -> None:
    chance = random.Random(seed)
    limit = chance.randrange(SIZE, 20 * SIZE)
    cache, model, evictions = LocalCache(limit), OrderedDict[str, int](), 0
    for _ in range(500):
        name = str(chance.randrange(40))
        if chance.random() < 0.4:
            found = bool(kept(cache, name))
            assert found == (name in model)
            if found:
                model.move_to_end(name)
            continue
        response = answer(chance.randrange(0, 3 * limit // 2) if chance.random() < 0.3 else 8)
        size = entry_bytes(response)
        outcome = insert(cache, name, response)
        if name in model:
            assert outcome is Insertion.PRESENT
        elif size > limit:
            assert outcome is Insertion.REFUSED
        else:
            assert outcome is Insertion.KEPT
            while sum(model.values()) + size > limit:
                model.popitem(last=False)
                evictions += 1
            model[name] = size
        assert cache.used_bytes == sum(model.values()) <= limit
    reading = cache.reading()
    assert (reading.entries, reading.evictions) == (len(model), evictions)
    assert reading.utilization == pytest.approx(cache.used_bytes / limit)


@pytest.mark.parametrize("size", [0, 64, 5000])
def test_the_memory_it_takes_is_less_than_it_says(size: int) -> None:
    cache = LocalCache(1 << 30)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(1000):
            insert(cache, f"{number:032}", answer(size))
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert cache.used_bytes / 2 < after - before < cache.used_bytes


def test_lookups_and_evictions_are_counted() -> None:
    cache = LocalCache(2 * SIZE)
    for name in "abc":
        cache.look_up(name.encode())
        insert(cache, name)
    kept(cache, "b", "c")
    found = cache.reading()
    assert (found.lookups, found.hits, found.misses) == (5, 2, 3)
    assert (found.entries, found.evictions, found.utilization) == (2, 1, 1.0)
