"""A router of replicas whose descriptions of a model differ, as they do while it is replaced."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from gateway.cache.cache import LocalCache
from gateway.config import InstanceGroup, InstanceKind, ModelConfig, ModelResponseCache
from gateway.fleet import router
from gateway.fleet.choice import ReplicaState
from gateway.fleet.directory import Listing
from gateway.messages import SequenceTag
from tests.builders import TEXT, soon, text_request
from tests.gateway.fleet.fake_replica import FakeReplica, listening, offered, until
from tests.gateway.fleet.routing import Routed, answered, calls, routing, text
from tests.gateway.fleet.test_router import CHANGED

TWO_INSTANCES = (InstanceGroup(kind=InstanceKind.KIND_CPU, count=2),)
FASTER = replace(TEXT, instance_group=TWO_INSTANCES, parameters={"engine": "fast"})
"""A configuration that requests cannot tell from that of `TEXT`."""
CACHED = replace(TEXT, response_cache=ModelResponseCache(enable=True))
KEY = ("text", 1)


@pytest.fixture
async def replicas() -> AsyncIterator[list[FakeReplica]]:
    """Four replicas of a model; most tests use less."""
    async with AsyncExitStack() as owner:
        found = [await owner.enter_async_context(listening()) for _ in range(4)]
        for each in found:
            each.offer(offered(TEXT))
        yield found


async def used(routed: Routed, replicas: Sequence[FakeReplica]) -> set[FakeReplica]:
    """The replicas that get requests."""
    return {await answered(routed, *replicas) for _ in range(12 * len(replicas))}


async def taken(routed: Routed, place: int, config: ModelConfig) -> None:
    """Wait until the router has the offer of a replica."""
    connection = routed.router.connections[place]
    expected = offered(config).config
    await until(lambda: KEY in connection.models and connection.models[KEY].config == expected)


async def test_replicas_of_configurations_that_requests_cannot_tell_apart_are_used_together(
    tmp_path: Path, replicas: list[FakeReplica]
) -> None:
    first, second, *_ = replicas
    second.offer(offered(FASTER))
    async with routing(tmp_path, first, second) as routed:
        model = routed.dataplane.model("text")
        assert await used(routed, (first, second)) == {first, second}
        first.offer(offered(FASTER))
        await until(lambda: routed.config == FASTER)
        assert model.retired
        assert await used(routed, (first, second)) == {first, second}


async def test_of_different_models_that_of_most_ready_replicas_is_used_and_of_as_many_the_present(
    tmp_path: Path, replicas: list[FakeReplica]
) -> None:
    async with routing(tmp_path, *replicas) as routed:
        expected = [TEXT, TEXT, CHANGED, CHANGED]
        for place, config in enumerate(expected):
            replicas[place].offer(offered(CHANGED))
            await taken(routed, place, CHANGED)
            assert routed.config == config
        for place in range(2):
            replicas[place].offer(offered(TEXT))
            await taken(routed, place, TEXT)
        assert routed.config == CHANGED
        assert await used(routed, replicas) == set(replicas[2:])
        replicas[2].offer(offered(CHANGED), state=ReplicaState.DRAINING)
        await until(lambda: routed.config == TEXT)
        assert await used(routed, replicas) == set(replicas[:2])


async def test_of_different_models_the_wanted_one_is_used_once_a_replica_of_it_is_ready(
    tmp_path: Path, replicas: list[FakeReplica], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, new, _ = replicas
    places = tuple(("127.0.0.1", each.port) for each in (first, second, new))
    tables: asyncio.Queue[Listing] = asyncio.Queue()

    async def listings(*settings: object) -> AsyncIterator[Listing]:
        while True:
            yield await tables.get()

    monkeypatch.setattr(router, "listings", listings)
    new.offer(msgspec.structs.replace(offered(CHANGED), trouble="it is loading"))
    tables.put_nowait(Listing(places))
    async with routing(tmp_path, first, second, new) as routed:
        tables.put_nowait(Listing(places, frozenset(places[:2])))
        await until(tables.empty)
        assert await used(routed, (first, second)) == {first, second}
        new.offer(offered(CHANGED))
        await until(lambda: routed.config == CHANGED)
        assert await used(routed, (first, second, new)) == {new}
        # The first one is silent: it has no address in the table, and its connection is kept.
        tables.put_nowait(Listing(places[1:], frozenset(places[1:2])))
        await until(tables.empty)
        assert await used(routed, (first, second, new)) == {new}
        tables.put_nowait(Listing(places, frozenset(places[2:])))
        await until(lambda: routed.config == TEXT)


async def test_sequences_stay_at_their_replicas_when_the_model_is_replaced(
    tmp_path: Path, replicas: list[FakeReplica]
) -> None:
    first, second, *_ = replicas
    second.offer()
    async with routing(tmp_path, first, second) as routed:

        async def place(number: int, *, start: bool = False) -> FakeReplica:
            request = replace(text_request(), sequence=SequenceTag(number, start=start))
            with routed.dataplane.infer(request) as stream:
                (found,) = await calls(first, second)
                found.answer(found.calls.pop(), "hello")
                await soon(stream.only())
            return found

        assert {await place(number, start=True) for number in range(1, 9)} == {first}
        second.offer(offered(FASTER))
        await taken(routed, 1, FASTER)
        first.offer(offered(FASTER))
        await until(lambda: routed.config == FASTER)
        assert {await place(number) for number in range(1, 9)} == {first}


async def test_requests_without_a_version_go_to_the_highest_one_that_takes_requests(
    tmp_path: Path, replicas: list[FakeReplica]
) -> None:
    old, new, *_ = replicas
    new.offer(offered(TEXT, 2, trouble="it is loading"))
    async with routing(tmp_path, old, new) as routed:

        def version() -> str:
            return routed.dataplane.model("text").version

        assert (version(), await answered(routed, old, new)) == ("1", old)
        new.offer(offered(TEXT, 2))
        await until(lambda: version() == "2")
        assert await answered(routed, old, new) is new
        new.offer(offered(TEXT, 2), state=ReplicaState.DRAINING)
        await until(lambda: version() == "1")
        assert await answered(routed, old, new) is old
        old.offer(offered(TEXT, 1), state=ReplicaState.DRAINING)
        await until(lambda: version() == "2")


async def test_cached_responses_of_an_earlier_configuration_are_forgotten_with_its_last_replica(
    tmp_path: Path, replicas: list[FakeReplica]
) -> None:
    new, old, *_ = replicas
    new.offer(offered(replace(CACHED, parameters={"engine": "fast"})))
    old.offer(offered(CACHED))
    async with routing(tmp_path, new, old, cache=LocalCache(1 << 20)) as routed:

        async def ask(answer: str) -> bytes:
            with routed.dataplane.infer(text_request()) as stream:
                await until(lambda: stream.done or any(each.calls for each in replicas))
                for each in replicas:
                    while each.calls:
                        each.answer(each.calls.pop(), answer)
                return text(await soon(stream.only()))

        assert await ask("first") == b"first"
        assert await ask("not asked") == b"first"
        old.lose()
        old.offer()
        await until(lambda: routed.router.connections[1].models == {})
        assert await ask("second") == b"second"
