"""Routers that send large tensors wrongly: their calls end, and those of others complete."""

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from gateway.errors import Code, InferenceError
from gateway.fleet import large
from gateway.fleet.bulk import ANNOUNCEMENT, BulkConnection
from gateway.fleet.connection import ReplicaConnection
from gateway.fleet.handshake import (
    MESSAGE_BYTES,
    FleetKind,
    FleetRole,
    HandshakeError,
    Identity,
)
from gateway.fleet.reaching import FleetAddress
from gateway.fleet.replica import FleetPort
from gateway.messages import InferRequest, InferResponse, SequenceTag
from gateway.models.model import Model
from gateway.observability.statistics import ModelStatistics
from gateway.observability.trace import Trace
from gateway.processes.channel import HEAD, Channel, number
from gateway.processes.inference_calls import InferenceKind
from gateway.stream import ResponseStream
from gateway.tensor import Tensor
from tests.builders import TEXT
from tests.conftest import tasks_left
from tests.gateway.fleet.fake_replica import until
from tests.gateway.fleet.large_ends import (
    KEY,
    LARGE,
    Call,
    Replica,
    completes,
    connecting,
    listening_port,
    message,
    numbers,
    request,
    texts,
)


@pytest.fixture(autouse=True)
async def _no_task_is_left() -> AsyncIterator[None]:
    yield
    assert tasks_left() == []


