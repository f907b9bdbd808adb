"""Limits of memory for connections on hyper's HTTP/2."""

import asyncio
import gzip
import struct
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway import client_limits
from gateway.frontends.grpc import hyper_call, hyper_limits, hyper_transport
from gateway.frontends.grpc.hyper_limits import BufferBudget, BufferShare
from gateway.frontends.grpc.hyper_transport import HyperTransport
from gateway.frontends.grpc.rpc import Method, RpcCall
from gateway.frontends.grpc.status import RpcError, StatusCode
from gateway.settings import GrpcSettings
from tests.conformance import abuses
from tests.conformance.abuses import BEGIN, CANCEL, END_HEADERS, END_STREAM, frame, head
from tests.http2 import PREFACE, Connection, message

ROOM_BYTES = 1 << 20
WINDOW_BYTES = 1 << 30
HALF = struct.pack(">BL", 0, 1 << 20)
SMALL, LARGE = bytes(1000), bytes(700_000)
ECHO, KEEP = head(path="/test/echo"), head(path="/test/keep")
GZIP = head(("grpc-encoding", "gzip"), path="/test/echo")
OK, RESOURCE_EXHAUSTED = 0, 8
PROTOCOL_ERROR, ENHANCE_YOUR_CALM = 1, 11
ACKNOWLEDGED = frame(abuses.SETTINGS, 1)


async def echo(message: bytes, call: RpcCall) -> bytes:
    return message


async def keep(messages: AsyncIterator[bytes], call: RpcCall) -> None:
    """Read nothing."""
    await asyncio.Event().wait()


METHODS = {
    "/test/echo": Method(serve=echo, parse=bytes, serialize=bytes),
    "/test/keep": Method(
        serve=keep, parse=bytes, serialize=bytes, client_streams=True, server_streams=True
    ),
}


