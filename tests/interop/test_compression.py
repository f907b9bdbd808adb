"""Compressed messages both ways, as gRPC's cases have them; what is compressed is small on the way.

Whether a message came compressed is the transport's business alone: a method cannot refuse one that
did not, which the cases ask for first.
"""

import random
from collections.abc import AsyncIterator

import grpc
import pytest

from gateway.frontends.grpc.rpc import Transport
from gateway.settings import CompressionLevel
from tests.interop.clients import KINDS, Client, connect
from tests.interop.messages import StreamingInputCallRequest, download, unary, upload
from tests.interop.relay import Relay, relayed

LARGE_REQUEST, LARGE_RESPONSE = 271_828, 314_159
SMALL = 12_000
"""More than headers and a large message of zeros take that is compressed."""

GZIP, DEFLATE = grpc.Compression.Gzip, grpc.Compression.Deflate
BOTH = pytest.mark.parametrize("compression", [GZIP, DEFLATE], ids=["gzip", "deflate"])


@pytest.fixture
async def relay(transport: Transport) -> AsyncIterator[Relay]:
    """The bytes that count."""
    async with relayed(transport.port) as found:
        yield found


@pytest.fixture(params=KINDS)
async def client(request: pytest.FixtureRequest, relay: Relay) -> AsyncIterator[Client]:
    """Each client in turn, through the relay."""
    async with connect(request.param, relay.target) as found:
        yield found


@BOTH
async def test_client_compressed_unary(
    client: Client, relay: Relay, compression: grpc.Compression
) -> None:
    asked = unary(LARGE_RESPONSE, LARGE_REQUEST)

    response = await client.only("UnaryCall", asked, compression=compression)
    compressed = relay.up
    plain = await client.only("UnaryCall", asked)

    assert response == plain
    assert len(response.payload.body) == LARGE_RESPONSE
    assert compressed < SMALL
    assert relay.up > LARGE_REQUEST


@BOTH
@pytest.mark.parametrize("kind", KINDS)
async def test_client_compressed_streaming(
    relay: Relay, kind: str, compression: grpc.Compression
) -> None:
    # gRPC's clients send a message as it is if it would become no smaller.
    noise = StreamingInputCallRequest(payload={"body": random.randbytes(45904)})

    async with connect(kind, relay.target, compression=compression) as client:
        response = await client.only("StreamingInputCall", upload(27182), noise, upload(27182))

    assert response.aggregated_payload_size == 2 * 27182 + 45904
    assert 45904 < relay.up < 45904 + SMALL


LEVELS = pytest.mark.parametrize(
    "compression_level",
    [CompressionLevel.LOW, CompressionLevel.MEDIUM, CompressionLevel.HIGH],
    ids=str,
)


@LEVELS
async def test_server_compressed_unary(client: Client, relay: Relay) -> None:
    response = await client.only("UnaryCall", unary(LARGE_RESPONSE))

    assert not response.payload.body.strip(b"\0")
    assert len(response.payload.body) == LARGE_RESPONSE
    assert relay.down < SMALL


@LEVELS
async def test_server_compressed_streaming(client: Client, relay: Relay) -> None:
    responses, outcome = await client.answers("StreamingOutputCall", download(31415, 92653))

    assert [len(response.payload.body) for response in responses] == [31415, 92653]
    assert outcome.code == "OK"
    assert relay.down < SMALL


async def test_responses_are_sent_uncompressed_unless_the_server_is_configured_to_compress(
    client: Client, relay: Relay
) -> None:
    await client.only("UnaryCall", unary(LARGE_RESPONSE), compression=GZIP)

    assert relay.down > LARGE_RESPONSE