@pytest.fixture(autouse=True)
def _no_traceback(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert not [each for each in caplog.records if each.message == "frame not handled"]


@pytest.fixture
async def replica() -> AsyncIterator[Replica]:
    async with listening_port() as found:
        yield found


@pytest.fixture
async def neighbour(replica: Replica) -> AsyncIterator[ReplicaConnection]:
    """Another router of the replica."""
    async with connecting(replica.port.ports["fleet"]) as found:
        yield found


class Rogue:
    """A router that a test drives by hand; `frames` are the kinds of those from the replica."""

    def __init__(self, port: FleetPort) -> None:
        place = "127.0.0.1", port.ports["fleet"]
        self._address = FleetAddress(*place, Identity("sluice", FleetRole.ROUTER), None)
        self.frames: list[int] = []
        self.channel: Channel
        self.bulk: BulkConnection

    async def connect(self) -> None:
        """Make both connections."""
        links: list[str] = []

        def agreed(channel: Channel, peer: Any) -> None:
            self.channel = channel
            links.append(peer.nonce)

        await self._address.reach(agreed, lambda frame: self.frames.append(frame.kind))
        self.bulk = BulkConnection(self.channel)
        await self.join(*links)
        await until(lambda: FleetKind.BULK in self.frames)
        self.bulk.open()

    async def join(self, link: str) -> None:
        """Make a connection of large tensors."""
        await self._address.reach(
            lambda channel, _: channel.hand_over(self.bulk), lambda frame: None, link
        )

    def ask(self, message: bytes, count: int = 1) -> None:
        """Send a request with large tensors that do not follow."""
        self.channel.send(FleetKind.LARGE_REQUEST, 1, number(count) + message)


@pytest.fixture
async def rogue(replica: Replica) -> AsyncIterator[Rogue]:
    found = Rogue(replica.port)
    await found.connect()
    yield found
    found.bulk.abort()
    await until(lambda: found.channel.is_lost)


def _without_tensors(rogue: Rogue) -> None:
    rogue.ask(message(numbers()))


def _too_few_tensors(rogue: Rogue) -> None:
    rogue.ask(message(numbers()), count=2)
    rogue.bulk.send(1, memoryview(numbers().raw()))


def _another_size(rogue: Rogue) -> None:
    rogue.ask(message(numbers()))
    rogue.bulk.send(1, memoryview(numbers().raw())[1:])


def _a_number_too_high(rogue: Rogue) -> None:
    rogue.ask(message(numbers(name="a"), numbers(name="b")))
    rogue.bulk.send(1, memoryview(numbers().raw()))


def _bytes_without_elements(rogue: Rogue) -> None:
    rogue.ask(message(texts(b"a" * LARGE)))
    rogue.bulk.send(1, memoryview(bytes(LARGE)))


def _a_dropped_tensor(rogue: Rogue) -> None:
    rogue.ask(message(numbers()))
    rogue.bulk.send(1, memoryview(numbers().raw()))
    rogue.bulk.drop(1)


def _no_message(rogue: Rogue) -> None:
    rogue.channel.send(FleetKind.LARGE_REQUEST, 1, b"\1\0")


def _no_count(rogue: Rogue) -> None:
    rogue.ask(message(numbers()), count=0)


ENDED = (
    _without_tensors,
    _too_few_tensors,
    _another_size,
    _a_number_too_high,
    _bytes_without_elements,
    _a_dropped_tensor,
    _no_message,
    _no_count,
)


@pytest.mark.parametrize("misbehave", ENDED)
async def test_a_malformed_large_request_ends_and_others_complete(
    replica: Replica,
    neighbour: ReplicaConnection,
    rogue: Rogue,
    monkeypatch: pytest.MonkeyPatch,
    misbehave: Callable[[Rogue], None],
) -> None:
    monkeypatch.setattr(large, "ANNOUNCED_SECS", 0.2)
    misbehave(rogue)
    await until(lambda: InferenceKind.REFUSED in rogue.frames)
    await until(lambda: replica.answers == 0)
    await completes(neighbour, replica)
    assert len(replica.asked) == 1
    assert not rogue.channel.is_lost


def _too_long_a_piece(rogue: Rogue) -> None:
    rogue.ask(message(numbers()))
    rogue.channel.send(FleetKind.TENSOR, 1, ANNOUNCEMENT.pack(1, LARGE - 1))
    rogue.bulk.channel = Channel(lambda frame: None)
    rogue.bulk.send(1, memoryview(numbers().raw()))


def _a_number_that_is_not_next(rogue: Rogue) -> None:
    rogue.channel.send(FleetKind.TENSOR, 1, ANNOUNCEMENT.pack(2, LARGE))


def _a_cut_in_a_tensor(rogue: Rogue) -> None:
    rogue.ask(message(numbers()))
    send_piece = rogue.bulk._send_piece  # noqa: SLF001 - a piece of the two

    def cut() -> None:
        send_piece()
        rogue.bulk.abort()

    rogue.bulk._send_piece = cut  # type: ignore[method-assign]  # noqa: SLF001
    rogue.bulk.send(1, memoryview(numbers().raw()))


LOST = (_too_long_a_piece, _a_number_that_is_not_next, _a_cut_in_a_tensor)


@pytest.mark.parametrize("misbehave", LOST)
async def test_a_router_that_sends_nonsense_is_dropped_and_others_complete(
    replica: Replica,
    neighbour: ReplicaConnection,
    rogue: Rogue,
    misbehave: Callable[[Rogue], None],
) -> None:
    misbehave(rogue)
    await until(lambda: len(replica.port.links) == 1)
    await completes(neighbour, replica)
    await until(lambda: replica.answers == 0)
    assert len(replica.asked) == 1


async def test_a_request_that_does_not_begin_ends_no_other_of_its_sequence(
    replica: Replica, neighbour: ReplicaConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    infer = replica.port.infer

    def infer_large(asked: InferRequest, trace: Trace | None) -> ResponseStream:
        if asked.inputs[0].count == 1:
            raise RuntimeError
        return infer(asked, trace)

    monkeypatch.setattr(replica.port, "infer", infer_large)
    first = Call(neighbour, request(numbers(), sequence=SequenceTag(7, start=True)))
    second = Call(neighbour, request(numbers(1), sequence=SequenceTag(7)))
    with pytest.raises(InferenceError, match="internal error"):
        await second.rest()
    replica.streams[0].put(InferResponse(final=True))
    assert len(await first.rest()) == 1


async def test_a_request_counts_as_queued_while_it_arrives(
    replica: Replica, neighbour: ReplicaConnection, rogue: Rogue
) -> None:
    dataplane: Any = replica.port._dataplane  # noqa: SLF001 - it is the one of `listening_port`
    dataplane.model = lambda *_: Model(TEXT, 1, ModelStatistics(), [])
    room = neighbour.loads[KEY].room
    rogue.ask(message(numbers()))
    await until(lambda: neighbour.loads[KEY].ahead == 1)
    assert neighbour.loads[KEY].room == room - 1
    rogue.bulk.send(1, memoryview(numbers().raw()))
    await until(lambda: neighbour.loads[KEY].ahead == 0)
    assert replica.answers == len(replica.asked) == 1
    rogue.channel.send(InferenceKind.GONE, 1)
    rogue.ask(message(numbers()))
    await until(lambda: neighbour.loads[KEY].ahead == 1)
    rogue.channel.send(InferenceKind.GONE, 1)
    await until(lambda: neighbour.loads[KEY].ahead == 0)


async def test_without_its_connection_of_messages_that_of_a_router_ends(
    replica: Replica, neighbour: ReplicaConnection, rogue: Rogue
) -> None:
    rogue.channel.abort()
    await until(lambda: rogue.bulk.is_ended)
    await completes(neighbour, replica)


async def test_a_connection_of_large_tensors_without_one_of_messages_is_refused(
    replica: Replica, rogue: Rogue, neighbour: ReplicaConnection
) -> None:
    nonces = [each.nonce for each in replica.port.links]  # both have such a connection
    for link in ("0" * 64, *nonces):
        with pytest.raises(HandshakeError, match="found no connection of messages"):
            await rogue.join(link)
    await completes(neighbour, replica)


@pytest.mark.parametrize("tensors", [(), (numbers(),)], ids=["small", "large"])
async def test_a_message_above_the_limit_is_refused_by_its_sender(
    replica: Replica,
    neighbour: ReplicaConnection,
    monkeypatch: pytest.MonkeyPatch,
    tensors: tuple[Tensor, ...],
) -> None:
    monkeypatch.setattr(large, "MESSAGE_BYTES", 1000)
    parameters = {"long": "a" * 1000}
    with pytest.raises(InferenceError, match="expected at most 996") as refusal:
        Call(neighbour, request(*tensors, parameters=parameters))
    assert refusal.value.code is Code.INVALID_ARG
    call = Call(neighbour, request())
    await replica.request()
    replica.streams[0].put(InferResponse(outputs=tensors, parameters=parameters))
    with pytest.raises(InferenceError, match="expected at most 996"):
        await call.rest()
    await completes(neighbour, replica)


async def test_a_frame_above_the_limit_ends_the_connection(
    replica: Replica,
    rogue: Rogue,
    neighbour: ReplicaConnection,
    caplog: pytest.LogCaptureFixture,
) -> None:
    head = HEAD.pack(MESSAGE_BYTES + 1, InferenceKind.REQUEST, 1)
    rogue.channel._transport.write(head)  # noqa: SLF001 - the channel sends whole frames
    await until(lambda: rogue.channel.is_lost)
    reasons = [vars(each).get("reason") for each in caplog.records]
    assert f"a frame of {MESSAGE_BYTES + 1} bytes, the limit is {MESSAGE_BYTES}" in reasons
    await completes(neighbour, replica)
