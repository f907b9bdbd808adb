"""The end of connections and RPCs on hyper's HTTP/2 after errors; eager start of RPCs."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any
from weakref import ref

import pytest
from hyperframe.frame import DataFrame, RstStreamFrame, WindowUpdateFrame

from gateway.frontends.grpc import hyper_limits
from gateway.frontends.grpc.hyper_call import HyperBackend
from gateway.frontends.grpc.hyper_limits import BufferBudget
from gateway.frontends.grpc.hyper_transport import HyperConnection as Served
from gateway.frontends.grpc.hyper_transport import HyperPort, HyperTransport, start_eagerly
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

    shared = HyperPort(service.methods(), GrpcSettings(), is_closing=True)
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


Made = list[asyncio.Task[None]]


@pytest.fixture
def made() -> Made:
    return []


@pytest.fixture
def create(made: Made) -> Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]:
    def keep(coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        made.append(asyncio.get_running_loop().create_task(coroutine))
        return made[-1]

    return keep


async def test_a_coroutine_without_a_wait_needs_no_task(create: Any, made: Made) -> None:
    done: list[str] = []

    async def work() -> None:
        done.append("done")

    assert start_eagerly(work(), create) is None
    assert (done, made) == (["done"], [])


async def test_a_waiting_coroutine_continues_as_a_task(create: Any) -> None:
    steps: list[object] = []
    gate: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def work() -> None:
        steps.append("begun")
        steps.append(await gate)
        await asyncio.sleep(0)
        steps.append(asyncio.current_task())

    task = start_eagerly(work(), create)
    assert steps == ["begun"]
    gate.set_result("opened")
    assert task is not None
    await soon(task)
    assert steps == ["begun", "opened", task]


@pytest.mark.parametrize("result", ["value", "error"])
async def test_a_coroutine_may_wait_for_a_future_that_is_done_early(
    create: Any, result: str
) -> None:
    gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    seen: list[str] = []

    async def work() -> None:
        try:
            await gate
            seen.append("value")
        except ValueError:
            seen.append("error")

    task = start_eagerly(work(), create)
    assert task is not None
    if result == "value":
        gate.set_result(None)
    else:
        gate.set_exception(ValueError())
    await soon(task)
    assert seen == [result]


@pytest.mark.parametrize("turns", [0, 1, 3])
async def test_a_started_coroutine_can_be_cancelled(create: Any, turns: int) -> None:
    seen: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            seen.append("cancelled")
            await asyncio.sleep(0)
            seen.append("cleaned up")
            raise

    task = start_eagerly(work(), create)
    assert task is not None
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await soon(task)
    assert seen == ["cancelled", "cleaned up"]


async def test_an_error_reaches_the_awaiting_task(create: Any) -> None:
    async def early() -> None:
        raise ValueError("early")

    async def late() -> None:
        await asyncio.sleep(0)
        raise ValueError("late")

    with pytest.raises(ValueError, match="early"):
        start_eagerly(early(), create)
    task = start_eagerly(late(), create)
    assert task is not None
    with pytest.raises(ValueError, match="late"):
        await soon(task)
