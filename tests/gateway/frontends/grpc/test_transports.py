"""Metadata, deadlines, disconnects and errors of methods on each transport."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from hyperframe.frame import DataFrame, RstStreamFrame

from gateway.errors import unexpected
from gateway.frontends.grpc.hyper_transport import HyperTransport
from gateway.frontends.grpc.rpc import (
    BegunCall,
    ClientDisconnected,
    Method,
    RpcCall,
    Serve,
    Transport,
)
from gateway.frontends.grpc.server import TRANSPORTS
from gateway.frontends.grpc.status import RpcError, StatusCode
from gateway.settings import GrpcSettings, GrpcTransport
from tests.builders import soon
from tests.conftest import tasks_left
from tests.http2 import CANCEL, Answer, Connection, message, request
from tests.serving import WAIT_SECS

PROMPTLY_SECS = 0.5
"""On an idle machine it takes a quarter of a millisecond."""

TOLD = "x-told"


class Service:
    """Methods; those that wait record their start and their cancellation."""

    def __init__(self) -> None:
        self.begun: asyncio.Queue[str] = asyncio.Queue()
        self.cancelled: asyncio.Queue[float] = asyncio.Queue()
        self.ended: asyncio.Queue[float] = asyncio.Queue()

    async def wait(self, message: bytes, call: RpcCall) -> bytes:
        """Wait forever."""
        with self._noted(call):
            await asyncio.Event().wait()
        raise AssertionError("an event was set that nobody sets")

    async def read(self, messages: AsyncIterator[bytes], call: RpcCall) -> None:
        """Read all there is, and then wait."""
        with self._noted(call):
            async for _ in messages:
                self.begun.put_nowait("message")
            self.begun.put_nowait("end")
            await asyncio.Event().wait()

    async def write(self, messages: AsyncIterator[bytes], call: RpcCall) -> None:
        """Send without an end."""
        with self._noted(call):
            while True:
                await call.send([bytes(10_000)])

    async def tell(self, message: bytes, call: RpcCall) -> bytes:
        """Answer with the metadata that came."""
        found = sorted((name, value) for name, value in call.metadata if name.startswith("x"))
        return repr(found).encode()

    async def fail(self, message: bytes, call: RpcCall) -> bytes:
        """Fail with the text that came."""
        raise RpcError(StatusCode.ABORTED, message.decode())

    async def decorate(self, message: bytes, call: RpcCall) -> bytes:
        """Send metadata before and behind the answer."""
        await call.send_initial_metadata([(TOLD, "a"), (TOLD, "b"), (f"{TOLD}-bin", b"\0\xff")])
        call.set_trailing_metadata([(TOLD, "c"), (TOLD, "d"), (f"{TOLD}-bin", b"\1\xfe")])
        return message

    @contextmanager
    def _noted(self, call: RpcCall) -> Any:
        call.on_end(lambda: self.ended.put_nowait(time.perf_counter()))
        self.begun.put_nowait("method")
        try:
            yield
        except (asyncio.CancelledError, ClientDisconnected):
            self.cancelled.put_nowait(time.perf_counter())
            raise

    async def give_up(self, message: bytes, call: RpcCall) -> bytes:
        """Raise CancelledError without a cancellation of the task."""
        raise asyncio.CancelledError

    def methods(self, *, begun: bool = False) -> dict[str, Method]:
        streams = {"client_streams": True, "server_streams": True}
        begins = {each: Begun(each) for each in (self.wait, self.tell, self.fail) if begun}
        begins |= {self.give_up: GivingUp(self.give_up)} if begun else {}
        return {
            **{
                f"/test.Service/{each.__name__}": Method(
                    each, bytes, bytes, beginning=begins.get(each)
                )
                for each in (self.wait, self.tell, self.fail, self.decorate, self.give_up)
            },
            **{
                f"/test.Service/{each.__name__}": Method(each, bytes, bytes, **streams)
                for each in (self.read, self.write)
            },
        }


class Begun:
    """A method that is begun without a task of the transport; one of its own runs it."""

    def __init__(self, method: Serve) -> None:
        self._method = method
        self._tasks: set[asyncio.Task[None]] = set()

    def may_begin(self, size_bytes: int) -> bool:
        return True

    def begin(self, message: bytes, call: BegunCall) -> None:
        task = asyncio.get_running_loop().create_task(self._run(message, call))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        call.on_disconnect(task.cancel)

    async def _run(self, message: bytes, call: BegunCall) -> None:
        with ExitStack() as ending:
            known: Any = SimpleNamespace(metadata=call.metadata, on_end=ending.callback)
            try:
                answer = await self._method(message, known)
            except RpcError as error:
                call.fail(error)
            else:
                call.answer(answer)


class GivingUp(Begun):
    """A method that raises CancelledError as it is begun."""

    def begin(self, message: bytes, call: BegunCall) -> None:
        raise asyncio.CancelledError


@pytest.fixture
async def service() -> Service:
    return Service()


BEGUN = "hyper, without tasks"


@pytest.fixture(params=[*GrpcTransport, BEGUN])
async def transport(
    request: pytest.FixtureRequest, service: Service, caplog: pytest.LogCaptureFixture
) -> AsyncIterator[Transport]:
    """Each transport; it stops at once after all disconnects, without remaining tasks.

    That a client leaves is no error, and so is not in the log.
    """
    async with serving(service, request.param) as found:
        yield found
    if isinstance(found, HyperTransport):  # grpc.aio has tasks of its own
        assert tasks_left() == []
    logged = [*caplog.get_records("call"), *caplog.records]
    assert [each for each in logged if each.levelno >= logging.WARNING and _is_ours(each)] == []


def _is_ours(record: logging.LogRecord) -> bool:
    """grpcio logs metadata that are not UTF-8 before it decodes them otherwise."""
    return not record.getMessage().startswith("Invalid encoding")


@pytest.fixture
async def connection(transport: Transport) -> AsyncIterator[Connection]:
    with Connection(transport.port) as found:
        found.begin()
        yield found


@pytest.fixture
def allowed_secs(transport: Transport) -> float:
    """Maximum time from a disconnect to the cancellation; grpcio promises none."""
    return PROMPTLY_SECS if isinstance(transport, HyperTransport) else WAIT_SECS


def send(connection: Connection, method: str, *frames: Any, stream: int = 1) -> None:
    """Begin an RPC, with these frames behind its headers."""
    fields = request(f"/test.Service/{method}")
    connection.send(connection.headers(stream, fields), *frames)


async def answer(
    connection: Connection,
    method: str,
    *more: tuple[str, str | bytes],
    body: bytes = b"",
    stream: int = 1,
) -> Answer:
    """The answer to a complete request."""
    connection.send(
        connection.headers(stream, request(f"/test.Service/{method}", *more)),
        DataFrame(stream, message(body), flags=("END_STREAM",)),
    )
    return await asyncio.to_thread(connection.answer, stream)


def reset(connection: Connection) -> None:
    """Cancel the RPC, as clients of gRPC do."""
    connection.send(RstStreamFrame(1, CANCEL))


LEAVING: list[Callable[[Connection], None]] = [reset, Connection.close, Connection.reset]
BODY = message(b"x" * 100)
ENDING = DataFrame(1, b"", flags=("END_STREAM",))
PHASES = {
    "before a message": ("read", [], ["method"]),
    "within a message": ("read", [DataFrame(1, BODY + BODY[:50])], ["method", "message"]),
    "behind a message": ("read", [DataFrame(1, BODY)], ["method", "message"]),
    "behind the last message": ("read", [DataFrame(1, BODY), ENDING], ["method", "message", "end"]),
    "half-closed without a message": ("read", [ENDING], ["method", "end"]),
    "while a unary method runs": ("wait", [DataFrame(1, BODY), ENDING], ["method"]),
    "while answers are sent": ("write", [], ["method"]),
}


@pytest.mark.parametrize("leave", LEAVING)
@pytest.mark.parametrize("phase", PHASES)
async def test_a_disconnect_cancels_the_method_immediately(
    connection: Connection,
    service: Service,
    allowed_secs: float,
    phase: str,
    leave: Callable[[Connection], None],
) -> None:
    method, frames, begun = PHASES[phase]
    send(connection, method, *frames)
    assert [await soon(service.begun.get()) for _ in begun] == begun
    left = time.perf_counter()
    leave(connection)
    assert await soon(service.cancelled.get()) - left < allowed_secs
    assert await soon(service.ended.get()) - left < allowed_secs
    assert service.cancelled.empty()


@pytest.mark.parametrize("leave", LEAVING)
@pytest.mark.parametrize("frames", [[], [DataFrame(1, BODY[:50])], [DataFrame(1, b"")]])
async def test_a_disconnect_within_a_message_ends_the_rpc(
    connection: Connection,
    transport: Transport,
    service: Service,
    frames: list[Any],
    leave: Callable[[Connection], None],
) -> None:
    send(connection, "wait", *frames)
    leave(connection)
    with Connection(transport.port) as other:
        assert (await answer(other.begin(), "tell")).client_status == "OK"
    assert service.begun.empty()


async def test_a_reset_ends_only_its_own_rpc(connection: Connection, service: Service) -> None:
    send(connection, "wait", DataFrame(1, BODY), ENDING)
    await soon(service.begun.get())
    send(connection, "read", stream=3)
    await soon(service.begun.get())
    reset(connection)
    await soon(service.cancelled.get())
    assert (await answer(connection, "tell", stream=5)).client_status == "OK"
    assert service.cancelled.empty()


async def test_a_reset_after_the_answer_has_no_effect(
    connection: Connection, service: Service
) -> None:
    await answer(connection, "tell")
    reset(connection)
    reset(connection)
    assert (await answer(connection, "tell", stream=3)).client_status == "OK"


async def test_a_deadline_cancels_the_method_and_sends_the_status(
    connection: Connection, service: Service
) -> None:
    found = await answer(connection, "wait", ("grpc-timeout", "50m"))
    assert (found.client_status, found.grpc_message) == ("DEADLINE_EXCEEDED", "Deadline Exceeded")
    await soon(service.cancelled.get())
    await soon(service.ended.get())


@pytest.mark.parametrize("allowed", ["0m", "1n"])
async def test_a_deadline_that_has_passed_before_the_rpc_has_the_same_text(
    connection: Connection, allowed: str
) -> None:
    found = await answer(connection, "wait", ("grpc-timeout", allowed))
    assert (found.client_status, found.grpc_message) == ("DEADLINE_EXCEEDED", "Deadline Exceeded")


async def test_all_values_of_one_name_reach_the_method_in_their_order(
    connection: Connection,
) -> None:
    sent = [("x-a", "2"), ("x-b", ""), ("x-a", "1"), ("x-bin", "YQ"), ("x-bin", "/w==")]
    found = await answer(connection, "tell", *sent)
    told = [("x-a", "1"), ("x-a", "2"), ("x-b", ""), ("x-bin", b"a"), ("x-bin", b"\xff")]
    assert found.messages == [repr(told).encode()]


async def test_metadata_that_is_not_ascii_reaches_the_method(connection: Connection) -> None:
    found = await answer(connection, "tell", ("x-a", "\xe4".encode()), ("x-b", b"\xff\xfe"))
    assert found.messages == [repr([("x-a", "\xe4"), ("x-b", "\xff\xfe")]).encode()]


async def test_metadata_before_and_behind_an_answer_reaches_the_client(
    connection: Connection,
) -> None:
    found = await answer(connection, "decorate", body=b"x")
    assert found.messages == [b"x"]
    told, binary = TOLD.encode(), f"{TOLD}-bin".encode()
    before = [(told, b"a"), (told, b"b"), (binary, b"AP8")]
    behind = [(told, b"c"), (told, b"d"), (binary, b"Af4")]
    assert [pair for pair in found.head if pair[0] in (told, binary)] == before
    assert [pair for pair in found.trailers if pair[0] in (told, binary)] == behind


async def test_a_text_of_a_status_reaches_the_client_letter_by_letter(
    connection: Connection,
) -> None:
    text = "".join(map(chr, range(128))) + "100% %41 \xe4 \u20ac \U0001f600"
    found = await answer(connection, "fail", body=text.encode())
    assert found.client_status == "ABORTED"
    assert found.grpc_message == text
    raw = (found.text("grpc-message") or "").encode()
    assert all(0x20 <= byte <= 0x7E for byte in raw)


@asynccontextmanager
async def serving(service: Service, name: str) -> AsyncIterator[Transport]:
    """A transport by name, with this service."""
    begun = name == BEGUN
    transport = TRANSPORTS[GrpcTransport.HYPER if begun else GrpcTransport(name)](
        service.methods(begun=begun), GrpcSettings(address="127.0.0.1", port=0)
    )
    await transport.start()
    yield transport
    await soon(asyncio.gather(transport.stop(), transport.cut_off(60.0)))


@pytest.mark.parametrize("name", [*GrpcTransport, BEGUN])
async def test_a_stray_cancellation_ends_only_its_stream(
    service: Service, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    async with serving(service, name) as transport:
        with Connection(transport.port) as connection:
            connection.begin()
            found = await answer(connection, "give_up", body=b"x")
            assert (found.client_status, found.grpc_message) == ("INTERNAL", unexpected().message)
            found = await answer(connection, "tell", body=b"x", stream=3)
            assert found.client_status == "OK"
    (record,) = [each for each in caplog.records if each.exc_info]
    assert record.getMessage() == "request failed unexpectedly"


async def test_an_rpc_reset_before_it_is_read_never_starts(service: Service) -> None:
    async with serving(service, BEGUN) as transport:
        with Connection(transport.port) as connection:
            connection.begin()
            headers = connection.headers(1, request("/test.Service/wait"))
            connection.send(
                headers, DataFrame(1, BODY, flags=("END_STREAM",)), RstStreamFrame(1, CANCEL)
            )
            found = await answer(connection, "tell", body=b"x", stream=3)
            assert found.client_status == "OK"
    assert service.begun.empty()


async def test_an_error_outside_a_method_is_logged_and_ends_only_its_stream(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken: Any = SimpleNamespace(beginning=None)
    methods = {**Service().methods(), "/test.Service/broken": broken}
    transport = HyperTransport(methods, GrpcSettings(address="127.0.0.1", port=0))
    await transport.start()
    with Connection(transport.port) as connection:
        connection.begin()
        found = await answer(connection, "broken", body=b"x")
        assert found.client_status == "INTERNAL"
    with Connection(transport.port) as connection:
        connection.begin()
        assert (await answer(connection, "tell", body=b"x")).client_status == "OK"
    await soon(asyncio.gather(transport.stop(), transport.cut_off(60.0)))
    (record,) = [each for each in caplog.records if each.exc_info]
    assert record.getMessage() == "request failed unexpectedly"
