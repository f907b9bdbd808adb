"""The cache in Redis: order, timeout, and failures of the server."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import replace

import pytest
from redis import Redis

from gateway.cache import redis as redis_cache
from gateway.cache.cache import Insertion, Lookup, decode, portable
from gateway.cache.redis import PREFIX, RedisCache
from gateway.cache_settings import RedisCacheSettings
from gateway.errors import InferenceError
from tests.builders import WAIT_SECS, soon, text_response, texts
from tests.redis_server import HOST, Relay, redis_server, relay

ONE = portable(text_response("one", final=True))
LONG_MS = 4000
"""A timeout that no test reaches."""
SHORT_MS = 200
"""A timeout that tests reach, and no answer of the server on a busy machine."""
LATE_MS = 500
"""Likewise, with answers that need new connections."""

Start = Callable[..., Awaitable[RedisCache]]


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """The address of a real server."""
    with redis_server() as found:
        yield found


@pytest.fixture
def inside(port: int) -> Iterator["Redis[bytes]"]:
    """The server's own data, emptied afterwards."""
    with Redis(host=HOST, port=port, protocol=2) as client:
        yield client
        client.flushall()


@pytest.fixture
async def line(port: int) -> AsyncIterator[Relay]:
    """The way to the server."""
    async with relay(port) as found:
        yield found


@pytest.fixture
async def start(line: Relay, inside: object) -> AsyncIterator[Start]:
    """Connect caches, and run them until the test ends."""
    tasks: list[asyncio.Task[None]] = []

    async def run(socket_timeout_ms: int = LONG_MS) -> RedisCache:
        settings = RedisCacheSettings(
            host=HOST, port=line.port, socket_timeout_ms=socket_timeout_ms
        )
        cache = RedisCache(settings)
        await soon(cache.connect())
        tasks.append(asyncio.create_task(cache.run()))
        return cache

    yield run
    for task in tasks:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await soon(task)


async def settled(lookup: Lookup) -> list[str]:
    """The result of a lookup."""
    done = asyncio.Event()
    lookup.then(done.set)
    await soon(done.wait())
    return texts([lookup.response] if lookup.response else [])


async def inserted(cache: RedisCache, key: bytes, text: str = "one") -> Insertion:
    outcome: asyncio.Future[Insertion] = asyncio.get_running_loop().create_future()
    cache.insert(key, portable(text_response(text)), outcome.set_result)
    return await soon(outcome)


async def until(holds: Callable[[], bool]) -> None:
    """Look again and again; the recovery has no other sign."""
    deadline = time.monotonic() + WAIT_SECS
    while not holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def test_caches_share_their_entries(start: Start) -> None:
    one, other = await start(), await start()
    assert await settled(other.look_up(b"k")) == []
    assert await inserted(one, b"k") is Insertion.KEPT
    assert await settled(other.look_up(b"k")) == ["one"]
    assert await inserted(other, b"k", "two") is Insertion.PRESENT
    assert await settled(one.look_up(b"k")) == ["one"]
    assert one.reading().entries is None
    found = other.reading()
    assert (found.lookups, found.hits, found.misses) == (2, 1, 1)
    assert found.lookup_us > 0
    assert found.insertion_us > 0


async def test_the_key_says_whose_it_is(start: Start, inside: "Redis[bytes]") -> None:
    cache = await start()
    await inserted(cache, b"k")
    assert inside.keys() == [f"{PREFIX}{b'k'.hex()}".encode()]
    entry = inside.get(PREFIX + b"k".hex())
    assert isinstance(entry, bytes)
    assert decode(entry) == ONE


async def test_lookups_are_settled_in_their_order(start: Start) -> None:
    cache = await start()
    for number in range(0, 300, 3):
        await inserted(cache, b"%d" % number, str(number))
    told: list[int] = []
    lookups = [cache.look_up(b"%d" % number) for number in range(300)]
    for number, lookup in enumerate(lookups):
        lookup.then(lambda number=number: told.append(number))  # type: ignore[misc]
    await until(lambda: len(told) == len(lookups))
    assert told == list(range(300))
    found = [texts([each.response])[0] for each in lookups if each.response is not None]
    assert found == [str(number) for number in range(0, 300, 3)]


