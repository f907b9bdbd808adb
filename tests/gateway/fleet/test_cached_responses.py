"""The response cache of a router, for models of its replicas."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from gateway.cache.cache import LocalCache
from gateway.config import ModelResponseCache
from gateway.dataplane import DataPlane
from gateway.fleet.choice import ReplicaState
from gateway.messages import InferRequest, SequenceTag
from tests.builders import TEXT, soon, text_request
from tests.gateway.fleet.fake_replica import FakeReplica, listening, offered, until
from tests.gateway.fleet.test_router import Routed, routing, text

CACHED = replace(TEXT, response_cache=ModelResponseCache(enable=True))
IN_SEQUENCE = replace(text_request(), sequence=SequenceTag(7, start=True))


@pytest.fixture
async def replica() -> AsyncIterator[FakeReplica]:
    """A replica of `text`, whose responses may be cached."""
    async with listening() as found:
        found.offer(offered(CACHED))
        yield found


@pytest.fixture
async def routed(tmp_path: Path, replica: FakeReplica) -> AsyncIterator[Routed]:
    async with routing(tmp_path, replica, cache=LocalCache(1 << 20)) as found:
        yield found


async def asked(
    dataplane: DataPlane, replica: FakeReplica, request: InferRequest, answer: str
) -> bytes:
    """The response to a request, which the replica answers if it gets it."""
    with dataplane.infer(request) as stream:
        await until(lambda: bool(replica.calls) or stream.done)
        while replica.calls:
            replica.answer(replica.calls.pop(), answer)
        return text(await soon(stream.only()))


async def test_a_router_answers_from_its_cache_until_a_replica_has_another_load(
    routed: Routed, replica: FakeReplica
) -> None:
    async def ask(answer: str) -> bytes:
        return await asked(routed.dataplane, replica, text_request(), answer)

    assert await ask("first") == b"first"
    assert await ask("not asked") == b"first"
    replica.offer(offered(CACHED), state=replica.offers.state)
    assert await ask("not asked") == b"first"
    replica.offer(msgspec.structs.replace(offered(CACHED), loaded_at=7.0))
    (connection,) = routed.router.connections
    await until(lambda: connection.models["text", 1].loaded_at == 7.0)
    assert await ask("second") == b"second"
    assert await ask("not asked") == b"second"
    assert routed.dataplane.model("text").statistics.cache_hit.count == 3


async def test_responses_of_a_sequence_at_a_replica_are_not_cached(
    routed: Routed, replica: FakeReplica
) -> None:
    for answer in ("first", "second"):
        found = await asked(routed.dataplane, replica, IN_SEQUENCE, answer)
        assert found == answer.encode()


async def test_responses_of_a_model_without_a_cache_are_not_cached(
    routed: Routed, replica: FakeReplica
) -> None:
    replica.offer(offered(TEXT))
    await until(lambda: routed.config == TEXT)
    for answer in ("first", "second"):
        found = await asked(routed.dataplane, replica, text_request(), answer)
        assert found == answer.encode()


async def test_a_lost_replica_leaves_the_cache_as_it_is(
    tmp_path: Path, replica: FakeReplica
) -> None:
    async with listening() as other:
        other.offer(offered(CACHED), state=ReplicaState.DRAINING)
        async with routing(tmp_path, replica, other, cache=LocalCache(1 << 20)) as routed:
            found = await asked(routed.dataplane, replica, text_request(), "first")
            other.links[-1].abort()
            await until(lambda: routed.router.connections[1].state is None)
            again = await asked(routed.dataplane, replica, text_request(), "not asked")
            assert (found, again) == (b"first", b"first")
