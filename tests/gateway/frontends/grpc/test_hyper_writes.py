"""Messages of hyper's HTTP/2 that are sent without waiting."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hyperframe.frame import RstStreamFrame, WindowUpdateFrame

from gateway.frontends.grpc.hyper_transport import HyperTransport
from gateway.frontends.grpc.rpc import Method, RpcCall
from gateway.settings import CompressionLevel, GrpcSettings
from tests.builders import WAIT_SECS, settle, soon
from tests.conformance import abuses
from tests.conformance.abuses import frame
from tests.gateway.frontends.grpc.test_unary_infer import until
from tests.http2 import CANCEL, DEFAULT_WINDOW, Connection, message, request

PATH = "/test/stream"
WIDEST = 2**31 - 1
FAR = 4_000
"""Messages of 10,000 bytes that no buffer of a client takes."""


class Streaming:
    """A method whose messages the test sends, after a first one."""

    def __init__(self) -> None:
        self.calls: asyncio.Queue[RpcCall] = asyncio.Queue()
        self.ended = asyncio.Event()

    async def serve(self, messages: AsyncIterator[bytes], call: RpcCall) -> None:
        assert not call.write([b"early"])
        await call.send([b"first"])
        self.calls.put_nowait(call)
        await self.ended.wait()

    async def begun(self) -> RpcCall:
        """The next call, whose first message is sent."""
        call = await soon(self.calls.get())
        await settle()
        return call


@pytest.fixture
async def streaming() -> Streaming:
    return Streaming()


@pytest.fixture
async def port(streaming: Streaming, request: pytest.FixtureRequest) -> AsyncIterator[int]:
    method = Method(
        streaming.serve, bytes, bytes, client_streams=True, server_streams=True, compresses=True
    )
    level = getattr(request, "param", CompressionLevel.NONE)
    settings = GrpcSettings(address="127.0.0.1", port=0, compression=level)
    transport = HyperTransport({PATH: method}, settings)
    await transport.start()
    yield transport.port
    streaming.ended.set()
    await soon(asyncio.gather(transport.stop(), transport.cut_off(0.0)))


def ask(connection: Connection, stream: int = 1) -> None:
    headers = connection.headers(stream, request(PATH, ("grpc-accept-encoding", "gzip")))
    connection.send(headers, frame(abuses.DATA, abuses.END_STREAM, stream, message(b"x")))


async def messages(connection: Connection, stream: int = 1) -> list[bytes]:
    found = await asyncio.to_thread(connection.answer, stream)
    assert found.client_status == "OK"
    return found.messages


async def test_messages_are_sent_in_the_call(port: int, streaming: Streaming) -> None:
    with Connection(port) as connection:
        connection.begin()
        ask(connection)
        call = await streaming.begun()
        assert call.write([b"one", b"two"])
        assert call.write([b"three"])
        await call.send([b"four"])
        assert call.write([b"five"])
        streaming.ended.set()
        sent = [b"first", b"one", b"two", b"three", b"four", b"five"]
        assert await messages(connection) == sent


async def test_messages_of_several_streams_are_sent_together(
    port: int, streaming: Streaming
) -> None:
    with Connection(port) as connection:
        connection.begin()
        calls = []
        for stream in (1, 3):
            ask(connection, stream)
            calls.append(await streaming.begun())
        for call in calls:
            assert call.write([b"one"])
            assert call.write([b"two"])
        streaming.ended.set()
        for stream in (1, 3):
            assert await messages(connection, stream) == [b"first", b"one", b"two"]


async def test_no_message_is_sent_in_parts(port: int, streaming: Streaming) -> None:
    with Connection(port) as connection:
        connection.begin(INITIAL_WINDOW_SIZE=40)
        ask(connection)
        call = await streaming.begun()
        size = 40 - 2 * 5 - len(b"first")
        assert not call.write([bytes(size + 1)])
        assert call.write([bytes(size)])
        assert not call.write([b""])
        streaming.ended.set()
        assert await messages(connection) == [b"first", bytes(size)]


async def test_no_message_is_sent_beyond_the_window_of_the_connection(
    port: int, streaming: Streaming
) -> None:
    with Connection(port) as connection:
        connection.begin(INITIAL_WINDOW_SIZE=WIDEST)
        ask(connection)
        call = await streaming.begun()
        assert call.write([bytes(DEFAULT_WINDOW // 2)])
        assert not call.write([bytes(DEFAULT_WINDOW // 2)])
        streaming.ended.set()
        assert await messages(connection) == [b"first", bytes(DEFAULT_WINDOW // 2)]


async def test_a_large_message_is_not_sent_at_once(port: int, streaming: Streaming) -> None:
    with Connection(port) as connection:
        connection.begin(INITIAL_WINDOW_SIZE=WIDEST)
        connection.send(WindowUpdateFrame(0, window_increment=WIDEST - DEFAULT_WINDOW))
        ask(connection)
        call = await streaming.begun()
        assert not call.write([bytes(64 << 10)])
        assert not call.write([bytes(1 << 20)])
        assert not call.write([bytes(10_000)] * 7)


async def test_no_message_is_sent_at_once_to_a_client_that_does_not_read(
    port: int, streaming: Streaming
) -> None:
    with Connection(port, receive_buffer=4096) as connection:
        connection.begin(INITIAL_WINDOW_SIZE=WIDEST)
        connection.send(WindowUpdateFrame(0, window_increment=WIDEST - DEFAULT_WINDOW))
        ask(connection)
        call = await streaming.begun()
        sent = 0
        while sent < FAR and call.write([bytes(10_000)]):
            sent += 1
        assert 0 < sent < FAR
        streaming.ended.set()
        assert len(await messages(connection)) == 1 + sent


async def test_no_message_is_sent_after_a_reset(port: int, streaming: Streaming) -> None:
    with Connection(port) as connection:
        connection.begin()
        ask(connection)
        call = await streaming.begun()
        connection.send(RstStreamFrame(1, error_code=CANCEL))
        ask(connection, 3)
        await streaming.begun()  # the reset has arrived before
        assert not call.write([b"one"])


@pytest.mark.parametrize("port", [CompressionLevel.LOW], indirect=True)
async def test_messages_to_compress_are_not_sent_at_once(port: int, streaming: Streaming) -> None:
    with Connection(port) as connection:
        connection.begin()
        ask(connection)
        call = await streaming.begun()
        assert not call.write([b"one"])


async def test_no_message_is_sent_after_a_disconnect(port: int, streaming: Streaming) -> None:
    with Connection(port) as connection:
        connection.begin()
        ask(connection)
        call = await streaming.begun()
    await until(lambda: not call.write([b"one"]))


async def test_a_message_waits_behind_a_stream_that_is_first_in_line_for_the_connection(
    port: int, streaming: Streaming
) -> None:
    with Connection(port) as connection:
        connection.begin(INITIAL_WINDOW_SIZE=WIDEST)
        calls = []
        for stream in (1, 3):
            ask(connection, stream)
            calls.append(await streaming.begun())
        writing, waiting = calls
        sending = asyncio.create_task(waiting.send([bytes(200_000)]))
        await settle()
        held: Any = writing
        client = held._request._conn  # noqa: SLF001 - its windows
        assert client.conn_send_window == 0
        connection.send(WindowUpdateFrame(0, window_increment=30_000))
        async with asyncio.timeout(WAIT_SECS):
            while not client.conn_send_window:  # noqa: ASYNC110 - until its task takes all of it
                await asyncio.sleep(0)
        assert not writing.write([b"text"])
        connection.send(WindowUpdateFrame(0, window_increment=1_000_000))
        await soon(asyncio.gather(sending, writing.send([b"text"])))
        streaming.ended.set()
        assert await messages(connection, 1) == [b"first", b"text"]
        assert await messages(connection, 3) == [b"first", bytes(200_000)]
