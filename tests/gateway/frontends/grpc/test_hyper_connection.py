"""How an RPC on hyper's HTTP/2, and a connection, come to their end when all goes wrong."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hyperframe.frame import DataFrame, WindowUpdateFrame

from gateway.frontends.grpc import hyper_limits
from gateway.frontends.grpc.hyper_connection import Connection as Served
from gateway.frontends.grpc.hyper_connection import Shared
from gateway.frontends.grpc.hyper_events import LeanBackend
from gateway.frontends.grpc.hyper_transport import HyperTransport
from gateway.frontends.grpc.methods import Method
from gateway.frontends.grpc.room import Room
from gateway.frontends.grpc.rpc import Call
from gateway.settings import GrpcSettings
from tests.builders import soon
from tests.conformance import abuses
from tests.conformance.abuses import frame
from tests.conftest import tasks_left
from tests.http2 import PREFACE, Answer, Connection, message, request

LARGE = 200_000
DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
OVERFLOW = 2**31 - 1


class Service:
    """A method with a large answer, and one that waits for what never comes."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def large(self, message: bytes, call: Call) -> bytes:
        return bytes(LARGE)

    async def wait(self, message: bytes, call: Call) -> bytes:
        self.begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()
        raise AssertionError("an event was set that nobody sets")

    def methods(self) -> dict[str, Method]:
        return {
            "/test/large": Method(self.large, bytes, bytes),
            "/test/wait": Method(self.wait, bytes, bytes),
        }


@pytest.fixture
async def service() -> Service:
    return Service()


@pytest.fixture
async def transport(
    service: Service, caplog: pytest.LogCaptureFixture
) -> AsyncIterator[HyperTransport]:
    """It ends at once when its clients have left, and says of no defect."""
    found = HyperTransport(service.methods(), GrpcSettings(address="127.0.0.1", port=0))
    await found.start()
    yield found
    await soon(asyncio.gather(found.stop(), found.cut_off(60.0)))
    assert tasks_left() == []
    assert [each for each in caplog.records if each.levelno >= logging.WARNING] == []


def ask(connection: Connection, path: str, *more: tuple[str, str], stream: int = 1) -> None:
    headers = connection.headers(stream, request(path, *more))
    connection.send(headers, frame(abuses.DATA, abuses.END_STREAM, stream, message(b"x")))


def unopened(connection: Connection) -> Answer:
    """The end of the first RPC for a client that opens no window."""
    found = connection.head(1)
    while not found.ended:
        part = connection.receive()
        if not isinstance(part, DataFrame):
            connection.take(part)
    return found


async def test_a_deadline_within_a_large_answer_ends_the_rpc_with_its_status(
    transport: HyperTransport,
) -> None:
    with Connection(transport.port) as connection:
        connection.send(PREFACE + abuses.setting(abuses.INITIAL_WINDOW, 1000))
        ask(connection, "/test/large", ("grpc-timeout", "200m"))
        found = await asyncio.to_thread(unopened, connection)
        assert found.client_status == DEADLINE_EXCEEDED


async def test_a_stream_that_the_server_resets_takes_its_method_with_it(
    transport: HyperTransport, service: Service
) -> None:
    with Connection(transport.port) as connection:
        connection.begin()
        ask(connection, "/test/wait")
        await soon(service.begun.wait())
        connection.send(WindowUpdateFrame(1, window_increment=OVERFLOW))
        await soon(service.cancelled.wait())


async def test_who_comes_at_the_end_is_not_served(service: Service) -> None:
    class Socket:
        aborted = False

        def get_extra_info(self, name: str) -> None:
            return None

        def set_write_buffer_limits(self, high: int) -> None:
            pass

        def write(self, data: object) -> None:
            pass

        def is_closing(self) -> bool:
            return self.aborted

        def get_write_buffer_size(self) -> int:
            return 0

        def abort(self) -> None:
            self.aborted = True

        close = abort

    shared = Shared(service.methods(), GrpcSettings(), is_closing=True)
    late, socket = Served(shared), Socket()
    late.connection_made(socket)
    assert socket.aborted
    late.connection_lost(None)
    await soon(late.wait_closed())
    assert not shared.connections


async def test_what_is_read_of_a_connection_that_is_gone_takes_no_room() -> None:
    class Free(hyper_limits.BoundedConnection):
        conn_recv_available = 0

    room = Room(1 << 40)
    gone: Any = Free(
        object(), backend=LeanBackend(asyncio.get_running_loop()), max_concurrent_streams=1
    )
    gone.bound(room, lambda request: None)
    gone.leave()
    gone.receive(PREFACE)
    room.take(1 << 40)
