"""Copies of conversations between replicas: on the way, at routers, and after a loss."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.conversations.copies import ConversationCopy
from gateway.dataplane import DataPlane
from gateway.errors import Code, InferenceError, RefusedError
from gateway.fleet import connection, copies
from gateway.fleet.choice import ReplicaState
from gateway.fleet.connection import ReplicaConnection
from gateway.fleet.handshake import FleetKind
from gateway.fleet.replica import FleetPort
from gateway.messages import InferRequest, SequenceTag
from gateway.processes.channel import LASTING_CALL, number
from gateway.settings import FleetSettings, ModelSettings
from tests.builders import TEXT, soon, text_request
from tests.conformance.models import HOLD, identity, with_parameters
from tests.gateway.conversations.chats import turn
from tests.gateway.fleet.fake_replica import FakeReplica, listening, offered, until
from tests.gateway.fleet.in_one_loop import SETTINGS, running
from tests.gateway.fleet.large_ends import Replica, connecting, listening_port
from tests.gateway.fleet.routing import Routed, calls, routing
from tests.serving import held, write_model

ECHO = identity("BYTES", "1").replace("INPUT", "messages").replace("OUTPUT", "text_output")
"""A chat model whose answer is all that it is given."""
LARGE = 3 << 20


def copied(conversation: int = 1, size: int = 100, **fields: Any) -> ConversationCopy:
    """A copy of that many bytes."""
    found = ConversationCopy("text", 1, "", conversation, 5, 1, 7, b"m" * size)
    return msgspec.structs.replace(found, **fields)


# On the way.


class Ends:
    """A router's connection to a replica, and the copies that the replica has kept."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.kept: list[ConversationCopy] = []
        self.router: ReplicaConnection
        replica.port.copies.keep = self.kept.append  # type: ignore[method-assign]

    def send_raw(self, kind: int, payload: bytes) -> None:
        """Send a frame of copies to the replica."""
        assert self.router._channel is not None  # noqa: SLF001 - a router that sends nonsense
        self.router._channel.send(kind, LASTING_CALL, payload)  # noqa: SLF001


@pytest.fixture
async def ends() -> AsyncIterator[Ends]:
    async with listening_port() as replica:
        found = Ends(replica)
        async with connecting(replica.port.ports["fleet"]) as found.router:
            yield found


async def test_copies_of_any_size_arrive(ends: Ends) -> None:
    sent = [copied(1), copied(2, LARGE), copied(3, LARGE, tenant="ours"), copied(4)]
    for each in sent:
        ends.router.send_copy(each)
    await until(lambda: len(ends.kept) == 4)
    assert [each.correlation_id for each in ends.kept[:2]] == [1, 4]  # large ones delay no others
    assert sorted(ends.kept, key=lambda each: int(each.correlation_id)) == sent


@pytest.mark.parametrize("size", [0, 100, LARGE + 1], ids=["void", "small", "large"])
async def test_a_large_copy_that_a_later_one_of_its_conversation_overtakes_is_dropped(
    ends: Ends, size: int
) -> None:
    later = copied(1, size, turns=2)
    for each in (copied(1, LARGE), copied(2, LARGE), later):
        ends.router.send_copy(each)
    await until(lambda: copied(2, LARGE) in ends.kept and later in ends.kept)
    await until(lambda: _is_idle(ends.router))
    assert copied(1, LARGE) not in ends.kept
    assert len(ends.kept) == 2


async def test_a_copy_beyond_the_bytes_under_way_makes_the_earlier_ones_void(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "MOST_BYTES_UNDER_WAY", 1000)
    for size in (600, 500, 400):
        ends.router.send_copy(copied(size=size))
    await until(lambda: len(ends.kept) == 3)
    assert [len(each.messages) for each in ends.kept] == [600, 0, 400]
    assert ends.router.counts.copies_dropped == 1
    for count in range(4, 8):  # room once they are taken
        await until(lambda: _is_idle(ends.router))
        ends.router.send_copy(copied(size=1000))
        await until(lambda count=count: len(ends.kept) == count)
    assert ends.router.counts.copies_dropped == 1


def _is_idle(router: ReplicaConnection) -> bool:
    assert router._copies is not None  # noqa: SLF001 - the acknowledgements of a test
    return router._copies.is_idle  # noqa: SLF001


async def test_a_malformed_copy_is_dropped_alone_and_logged_once(
    ends: Ends, caplog: pytest.LogCaptureFixture
) -> None:
    foreign = msgspec.msgpack.encode(["text", -1, "", 1])
    for payload in (b"", b"\xc1", foreign, msgspec.msgpack.encode(["text", 1, "", 1.5])):
        ends.send_raw(FleetKind.COPY, payload)
    ends.send_raw(FleetKind.LARGE_COPY, b"")
    ends.send_raw(FleetKind.LARGE_COPY, number(0) + foreign)
    ends.router.send_copy(copied(1, LARGE))
    await until(lambda: len(ends.kept) == 1)
    assert ends.kept == [copied(1, LARGE)]
    assert caplog.text.count("copy of a conversation dropped") == 1
    assert "frame not handled" not in caplog.text
    assert ends.router.serves(("text", 1))


