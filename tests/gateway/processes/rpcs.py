"""Clients and methods of gRPC on both ends of a channel."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from gateway.frontends.grpc.rpc import Method, RpcCall
from gateway.frontends.grpc.status import Metadata
from gateway.processes.channel import headed
from tests.builders import soon
from tests.gateway.processes.links import PATH


class Rpc(RpcCall):
    """A gRPC client, which may read slowly."""

    def __init__(self, metadata: Metadata = (), secs: float | None = None) -> None:
        self.takes = asyncio.Event()
        self.takes.set()
        self.offered = asyncio.Event()
        self.sent: asyncio.Queue[bytes] = asyncio.Queue()
        self.initial: list[Metadata] = []
        self.trailing: Metadata = ()
        self._metadata = metadata
        self._secs = secs

    @property
    def metadata(self) -> Metadata:
        return self._metadata

    @property
    def peer(self) -> str:
        return "ipv4:127.0.0.1:40000"

    @property
    def authority(self) -> str:
        return "caf\xe9:8001"

    def time_remaining(self) -> float | None:
        return self._secs

    async def send(self, messages: Sequence[bytes]) -> None:
        self.offered.set()
        await self.takes.wait()
        for message in messages:
            self.sent.put_nowait(message)

    async def send_initial_metadata(self, metadata: Metadata) -> None:
        assert self.sent.empty()
        self.initial.append(metadata)

    def set_trailing_metadata(self, metadata: Metadata) -> None:
        self.trailing = metadata

    def on_end(self, ended: Callable[[], None]) -> None:
        raise AssertionError("a relay has nothing to do in the end")

    async def message(self) -> bytes:
        """The next message of the answer."""
        return await soon(self.sent.get())

    @property
    def untaken(self) -> list[bytes]:
        return [self.sent.get_nowait() for _ in range(self.sent.qsize())]


class Asking:
    """Messages of a client that streams, as the test sends them."""

    def __init__(self, *messages: bytes) -> None:
        self.given = 0
        self._messages: asyncio.Queue[bytes | None] = asyncio.Queue()
        for message in messages:
            self.ask(message)

    def ask(self, message: bytes) -> None:
        self._messages.put_nowait(message)

    def half_close(self) -> None:
        self._messages.put_nowait(None)

    def __aiter__(self) -> "Asking":
        return self

    async def __anext__(self) -> bytes:
        message = await self._messages.get()
        if message is None:
            raise StopAsyncIteration
        self.given += 1
        return message


Serve = Callable[[Any, RpcCall], Awaitable[Any]]


def unary(serve: Serve) -> Method:
    return Method(serve=serve, parse=bytes, serialize=bytes)


def answering(serve: Serve) -> Method:
    """One message is answered with many."""
    return Method(serve=serve, parse=bytes, serialize=bytes, server_streams=True)


def streaming(serve: Serve) -> Method:
    """Many messages are answered with many."""
    return Method(
        serve=serve, parse=bytes, serialize=bytes, client_streams=True, server_streams=True
    )


async def only(message: bytes) -> AsyncIterator[bytes]:
    """The messages of a client that does not stream."""
    yield message


def asked_frame(message: bytes) -> bytes:
    """The payload that begins an RPC."""
    head = {"path": PATH, "metadata": [], "peer": "unix:", "authority": "", "secs": None}
    return headed({**head, "whole": True}, message)
