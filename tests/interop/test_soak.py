"""Hundreds of RPCs on one channel, and on a channel each (gRPC's rpc_soak and channel_soak)."""

import asyncio

from tests.interop.clients import KINDS, Client, connect
from tests.interop.messages import download, unary

RPCS = 500
CHANNELS = 50
CONCURRENT = 100
LARGE_REQUEST, LARGE_RESPONSE = 271_828, 314_159


async def test_rpcs_one_after_the_other_on_one_channel(client: Client) -> None:
    for _ in range(RPCS):
        response = await client.only("UnaryCall", unary(31, 27))
        assert len(response.payload.body) == 31


async def test_rpcs_on_channels_of_their_own(target: str) -> None:
    for number in range(CHANNELS):
        async with connect(KINDS[number % len(KINDS)], target) as client:
            response = await client.only("UnaryCall", unary(31, 27))
            assert len(response.payload.body) == 31


async def test_large_rpcs_at_once_on_one_channel(target: str) -> None:
    async with connect("aio", target) as client:
        asked = [
            client.only("UnaryCall", unary(LARGE_RESPONSE, LARGE_REQUEST))
            for _ in range(CONCURRENT)
        ]
        responses = await asyncio.gather(*asked)

    assert [len(response.payload.body) for response in responses] == [LARGE_RESPONSE] * CONCURRENT


async def test_streams_at_once_on_one_channel(target: str) -> None:
    sizes = [31415, 9, 2653, 58979]
    async with connect("aio", target) as client:
        found = await asyncio.gather(
            *(client.answers("FullDuplexCall", download(*sizes)) for _ in range(CONCURRENT))
        )

    for responses, outcome in found:
        assert [len(response.payload.body) for response in responses] == sizes
        assert outcome.code == "OK"