# At a router.


@pytest.fixture
async def replicas() -> AsyncIterator[list[FakeReplica]]:
    """Three replicas of `text`."""
    async with AsyncExitStack() as owner:
        found = [await owner.enter_async_context(listening()) for _ in range(3)]
        for each in found:
            each.offer(offered(TEXT))
        yield found


@pytest.fixture
async def routed(
    tmp_path: Path, replicas: list[FakeReplica], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Routed]:
    monkeypatch.setattr(connection, "FIRST_PAUSE_SECS", 0.01)
    async with routing(tmp_path, *replicas) as found:
        yield found


async def placed(
    routed: Routed, replicas: list[FakeReplica], conversation: int, *, start: bool = False
) -> FakeReplica:
    """The replica of a turn, which sends a copy behind it."""
    request = replace(text_request(), sequence=SequenceTag(conversation, start=start))
    with routed.dataplane.infer(request) as stream:
        (found,) = await calls(*replicas)
        found.answer(found.calls.pop(), "hello")
        await soon(stream.only())
    return found


async def kept(replicas: list[FakeReplica], source: FakeReplica, copy: ConversationCopy) -> Any:
    """The replica that gets the copy of another one."""
    source.copies.send(copy)
    await until(lambda: any(copy in each.kept for each in replicas))
    (found,) = [each for each in replicas if copy in each.kept]
    return found


async def test_a_conversation_goes_to_its_copy_and_not_to_a_new_process_of_its_address(
    routed: Routed, replicas: list[FakeReplica]
) -> None:
    for conversation in range(1, 9):
        first = await placed(routed, replicas, conversation, start=True)
        second = await kept(replicas, first, copied(conversation))
        assert second is not first
        assert await kept(replicas, first, copied(conversation, turns=2)) is second
        count = len(first.links)
        first.restart()
        await until(lambda count=count, first=first: len(first.links) > count)
        await until(lambda: all(each.serves(("text", 1)) for each in routed.router.connections))
        assert await placed(routed, replicas, conversation) is second
        third = await kept(replicas, second, copied(conversation, turns=3))
        assert third is not second


async def test_a_copy_replaces_the_earlier_one_also_when_a_replica_has_come(
    tmp_path: Path, replicas: list[FakeReplica]
) -> None:
    replicas[2].offer()
    async with routing(tmp_path, *replicas) as routed:
        places = {}
        for conversation in range(1, 9):
            first = await placed(routed, replicas, conversation, start=True)
            places[conversation] = first, await kept(replicas, first, copied(conversation))
        replicas[2].offer(offered(TEXT))
        await until(lambda: all(each.serves(("text", 1)) for each in routed.router.connections))
        for conversation, (first, second) in places.items():
            assert await kept(replicas, first, copied(conversation, turns=2)) is second


async def test_another_router_finds_the_copy_of_a_lost_replica_by_the_order(
    tmp_path: Path, replicas: list[FakeReplica]
) -> None:
    async with routing(tmp_path, *replicas) as routed:
        first = await placed(routed, replicas, 7, start=True)
        second = await kept(replicas, first, copied(7))
    others = [each for each in replicas if each is not first]
    async with routing(tmp_path, *others) as routed:
        assert await placed(routed, others, 7) is second


async def test_a_draining_replica_keeps_no_copies(
    routed: Routed, replicas: list[FakeReplica]
) -> None:
    first = await placed(routed, replicas, 7, start=True)
    second = await kept(replicas, first, copied(7))
    second.offer(offered(TEXT), state=ReplicaState.DRAINING)
    ready = routed.router.connections
    await until(lambda: sum(each.serves(("text", 1)) for each in ready) == 2)
    third = await kept(replicas, first, copied(7, turns=2))
    assert third not in (first, second)


async def test_a_turn_that_a_draining_replica_refuses_goes_to_the_copy(
    routed: Routed, replicas: list[FakeReplica]
) -> None:
    first = await placed(routed, replicas, 7, start=True)
    second = await kept(replicas, first, copied(7))
    first.offer(offered(TEXT), state=ReplicaState.DRAINING)
    await until(lambda: sum(each.serves(("text", 1)) for each in routed.router.connections) == 2)
    with routed.dataplane.infer(replace(text_request(), sequence=SequenceTag(7))) as stream:
        await until(lambda: bool(first.calls))
        first.fail(first.calls.pop(), RefusedError(Code.UNAVAILABLE, "Server exiting"))
        await until(lambda: bool(second.calls))
        second.answer(second.calls.pop(), "hello")
        await soon(stream.only())


async def test_a_copy_of_an_unknown_model_is_ignored(
    routed: Routed, replicas: list[FakeReplica]
) -> None:
    first = replicas[0]
    for each in (copied(model="other"), copied(version=2)):
        first.copies.send(each)
    assert await kept(replicas, first, copied()) is not first
    assert sum(len(each.kept) for each in replicas) == 1


# After a loss, with whole servers.