@pytest.mark.parametrize("entry", [b"", b"junk", b"\xff" * 100])
async def test_a_damaged_entry_is_a_miss(
    start: Start, inside: "Redis[bytes]", entry: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    cache = await start()
    inside.set(PREFIX + b"k".hex(), entry)
    assert await settled(cache.look_up(b"k")) == []
    assert "is damaged" in caplog.text


async def test_an_answer_that_cannot_be_encoded_is_refused(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    cache, outcomes = await start(), list[Insertion]()
    odd = replace(ONE, parameters={"p": object()})  # type: ignore[dict-item]
    cache.insert(b"k", odd, outcomes.append)
    assert outcomes == [Insertion.REFUSED]
    assert f"Failed to insert key [{b'k'.hex()}] into response cache: " in caplog.text


async def test_a_server_that_hangs_delays_a_lookup_by_the_timeout_at_most(
    start: Start, line: Relay, caplog: pytest.LogCaptureFixture
) -> None:
    cache = await start(SHORT_MS)
    line.flowing.clear()
    began = time.monotonic()
    assert [await settled(each) for each in [cache.look_up(b"a"), cache.look_up(b"b")]] == [[], []]
    assert SHORT_MS / 1000 * 0.8 < time.monotonic() - began < 1
    assert all(cache.look_up(b"%d" % number).missed for number in range(1000))
    assert await inserted(cache, b"k") is Insertion.REFUSED
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert [record.getMessage() for record in errors] == [
        "redis does not answer: lookups of the response cache miss"
    ]


async def test_a_server_that_answers_again_is_used_again(
    start: Start, line: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_cache, "PROBE_SECS", 0.01)
    cache = await start()
    await inserted(cache, b"k")
    await line.cut()
    assert await settled(cache.look_up(b"k")) == []
    assert cache.look_up(b"k").missed
    await line.start()
    await until(lambda: not cache.look_up(b"k").done)
    assert await settled(cache.look_up(b"k")) == ["one"]


async def test_waiting_lookups_are_settled_when_the_cache_ends(start: Start, line: Relay) -> None:
    settings = RedisCacheSettings(host=HOST, port=line.port, socket_timeout_ms=0)
    cache, outcomes = RedisCache(settings), list[Insertion]()
    await soon(cache.connect())
    running = asyncio.create_task(cache.run())
    line.flowing.clear()
    lookup = cache.look_up(b"k")
    for key in (b"a", b"b"):
        cache.insert(key, ONE, outcomes.append)
    await until(lambda: line.accepted >= 2)
    running.cancel()
    with suppress(asyncio.CancelledError):
        await soon(running)
    assert lookup.missed
    assert outcomes == [Insertion.REFUSED] * 2
    assert cache.look_up(b"k").missed


async def test_answers_do_not_pile_up_before_a_slow_server(
    start: Start, line: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, outcomes = await start(), list[Insertion]()
    entry = len(redis_cache.encode(ONE))
    monkeypatch.setattr(redis_cache, "PENDING_BYTES", 2 * entry)
    line.flowing.clear()
    for key in (b"a", b"b", b"c"):
        cache.insert(key, ONE, outcomes.append)
    assert outcomes == [Insertion.REFUSED]
    line.flowing.set()
    await until(lambda: len(outcomes) == 3)
    assert outcomes[1:] == [Insertion.KEPT] * 2
    assert await inserted(cache, b"d") is Insertion.KEPT


async def test_an_insertion_that_is_late_is_given_up_and_says_so_once(
    start: Start, line: Relay, caplog: pytest.LogCaptureFixture
) -> None:
    cache = await start(LATE_MS)
    line.flowing.clear()
    assert [await inserted(cache, key) for key in (b"a", b"b")] == [Insertion.REFUSED] * 2
    line.flowing.set()
    assert await settled(cache.look_up(b"other")) == []
    assert await inserted(cache, b"c") is Insertion.KEPT
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert told == [
        f"Failed to insert key [{PREFIX}{b'a'.hex()}] into response cache: no answer in time"
    ]


@pytest.mark.parametrize("host", [HOST, "no.such.host.invalid", "a..b"])
async def test_an_unreachable_server_at_the_start_is_an_error(host: str) -> None:
    cache = RedisCache(RedisCacheSettings(host=host, port=1))
    with pytest.raises(InferenceError) as caught:
        await soon(cache.connect())
    assert caught.value.message.startswith(
        f"Failed to initialize RedisCache: Failed to connect to Redis at {host}:1: "
    )


async def test_a_silent_server_at_the_start_is_an_error(line: Relay) -> None:
    line.flowing.clear()
    cache = RedisCache(
        RedisCacheSettings(
            host=HOST, port=line.port, connect_timeout_ms=SHORT_MS, socket_timeout_ms=SHORT_MS
        )
    )
    with pytest.raises(InferenceError, match=r"no answer in time|imeout"):
        await soon(cache.connect())


async def test_credentials_are_sent_to_the_server_only(line: Relay) -> None:
    settings = RedisCacheSettings(host=HOST, port=line.port, user="nobody", password="hush")
    with pytest.raises(InferenceError, match=r"WRONGPASS|invalid username") as caught:
        await soon(RedisCache(settings).connect())
    assert "hush" not in caught.value.message + repr(settings)
