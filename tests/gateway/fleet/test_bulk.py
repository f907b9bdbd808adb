"""The connection of large tensors: pieces in turn, and peers that misbehave."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from gateway.fleet import bulk
from gateway.fleet.bulk import ANNOUNCEMENT, HEAD, PIECE_BYTES, BulkConnection, IncomingTensor
from gateway.fleet.handshake import FleetKind
from gateway.processes.channel import Channel, Frame
from tests.gateway.fleet.fake_replica import until

SIZE = 3 * PIECE_BYTES + 7
DATA = bytes(range(251)) * (SIZE // 251 + 1)
CALL = 5


def data_of(size: int) -> memoryview:
    return memoryview(DATA)[:size]


@dataclass
class Ends:
    """Both ends of a link; `announced` are the announcements that `receiver` has got."""

    sender: BulkConnection
    receiver: BulkConnection
    announced: list[bytes]

    async def announcements(self, count: int) -> list[bytes]:
        await until(lambda: len(self.announced) == count)
        return self.announced


@asynccontextmanager
async def _connection(
    left: asyncio.BaseProtocol, right: asyncio.BaseProtocol
) -> AsyncIterator[Any]:
    loop = asyncio.get_running_loop()
    pair = socket.socketpair()
    made = [
        (await loop.create_connection(lambda each=each: each, sock=sock))[0]
        for each, sock in zip((left, right), pair, strict=True)
    ]
    try:
        yield made
    finally:
        for each in made:
            each.abort()


@pytest.fixture
async def ends() -> AsyncIterator[Ends]:
    announced: list[bytes] = []

    def hear(frame: Frame) -> None:
        assert frame.kind == FleetKind.TENSOR
        announced.append(frame.payload)

    channels = Channel(lambda frame: None), Channel(hear)
    found = Ends(BulkConnection(channels[0]), BulkConnection(channels[1]), announced)
    async with _connection(*channels), _connection(found.sender, found.receiver):
        found.sender.open()
        yield found
        found.sender.abort()
        found.receiver.abort()


class Stranger(asyncio.Protocol):
    """An end that a test writes by hand; `other` is the transport of the other end."""

    transport: Any
    other: Any
    received = 0

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.received += len(data)


@pytest.fixture
async def stranger() -> AsyncIterator[tuple[Stranger, BulkConnection]]:
    """An end, and the peer of a test; the channel of the end has no peer that reads."""
    channel, peer = Channel(lambda frame: None), Stranger()
    end = BulkConnection(channel)
    async with _connection(channel, Stranger()), _connection(end, peer) as made:
        peer.other = made[0]
        yield peer, end
        end.abort()


@pytest.fixture
def fault(caplog: pytest.LogCaptureFixture) -> Callable[[], str]:
    """The reason for which the connection was dropped."""
    caplog.set_level(logging.WARNING, "sluice.fleet")
    return lambda: "".join(str(vars(each).get("reason")) for each in caplog.records)


@pytest.fixture
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "STALLED_SECS", 0.1)
    monkeypatch.setattr(bulk, "WATCH_SECS", 0.01)


def expect(end: BulkConnection, number: int, size: int) -> tuple[IncomingTensor, list[None]]:
    """A tensor that is announced to an end, and its end."""
    ended: list[None] = []
    return end.expect(ANNOUNCEMENT.pack(number, size), lambda: ended.append(None)), ended


def piece(number: int, data: bytes | memoryview, length: int | None = None) -> bytes:
    return HEAD.pack(number, len(data) if length is None else length) + bytes(data)


async def test_a_tensor_arrives_in_memory_of_its_own(ends: Ends) -> None:
    ends.sender.send(CALL, data_of(SIZE))
    (payload,) = await ends.announcements(1)
    ended: list[None] = []
    found = ends.receiver.expect(payload, lambda: ended.append(None))
    await until(lambda: bool(ended))
    assert found.is_complete
    assert found.memory == data_of(SIZE)


async def test_pieces_of_tensors_alternate(ends: Ends) -> None:
    order: list[str] = []
    ends.sender.send(CALL, data_of(SIZE))
    ends.sender.send(CALL + 1, data_of(SIZE // 3))
    first, second = await ends.announcements(2)
    ends.receiver.expect(first, lambda: order.append("long"))
    ends.receiver.expect(second, lambda: order.append("short"))
    await until(lambda: len(order) == 2)
    assert order == ["short", "long"]


async def test_pieces_before_their_announcement_wait_for_it(
    stranger: tuple[Stranger, BulkConnection],
) -> None:
    peer, end = stranger
    peer.transport.write(piece(1, data_of(9)) + piece(2, data_of(5)))
    await until(lambda: end.is_waiting)
    first, _ = expect(end, 1, 9)
    second, _ = expect(end, 2, 5)
    await until(lambda: first.is_complete and second.is_complete)
    assert (first.memory, second.memory) == (data_of(9), data_of(5))


async def test_a_discarded_tensor_frees_its_memory_and_the_next_one_arrives(
    stranger: tuple[Stranger, BulkConnection],
) -> None:
    peer, end = stranger
    first, ended = expect(end, 1, SIZE)
    peer.transport.write(piece(1, data_of(PIECE_BYTES)))
    await until(lambda: first.filled == PIECE_BYTES)
    first.discard()
    assert len(first.memory) == 0
    second, _ = expect(end, 2, 3)
    peer.transport.write(piece(1, data_of(SIZE - PIECE_BYTES)) + piece(2, b"abc"))
    await until(lambda: second.is_complete)
    assert second.memory == b"abc"
    assert not ended


async def test_a_dropped_call_ends_its_tensors_at_both_ends(ends: Ends) -> None:
    for call in (CALL, CALL + 1):
        ends.sender.send(call, data_of(SIZE))
    first, second = await ends.announcements(2)
    ended: list[str] = []
    dropped = ends.receiver.expect(first, lambda: ended.append("dropped"))
    kept = ends.receiver.expect(second, lambda: ended.append("kept"))
    ends.sender.drop(CALL)
    await until(lambda: len(ended) == 2)
    assert ended == ["dropped", "kept"]
    assert (dropped.is_complete, kept.is_complete) == (False, True)


async def test_a_peer_that_does_not_read_holds_back_its_sender(
    stranger: tuple[Stranger, BulkConnection],
) -> None:
    peer, end = stranger
    peer.transport.pause_reading()
    end.open()
    sent = memoryview(bytes(32 << 20))
    end.send(CALL, sent)
    await until(lambda: end.is_full)
    assert peer.other.get_write_buffer_size() <= PIECE_BYTES + HEAD.size
    assert not end.is_ended
    peer.transport.resume_reading()
    await until(lambda: peer.received > len(sent))


@pytest.mark.usefixtures("short_times")
async def test_a_peer_that_never_reads_is_dropped(
    stranger: tuple[Stranger, BulkConnection], fault: Callable[[], str]
) -> None:
    peer, end = stranger
    peer.transport.pause_reading()
    end.open()
    end.send(CALL, memoryview(bytes(32 << 20)))
    await until(lambda: end.is_ended)
    assert fault() == "large tensors have made no progress for 0.1 s"
    await until(lambda: end.channel.is_lost)


@pytest.mark.usefixtures("short_times")
@pytest.mark.parametrize("data", [b"", piece(1, b"a", 5), piece(2, b"early")])
async def test_a_tensor_that_never_arrives_as_a_whole_ends_after_a_bound(
    stranger: tuple[Stranger, BulkConnection], fault: Callable[[], str], data: bytes
) -> None:
    peer, end = stranger
    found, ended = expect(end, 1, SIZE)
    peer.transport.write(data)
    await until(lambda: bool(ended))
    assert not found.is_complete
    assert fault() == "large tensors have made no progress for 0.1 s"


@pytest.mark.usefixtures("short_times")
async def test_a_piece_whose_tensor_is_never_announced_ends_the_connection(
    stranger: tuple[Stranger, BulkConnection], fault: Callable[[], str]
) -> None:
    peer, end = stranger
    peer.transport.write(piece(1, b"early"))
    await until(lambda: end.is_ended)
    assert fault() == "large tensors have made no progress for 0.1 s"


async def test_a_tensor_that_waits_for_its_turn_is_no_stall(
    stranger: tuple[Stranger, BulkConnection], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "STALLED_SECS", 0.5)
    monkeypatch.setattr(bulk, "WATCH_SECS", 0.01)
    peer, end = stranger
    expect(end, 1, 6)
    expect(end, 2, 6)
    for _ in range(6):
        await asyncio.sleep(0.12)  # a pause of this process itself has to be shorter
        peer.transport.write(piece(1, b"a"))
    assert not end.is_ended


async def test_slow_progress_is_no_stall(
    stranger: tuple[Stranger, BulkConnection], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "STALLED_SECS", 0.5)
    monkeypatch.setattr(bulk, "WATCH_SECS", 0.01)
    peer, end = stranger
    found, _ = expect(end, 1, 6)
    peer.transport.write(HEAD.pack(1, 6))
    for at in range(6):
        peer.transport.write(bytes(data_of(6)[at : at + 1]))
        await asyncio.sleep(0.12)  # a pause of this process itself has to be shorter
    assert found.is_complete


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (piece(1, data_of(11)), "a piece of 11 bytes, of a tensor that lacks 10 bytes"),
        (piece(1, data_of(6)) * 2, "a piece of 6 bytes, of a tensor that lacks 4 bytes"),
        (piece(0, b"a"), "a piece of tensor 0, which is not under way"),
        (piece(1, data_of(10)) * 2, "a piece of tensor 1, which is not under way"),
        (piece(1, b"") * 2, "a piece of tensor 1, which is not under way"),
    ],
    ids=["long", "long in parts", "no number", "twice", "after its end"],
)
async def test_pieces_that_do_not_fit_drop_both_connections(
    stranger: tuple[Stranger, BulkConnection],
    fault: Callable[[], str],
    data: bytes,
    reason: str,
) -> None:
    peer, end = stranger
    expect(end, 1, 10)
    _, ended = expect(end, 2, 10)
    peer.transport.write(data)
    await until(lambda: end.channel.is_lost)
    assert fault() == reason
    assert len(ended) == 1


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"", "an announcement of 0 bytes, expected 16 bytes"),
        (ANNOUNCEMENT.pack(2, 10), "tensor 2 is announced, expected tensor 1"),
        (ANNOUNCEMENT.pack(1, 0), "a tensor of 0 bytes is announced, expected 1 to 4294967295"),
        (ANNOUNCEMENT.pack(1, 1 << 32), "a tensor of 4294967296 bytes is announced"),
    ],
    ids=["empty", "number", "no size", "size"],
)
async def test_announcements_that_do_not_fit_drop_both_connections(
    stranger: tuple[Stranger, BulkConnection],
    fault: Callable[[], str],
    payload: bytes,
    reason: str,
) -> None:
    _, end = stranger
    ended: list[None] = []
    found = end.expect(payload, lambda: ended.append(None))
    await until(lambda: bool(ended))
    assert not found.memory
    assert fault().startswith(reason)
    await until(lambda: end.channel.is_lost)


async def test_a_connection_that_is_cut_ends_its_tensors_and_the_channel(ends: Ends) -> None:
    found, ended = expect(ends.receiver, 1, SIZE)
    await until(lambda: ends.receiver.is_made)
    ends.sender.abort()
    await until(lambda: bool(ended))
    assert not found.is_complete
    await until(lambda: ends.receiver.channel.is_lost)