class Fleet:
    """A router, and two replicas of `chat`."""

    def __init__(self, router: DataPlane, replicas: list[DataPlane]) -> None:
        self.router = router
        self.replicas = replicas

    async def say(self, text: str, conversation: int, **options: Any) -> list[str]:
        """The messages that the model is given in a turn, which are also its answer."""
        request: InferRequest = turn(text, conversation, **options)
        with self.router.infer(request) as stream:
            response = await soon(stream.only())
        answer = json.loads(response.outputs[0].elements()[0])
        return [each["content"] for each in answer]

    @property
    def sizes(self) -> list[int]:
        """The bytes of conversations and copies at each replica."""
        return [each.conversations.byte_size for each in self.replicas]

    @property
    def is_copied(self) -> bool:
        """Whether both have all of them; the commas between the messages of a copy count."""
        first, second = self.sizes
        return abs(first - second) < 20

    def counts(self) -> list[int]:
        """The open conversations of each replica."""
        return [each.conversations.count(each.model("chat")) for each in self.replicas]


@asynccontextmanager
async def fleet(folder: Path, **parameters: object) -> AsyncIterator[Fleet]:
    write_model(folder / "models", "chat", ECHO + with_parameters(parameters))
    (folder / "nothing").mkdir()
    hosting = replace(
        SETTINGS,
        models=ModelSettings(repositories=(folder / "models",)),
        fleet=FleetSettings(port=0),
    )
    async with AsyncExitStack() as owner:
        started = [await owner.enter_async_context(running(hosting)) for _ in range(2)]
        addresses = tuple(("127.0.0.1", ports["fleet"]) for _, ports in started)
        routing = replace(
            SETTINGS,
            models=ModelSettings(repositories=(folder / "nothing",)),
            fleet=FleetSettings(replicas=addresses),
        )
        router, _ = await owner.enter_async_context(running(routing))
        yield Fleet(router.dataplane, [server.dataplane for server, _ in started])


def lose(replica: DataPlane) -> None:
    """Lose the connections of a replica, for good."""
    port = replica.fleet
    assert isinstance(port, FleetPort)
    assert port._server is not None  # noqa: SLF001 - a death without a process
    port._server.close()  # noqa: SLF001
    for link in tuple(port.links):
        link.close()


async def test_conversations_of_a_lost_replica_continue_at_the_other_one(tmp_path: Path) -> None:
    async with fleet(tmp_path) as found:
        texts = ["one", "x" * LARGE, *map(str, range(3, 9))]
        for conversation, text in enumerate(texts, 1):
            await found.say(text, conversation, start=True)
        await until(lambda: found.is_copied)
        assert min(found.sizes) > 2 * LARGE
        await found.say("end", len(texts), end=True)
        await until(lambda: found.is_copied)
        assert sum(found.counts()) == len(texts) - 1
        lost = 0 if found.counts()[0] else 1
        lose(found.replicas[lost])
        await until(lambda: not found.router.fleet.describe()["replicas"][lost]["models"])  # type: ignore[union-attr]
        for conversation, text in enumerate(texts[:-1], 1):
            heard = await found.say("two", conversation)
            assert (heard[0], len(heard), heard[2]) == (text, 3, "two")
        assert found.counts()[1 - lost] == len(texts) - 1
        with pytest.raises(InferenceError, match="is not open"):
            await found.say("two", len(texts))


async def test_without_copies_the_conversations_of_a_lost_replica_are_lost(tmp_path: Path) -> None:
    async with fleet(tmp_path, conversation_copies=0) as found:
        await found.say("one", 1, start=True)
        lost = 0 if found.counts()[0] else 1
        assert found.sizes[1 - lost] == 0
        lose(found.replicas[lost])
        with pytest.raises(InferenceError, match="conversation 1 of model 'chat' is not open"):
            await found.say("two", 1)


async def test_a_draining_replica_hands_over_its_last_turns(tmp_path: Path) -> None:
    async with fleet(tmp_path) as found:
        with found.router.infer(turn("x" * LARGE, start=True)) as stream:
            await soon(stream.only())
        own = 0 if found.counts()[0] else 1
        port = found.replicas[own].fleet
        assert isinstance(port, FleetPort)
        for link in tuple(port.links):
            link.finish(60.0)
        await until(lambda: not port.links)
        await until(lambda: found.is_copied)


async def test_a_turn_that_its_full_replica_refuses_is_not_answered_from_a_copy(
    tmp_path: Path,
) -> None:
    """The copy lacks the turn in flight."""
    async with fleet(tmp_path, max_in_flight=1, **HOLD) as found:
        await found.say("one", 1, start=True)
        await until(lambda: found.is_copied)
        with held(tmp_path / "models", "chat"):
            second = asyncio.create_task(found.say("two", 1))
            await until(lambda: sum(each.in_flight for each in found.replicas) == 1)
            with pytest.raises(InferenceError, match="has 1 requests in flight"):
                await found.say("three", 1)
        assert (await soon(second))[::2] == ["one", "two"]
        assert (await found.say("four", 1))[::2] == ["one", "two", "four"]