@pytest.fixture
async def port(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    """A server with little budget."""
    monkeypatch.setattr(hyper_transport, "BUFFERED_BYTES", ROOM_BYTES)
    monkeypatch.setattr(hyper_limits, "UNREAD_BYTES", ROOM_BYTES)
    transport = HyperTransport(METHODS, GrpcSettings(address="127.0.0.1", port=0))
    await transport.start()
    yield transport.port
    await asyncio.gather(transport.stop(), transport.cut_off(0))


def asked(stream: int, data: bytes) -> bytes:
    """A whole RPC that is answered with the same bytes."""
    framed = message(data)
    pieces = [framed[at : at + 16384] for at in range(0, len(framed), 16384)]
    last = END_STREAM
    return frame(abuses.HEADERS, END_HEADERS, stream, ECHO) + b"".join(
        frame(abuses.DATA, last if piece is pieces[-1] else 0, stream, piece) for piece in pieces
    )


def begun(stream: int, size: int, *parts: bytes, block: bytes = ECHO) -> bytes:
    """An RPC whose message is announced, and of which these parts come."""
    pieces = (struct.pack(">BL", 0, size), *parts)
    return frame(abuses.HEADERS, END_HEADERS, stream, block) + b"".join(
        frame(abuses.DATA, 0, stream, each) for each in pieces
    )


def taken(stream: int) -> tuple[bytes, bytes]:
    """Window for an answer that came."""
    return abuses.window_update(WINDOW_BYTES), abuses.window_update(WINDOW_BYTES, stream)


async def status(connection: Connection, stream: int) -> int | None:
    return (await asyncio.to_thread(connection.answer, stream)).grpc_status


async def test_incomplete_messages_are_limited_by_the_budget(port: int) -> None:
    part = bytes(16000)
    with Connection(port) as one, Connection(port) as other:
        one.send(BEGIN + begun(1, 1 << 30, *[part] * 40))
        await served(one)
        other.send(BEGIN + begun(1, 1 << 30, *[part] * 40))
        assert await status(other, 1) == RESOURCE_EXHAUSTED
        other.send(asked(3, SMALL))
        assert await status(other, 3) == OK
        one.send(frame(abuses.RESET, 0, 1, CANCEL) + asked(5, LARGE) + b"".join(taken(5)))
        assert await status(one, 5) == OK


async def served(connection: Connection) -> None:
    """Wait until all that was sent is read."""
    connection.send(asked(3, SMALL))
    assert await status(connection, 3) == OK


async def test_unread_answers_are_limited_by_the_budget(port: int) -> None:
    with Connection(port) as one, Connection(port) as other:
        one.send(PREFACE + abuses.setting(abuses.INITIAL_WINDOW, 0) + asked(1, LARGE))
        await asyncio.to_thread(one.head, 1)
        other.send(BEGIN + asked(1, LARGE))
        assert await status(other, 1) == RESOURCE_EXHAUSTED
        other.send(asked(3, SMALL))
        assert await status(other, 3) == OK
        one.send(*taken(1))
        assert await status(one, 1) == OK
        other.send(asked(5, LARGE))
        assert await status(other, 5) == OK


async def test_unread_data_are_limited_by_the_budget(port: int) -> None:
    part = bytes(16000)
    with Connection(port) as one, Connection(port) as other:
        one.send(BEGIN + begun(1, 1 << 30, *[part] * 200, block=KEEP))
        gone = await asyncio.to_thread(one.closed)
        assert gone is not None
        assert gone.error_code == ENHANCE_YOUR_CALM
        other.send(BEGIN + asked(1, LARGE))
        assert await status(other, 1) == OK


@pytest.mark.parametrize(
    ("size", "status_of"), [(ROOM_BYTES // 4, OK), (2 * ROOM_BYTES, RESOURCE_EXHAUSTED)]
)
async def test_decompressed_messages_count_towards_the_budget(
    port: int, size: int, status_of: int
) -> None:
    packed = gzip.compress(bytes(size))
    framed = struct.pack(">BL", 1, len(packed)) + packed
    with Connection(port) as one:
        one.send(BEGIN, abuses.window_update(WINDOW_BYTES))
        headers = frame(abuses.HEADERS, END_HEADERS, 1, GZIP)
        one.send(headers + frame(abuses.DATA, END_STREAM, 1, framed))
        one.send(abuses.window_update(WINDOW_BYTES, 1))
        assert await status(one, 1) == status_of
        await served(one)


@pytest.mark.parametrize("first", [b"", PREFACE[:12], PREFACE])
async def test_a_client_without_a_preface_is_dropped(
    port: int, monkeypatch: pytest.MonkeyPatch, first: bytes
) -> None:
    monkeypatch.setattr(hyper_transport, "GREETING_SECS", 0.05)
    with Connection(port) as silent:
        silent.send(first)
        assert await asyncio.to_thread(silent.closed) is None


async def test_a_client_with_a_preface_may_be_idle(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hyper_transport, "GREETING_SECS", 0.05)
    with Connection(port) as idle, Connection(port) as silent:
        idle.send(BEGIN)
        await asyncio.to_thread(silent.closed)
        await served(idle)


async def test_resets_spread_over_turns_are_tolerated(port: int) -> None:
    with Connection(port) as connection:
        connection.send(BEGIN)
        for stream in range(1, 201, 4):
            opened = frame(abuses.HEADERS, END_HEADERS, stream, ECHO)
            connection.send(
                opened + frame(abuses.RESET, 0, stream, CANCEL) + asked(stream + 2, b"")
            )
            assert await status(connection, stream + 2) == OK


@pytest.mark.parametrize(
    ("first", "drip"),
    [(b"", b""), (HALF, b""), (HALF, b"x")],
    ids=["nothing", "the head of a message", "a byte at a time"],
)
async def test_a_unary_rpc_ends_without_the_rest_of_its_message(
    port: int, monkeypatch: pytest.MonkeyPatch, first: bytes, drip: bytes
) -> None:
    monkeypatch.setattr(hyper_call, "MESSAGE_IDLE_SECS", 0.3)
    monkeypatch.setattr(client_limits, "PACE_AFTER_SECS", 1.0)
    began = time.monotonic()
    with Connection(port) as slow, Connection(port) as other:
        slow.send(BEGIN + frame(abuses.HEADERS, END_HEADERS, 1, ECHO))
        slow.send(frame(abuses.DATA, 0, 1, first))
        ended = asyncio.create_task(asyncio.to_thread(slow.answer, 1))
        while drip and not (await asyncio.wait([ended], timeout=0.1))[0]:
            slow.send(frame(abuses.DATA, 0, 1, drip))
        answer = await ended
        assert answer.grpc_status == StatusCode.DEADLINE_EXCEEDED
        assert answer.grpc_message == client_limits.late_text("message", 0.3)
        assert time.monotonic() - began > (0.9 if drip else 0.25)
        other.send(BEGIN)
        await served(other)


async def test_a_unary_message_that_keeps_the_pace_is_answered(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hyper_call, "MESSAGE_IDLE_SECS", 0.5)
    monkeypatch.setattr(client_limits, "PACE_AFTER_SECS", 0.5)
    with Connection(port) as steady:
        steady.send(BEGIN + begun(1, 6000))
        for _ in range(6):
            await asyncio.sleep(0.2)
            steady.send(frame(abuses.DATA, 0, 1, bytes(1000)))
        steady.send(frame(abuses.DATA, END_STREAM, 1), abuses.window_update(WINDOW_BYTES, 1))
        assert await status(steady, 1) == OK


async def test_a_client_stream_may_pause_within_a_message(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hyper_call, "MESSAGE_IDLE_SECS", 0.1)
    with Connection(port) as idle:
        idle.send(BEGIN + begun(1, 1000, b"x", block=KEEP))
        await asyncio.sleep(0.4)
        await served(idle)
        assert not idle.known(1).ended


async def test_frames_may_be_large_from_the_first_one(port: int) -> None:
    whole = frame(abuses.HEADERS, END_HEADERS, 1, ECHO) + frame(
        abuses.DATA, END_STREAM, 1, message(LARGE)
    )
    with Connection(port) as connection:
        connection.send(BEGIN + whole + b"".join(taken(1)))
        assert await status(connection, 1) == OK


async def test_a_second_acknowledgement_is_an_error(port: int) -> None:
    with Connection(port) as connection:
        connection.send(BEGIN + ACKNOWLEDGED + ACKNOWLEDGED)
        gone: Any = await asyncio.to_thread(connection.closed)
        assert gone.error_code == PROTOCOL_ERROR


def test_the_whole_budget_can_be_reserved_and_not_one_byte_more() -> None:
    share = BufferShare(BufferBudget(10))
    share.add(10)
    with pytest.raises(RpcError) as caught:
        share.add(1)
    assert caught.value.status is StatusCode.RESOURCE_EXHAUSTED
    assert share.reserved == 10


def test_released_bytes_can_be_reserved_again() -> None:
    budget = BufferBudget(10)
    one, other = BufferShare(budget), BufferShare(budget)
    one.add(4)
    one.add(6)
    one.clear()
    other.add(10)
    assert (one.reserved, other.reserved) == (0, 10)


def test_a_share_can_grow_and_shrink() -> None:
    budget = BufferBudget(10)
    one, other = BufferShare(budget), BufferShare(budget)
    one.change(10)
    one.change(3)
    other.add(7)
    with pytest.raises(RpcError):
        one.change(4)
    assert one.reserved == 3


def test_giving_back_twice_gives_nothing() -> None:
    budget = BufferBudget(10)
    share = BufferShare(budget)
    share.add(5)
    share.clear()
    share.clear()
    with pytest.raises(RpcError):
        BufferShare(budget).add(11)
