"""Clients that open streams, read nothing, and leave: one kind per wire."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import cast

import orjson

from loadtests.grpc_clients import METHOD, MODEL, TEXT, repeat_request
from loadtests.grpc_frames import GrpcConnection
from loadtests.sse import Address, connect, post

RESPONSES = 1000
DELAY_US = 1_800_000_000
HEADERS_TIMEOUT_SECS = 60.0
OPENED_AT_ONCE = 100


@dataclass(frozen=True, slots=True)
class Clients:
    """How many streams are held; those of gRPC share `connections`."""

    streams: int
    connections: int


Hold = Callable[[Address, Clients], AbstractAsyncContextManager[None]]
"""Streams that are open inside the block."""


class Waiting(asyncio.Protocol):
    """One HTTP stream that waits; `answered` is set when its headers have come."""

    def __init__(self, request: bytes) -> None:
        self.answered = asyncio.Event()
        self._request = request

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.WriteTransport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        self.answered.set()


@asynccontextmanager
async def hold_sse(address: Address, clients: Clients) -> AsyncIterator[None]:
    """Event streams, a connection for each."""
    body = {"text_input": TEXT, "n": RESPONSES, "delay_us": DELAY_US}
    request = post(f"/v2/models/{MODEL}/generate_stream", address, orjson.dumps(body))
    opened: list[tuple[asyncio.Transport, Waiting]] = []
    try:
        for start in range(0, clients.streams, OPENED_AT_ONCE):
            count = min(OPENED_AT_ONCE, clients.streams - start)
            some = (connect(address, lambda: Waiting(request)) for _ in range(count))
            opened += await asyncio.gather(*some)
        async with asyncio.timeout(HEADERS_TIMEOUT_SECS):
            for _, waiting in opened:
                await waiting.answered.wait()
        yield
    finally:
        for transport, _ in opened:
            transport.close()


@asynccontextmanager
async def hold_grpc(address: Address, clients: Clients) -> AsyncIterator[None]:
    """ModelStreamInfer streams that share some connections."""
    request = repeat_request(RESPONSES, DELAY_US)
    opened = [
        await connect(address, lambda: GrpcConnection(address)) for _ in range(clients.connections)
    ]
    streams = [
        opened[number % len(opened)][1].open(METHOD, request) for number in range(clients.streams)
    ]
    try:
        yield
    finally:
        for transport, _ in opened:
            transport.close()
        await asyncio.gather(*streams, return_exceptions=True)


WIRES: dict[str, Hold] = {"SSE": hold_sse, "gRPC": hold_grpc}
