"""A client that does not read blocks its own stream, and no other of the same connection."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.builders import settle, soon
from tests.interop.clients import KINDS, Client, Rpc, connect
from tests.interop.messages import download, unary, upload
from tests.interop.service import HOLD, InteropServicer

MIB = 1 << 20
MANY = 32
HELD = 4
"""Messages that the windows and buffers of one stream take, and some more."""
UPLOADED = 24
"""More than they take on the way to the server, whose windows are wider."""
SLOW = 8

WINDOW = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", MIB))
"""Of the client; it would open wider the faster the server is."""


@pytest.fixture(params=KINDS)
async def client(request: pytest.FixtureRequest, target: str) -> AsyncIterator[Client]:
    """Each client in turn, with windows of one size."""
    async with connect(request.param, target, *WINDOW) as found:
        yield found


async def one_each(rpcs: list[Rpc]) -> None:
    """Read one response of each."""
    for rpc in rpcs:
        assert len((await soon(rpc.answer())).payload.body) == MIB


async def test_a_reader_that_stops_is_not_sent_more(
    client: Client, servicer: InteropServicer
) -> None:
    rpc = client.call("StreamingOutputCall")
    await rpc.ask(download(*[MIB] * MANY))
    await one_each([rpc])
    neighbour, outcome = await client.answers("FullDuplexCall", download(*[MIB] * MANY))
    sent = servicer.sent["StreamingOutputCall"]

    assert (len(neighbour), outcome.code) == (MANY, "OK")
    assert sent <= HELD
    assert len(await rpc.rest()) == MANY - 1
    assert servicer.sent["StreamingOutputCall"] == MANY


async def test_many_slow_readers_leave_their_connection_to_others(
    client: Client, servicer: InteropServicer
) -> None:
    slow = [client.call("StreamingOutputCall") for _ in range(SLOW)]
    for rpc in slow:
        await rpc.ask(download(*[MIB] * MANY))
    await one_each(slow)

    for _ in range(3):
        response = await soon(client.only("UnaryCall", unary(MIB, MIB)))
        assert len(response.payload.body) == MIB
    assert servicer.sent["StreamingOutputCall"] <= SLOW * HELD


async def test_an_unread_upload_does_not_block_other_rpcs_of_its_connection(
    client: Client, servicer: InteropServicer
) -> None:
    uploads = [client.call("StreamingInputCall", metadata=((HOLD, "1"),)) for _ in range(SLOW)]
    sending = [asyncio.ensure_future(rpc.ask(*[upload(MIB)] * UPLOADED)) for rpc in uploads]
    for _ in uploads:
        assert await soon(servicer.begun.get()) == "StreamingInputCall"
    await settle()

    for _ in range(3):
        response = await soon(client.only("UnaryCall", unary(MIB, MIB)))
        assert len(response.payload.body) == MIB

    servicer.reading.set()
    for rpc, sent in zip(uploads, sending, strict=True):
        await soon(sent)
        (response,) = await soon(rpc.rest())
        assert response.aggregated_payload_size == UPLOADED * MIB
