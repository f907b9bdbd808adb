"""A network between a router and a replica that is slow, or loses bytes or a direction."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gateway.config import ModelConfig
from gateway.fleet import connection
from gateway.fleet.handshake import MESSAGE_BYTES
from gateway.processes.channel import HEAD
from tests.builders import text_response, texts
from tests.gateway.fleet.fake_replica import FakeReplica, until
from tests.gateway.fleet.losing import LLM, generation, read
from tests.gateway.fleet.routing import Routed, routing, sums

Change = Callable[[bytes], list[bytes]]
"""Makes the pieces that arrive of those that were sent."""


class Network:
    """A port in front of a replica; `to_router` and `to_replica` change the bytes that pass.

    An empty piece closes that direction alone.
    """

    def __init__(self, replica: FakeReplica) -> None:
        self.port = 0
        self.delay_secs = 0.0
        self.to_router: Change = _whole
        self.to_replica: Change = _whole
        self._replica = replica

    async def join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass the bytes of a connection on, in both directions."""
        to_replica = await asyncio.open_connection("127.0.0.1", self._replica.port)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._pass(reader, to_replica[1], lambda: self.to_replica))
                tasks.create_task(self._pass(to_replica[0], writer, lambda: self.to_router))
        except* OSError:
            """One end has reset the connection."""
        finally:
            writer.transport.abort()
            to_replica[1].transport.abort()

    async def _pass(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        change: Callable[[], Change],
    ) -> None:
        while data := await reader.read(1 << 16):
            if self.delay_secs:
                await asyncio.sleep(self.delay_secs)
            for piece in change()(data):
                if not piece:
                    writer.write_eof()
                    return
                writer.write(piece)
                await asyncio.sleep(0)
        if change() is _whole:
            raise ConnectionResetError


def _whole(data: bytes) -> list[bytes]:
    return [data]


def _nothing(data: bytes) -> list[bytes]:
    return []


def _halves(data: bytes) -> list[bytes]:
    middle = len(data) // 2 or 1
    return list(filter(None, (data[:middle], data[middle:])))


def _bytes(data: bytes) -> list[bytes]:
    return [data[index : index + 1] for index in range(len(data))]


def _end(data: bytes) -> list[bytes]:
    return [b""]


def _cut_short(data: bytes) -> list[bytes]:
    return [data[: HEAD.size + 3], b""]


def _too_long(data: bytes) -> list[bytes]:
    return [HEAD.pack(MESSAGE_BYTES + 1, *HEAD.unpack_from(data)[1:])]


@asynccontextmanager
async def behind(replica: FakeReplica) -> AsyncIterator[Network]:
    """The network in front of a replica for the length of the block."""
    found = Network(replica)
    server = await asyncio.start_server(found.join, "127.0.0.1", 0)
    found.port = server.sockets[0].getsockname()[1]
    try:
        yield found
    finally:
        server.close()
        replica.lose()


STREAMS = 6


@pytest.fixture
def hosted() -> ModelConfig:
    return LLM


@pytest.fixture
async def network(replicas: list[FakeReplica]) -> AsyncIterator[Network]:
    async with behind(replicas[0]) as found:
        yield found


@pytest.fixture
async def routed(
    tmp_path: Path,
    replicas: list[FakeReplica],
    network: Network,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Routed]:
    """A router that has the first replica through the network, and the second without it."""
    monkeypatch.setattr(connection, "PING_SECS", 0.01)
    async with routing(tmp_path, network, replicas[1]) as found:
        yield found


@pytest.mark.parametrize("change", [_halves, _bytes], ids=["halves", "bytes"])
async def test_frames_may_arrive_in_any_pieces_and_late(
    routed: Routed, replicas: list[FakeReplica], network: Network, change: Change
) -> None:
    network.to_router = network.to_replica = change
    network.delay_secs = 0.02
    replicas[1].offer()
    await until(lambda: not routed.router.connections[1].models)
    with routed.dataplane.infer(generation()) as stream:
        await until(lambda: bool(replicas[0].calls))
        replicas[0].respond(replicas[0].calls.pop(), text_response("b"), text_response("c"))
        assert texts(await read(stream, 2)) == ["b", "c"]
    assert len(replicas[0].links) == 1


FAULTS: dict[str, tuple[Change | None, Change | None]] = {
    "drops-all": (_nothing, _nothing),
    "drops-responses": (_nothing, None),
    "drops-requests": (None, _nothing),
    "ends-responses": (_end, None),
    "ends-requests": (None, _end),
    "cuts-a-response": (_cut_short, None),
    "cuts-a-request": (None, _cut_short),
    "too-long-response": (_too_long, None),
}


@pytest.mark.parametrize(("to_router", "to_replica"), FAULTS.values(), ids=FAULTS)
async def test_requests_of_a_broken_network_are_answered_by_another_replica_and_neighbours_stay(
    routed: Routed,
    replicas: list[FakeReplica],
    network: Network,
    to_router: Change | None,
    to_replica: Change | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if _nothing in (to_router, to_replica):
        monkeypatch.setattr(connection, "GONE_SECS", 2.0)
    first, second = replicas
    streams = [routed.dataplane.infer(generation(str(number))) for number in range(STREAMS)]
    await until(lambda: len(first.calls) + len(second.calls) == STREAMS)
    lost = len(first.calls)
    assert 0 < lost < STREAMS
    network.to_router, network.to_replica = to_router or _whole, to_replica or _whole
    if to_router is not None:
        for call in first.calls:
            first.answer(call, "late")
    await until(lambda: len(second.calls) == STREAMS)
    for call in second.calls:
        second.answer(call, "hello")
    assert [texts(await read(each, 1)) for each in streams] == [["hello"]] * STREAMS
    assert sums(routed)["retries"] == lost
    for each in streams:
        each.close()
    assert len(second.links) == 1
