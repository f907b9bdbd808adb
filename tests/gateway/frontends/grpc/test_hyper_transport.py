"""The end of connections and RPCs on hyper's HTTP/2 after errors."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any
from weakref import ref

import pytest
from hyperframe.frame import DataFrame, RstStreamFrame, WindowUpdateFrame

from gateway.client_limits import ConnectionLimits
from gateway.frontends.grpc import hyper_limits
from gateway.frontends.grpc.hyper_call import HyperBackend
from gateway.frontends.grpc.hyper_limits import BufferBudget
from gateway.frontends.grpc.hyper_transport import HyperConnection as Served
from gateway.frontends.grpc.hyper_transport import HyperPort, HyperTransport
from gateway.frontends.grpc.rpc import Method, RpcCall
from gateway.settings import GrpcSettings
from tests.builders import settle, soon, uncollected
from tests.conformance import abuses
from tests.conformance.abuses import frame
from tests.conftest import tasks_left
from tests.http2 import CANCEL, PREFACE, Answer, Connection, message, request

LARGE = 200_000
DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
OVERFLOW = 2**31 - 1


class Kept:
    """An object in the frame of a method."""


class Service:
    """A method with a large answer, and two that never return."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def large(self, message: bytes, call: RpcCall) -> bytes:
        return bytes(LARGE)

    async def wait(self, message: bytes, call: RpcCall) -> bytes:
        self.begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()
        raise AssertionError("an event was set that nobody sets")

    async def group(self, message: bytes, call: RpcCall) -> bytes:
        kept = Kept()
        self.kept = ref(kept)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.wait(message, call))
        return b""

    def methods(self) -> dict[str, Method]:
        return {
            "/test/large": Method(self.large, bytes, bytes),
            "/test/wait": Method(self.wait, bytes, bytes),
            "/test/group": Method(self.group, bytes, bytes),
        }


@pytest.fixture
async def service() -> Service:
    return Service()


@pytest.fixture
async def transport(
    service: Service, caplog: pytest.LogCaptureFixture
) -> AsyncIterator[HyperTransport]:
    """A transport that stops at once after all disconnects, without an error in the log."""
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


async def test_the_objects_of_a_cancelled_rpc_are_freed_at_once(
    transport: HyperTransport, service: Service
) -> None:
    with uncollected(), Connection(transport.port) as connection:
        connection.begin()
        ask(connection, "/test/group")
        await soon(service.begun.wait())
        assert service.kept() is not None
        connection.send(RstStreamFrame(1, error_code=CANCEL))
        await soon(service.cancelled.wait())
        await settle()
        assert service.kept() is None


async def test_a_connection_during_shutdown_is_not_served(service: Service) -> None:
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

    shared = HyperPort(service.methods(), GrpcSettings(), ConnectionLimits(0), is_closing=True)
    late, socket = Served(shared), Socket()
    late.connection_made(socket)
    assert socket.aborted
    late.connection_lost(None)
    await soon(late.wait_closed())
    assert not shared.connections


async def test_data_read_after_a_disconnect_do_not_count() -> None:
    class Free(hyper_limits.BoundedConnection):
        conn_recv_available = 0

    budget = BufferBudget(1 << 40)
    gone: Any = Free(
        object(), backend=HyperBackend(asyncio.get_running_loop()), max_concurrent_streams=1
    )
    gone.bound(budget, lambda request: None)
    gone.close_budget()
    gone.receive(PREFACE)
    budget.reserve(1 << 40)
