"""Junk on the sockets between the server's own processes: a call fails, the channel stays."""

import asyncio
import random
import socket
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from backends.python.worker.sluice_worker.protocol import (
    MAX_BODY_BYTES,
    MAX_HEADER_BYTES,
    BrokenFrame,
    FrameSplitter,
)
from gateway.processes.channel import NO_CALL, Channel, Frame, FrameDecoder, FrameKind, packed
from gateway.processes.grpc import GrpcCall
from gateway.processes.http import HttpCall
from gateway.processes.messages import FrontendKind
from tests.builders import soon

ROUNDS = 300
CALLS = 8
KINDS = [
    kind
    for each in (FrameKind, FrontendKind)
    for name, kind in vars(each).items()
    if name.isupper() and kind not in (FrameKind.PING, FrameKind.PONG)
]


def junk(chance: random.Random) -> bytes:
    """Bytes, some of which begin as a headed payload does."""
    begins = (
        b"",
        struct.pack("<I", 2) + b"{}",
        struct.pack("<I", 4) + b"null",
        struct.pack("<I", 1 << 31) + b"{",
        struct.pack("<I", 30) + b'{"whole":true,"metadata":1}   ',
    )
    return chance.choice(begins) + chance.randbytes(chance.randrange(40))


@pytest.mark.parametrize("seed", range(5))
def test_random_bytes_are_frames_or_wait_for_more(seed: int) -> None:
    chance, decoder = random.Random(seed), FrameDecoder()
    given = taken = 0
    for _ in range(ROUNDS):
        data = packed(chance.choice(KINDS), chance.randrange(CALLS), junk(chance))
        data = data if chance.random() < 0.9 else chance.randbytes(chance.randrange(30))
        given += len(data)
        taken += sum(len(packed(*frame)) for frame in decoder.feed(data))
    assert taken <= given


@pytest.mark.parametrize("seed", range(5))
def test_random_bytes_of_a_worker_are_frames_or_an_error(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(ROUNDS):
        splitter = FrameSplitter()
        try:
            for _ in range(10):
                for header, body in splitter.feed(chance.randbytes(chance.randrange(1, 60))):
                    assert len(header) <= MAX_HEADER_BYTES
                    assert len(body) <= MAX_BODY_BYTES
        except BrokenFrame:
            continue


@dataclass
class Frontend:
    """A frontend process's end of a channel to a server, and the frames that it receives."""

    channel: Channel
    received: asyncio.Queue[Frame]


@pytest.fixture
async def frontend() -> AsyncIterator[Frontend]:
    loop = asyncio.get_running_loop()
    one, other = socket.socketpair()
    received: asyncio.Queue[Frame] = asyncio.Queue()

    def begin(frame: Frame) -> None:
        if frame.kind == FrontendKind.HTTP_CALL:
            HttpCall(server, frame.call, frame.payload)
        elif frame.kind == FrontendKind.GRPC_CALL:
            GrpcCall(server, frame.call, frame.payload)
        elif frame.kind == FrameKind.PING:
            server.send(FrameKind.PONG)

    _, server = await loop.create_unix_connection(lambda: Channel(begin), sock=one)
    _, channel = await loop.create_unix_connection(lambda: Channel(received.put_nowait), sock=other)
    yield Frontend(channel, received)
    server.close()
    await soon(channel.lost())


@pytest.mark.parametrize("seed", range(5))
async def test_random_frames_of_a_frontend_end_their_calls_and_the_channel_stays(
    frontend: Frontend, seed: int
) -> None:
    chance = random.Random(seed)
    for _ in range(ROUNDS):
        frontend.channel.send(chance.choice(KINDS), chance.randrange(1, CALLS), junk(chance))
    frontend.channel.send(FrameKind.PING, NO_CALL)
    kinds = set()
    while FrameKind.PONG not in kinds:
        kinds.add((await soon(frontend.received.get())).kind)
    assert kinds <= {FrameKind.PONG, FrameKind.ABORT, FrameKind.TAKEN, FrameKind.GONE}
