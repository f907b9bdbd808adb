"""RPCs without a task: answers that cannot be sent, and the eager start of coroutines."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
from hyperframe.frame import RstStreamFrame

from gateway.frontends.grpc import hyper_begun
from gateway.frontends.grpc.hyper_begun import start_eagerly
from gateway.frontends.grpc.hyper_transport import HyperTransport
from gateway.frontends.grpc.rpc import BegunCall, Method, RpcHead
from gateway.policy.caller import Caller
from gateway.settings import GrpcSettings
from tests.builders import soon
from tests.conformance import abuses
from tests.conformance.abuses import frame
from tests.http2 import CANCEL, Connection, message, request

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


class Begun:
    """A method whose RPCs wait for the test; `found` are their callers, before its guard."""

    def __init__(self) -> None:
        self.calls: asyncio.Queue[BegunCall] = asyncio.Queue()
        self.found: list[Caller | None] = []
        self.caller = Caller()

    def guard(self, call: RpcHead) -> None:
        self.found.append(call.caller)
        call.caller = self.caller

    def may_begin(self, size_bytes: int) -> bool:
        return True

    def begin(self, message: bytes, call: BegunCall) -> None:
        self.calls.put_nowait(call)

    async def serve(self, message: bytes, call: object) -> bytes:
        raise AssertionError("an RPC has a task")


@pytest.fixture
async def begun() -> Begun:
    return Begun()


@pytest.fixture
async def connection(begun: Begun) -> AsyncIterator[Connection]:
    """A client of that method, `/test/begun`."""
    method = Method(begun.serve, bytes, bytes, guard=begun.guard, beginning=begun)
    transport = HyperTransport({"/test/begun": method}, GrpcSettings(address="127.0.0.1", port=0))
    await transport.start()
    with Connection(transport.port) as found:
        found.begin()
        yield found
    await soon(asyncio.gather(transport.stop(), transport.cut_off(60.0)))


async def call_on(
    connection: Connection, begun: Begun, stream: int, *more: tuple[str, str]
) -> BegunCall:
    headers = connection.headers(stream, request("/test/begun", *more))
    connection.send(headers, frame(abuses.DATA, abuses.END_STREAM, stream, message(b"x")))
    return await soon(begun.calls.get())


async def test_an_answer_that_fails_ends_its_rpc_only(
    begun: Begun,
    connection: Connection,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = await call_on(connection, begun, 1)
    with monkeypatch.context() as patched:
        patched.setattr(hyper_begun, "framed", lambda _: 1 / 0)
        first.answer(b"one")
    assert "ZeroDivisionError" in caplog.text
    assert (await asyncio.to_thread(connection.answer, 1)).reset is not None
    (await call_on(connection, begun, 3)).answer(b"two")
    assert (await asyncio.to_thread(connection.answer, 3)).messages == [b"two"]


async def test_an_answer_to_a_reset_rpc_is_not_sent(begun: Begun, connection: Connection) -> None:
    first: Any = await call_on(connection, begun, 1)
    connection.send(RstStreamFrame(1, error_code=CANCEL))
    second = await call_on(connection, begun, 3)
    first._ended = False  # noqa: SLF001 - as if the reset were noticed later
    first.answer(b"one")
    second.answer(b"two")
    assert (await asyncio.to_thread(connection.answer, 3)).messages == [b"two"]
    assert not connection.known(1).head


async def test_the_headers_of_each_rpc_count(begun: Begun, connection: Connection) -> None:
    (await call_on(connection, begun, 1)).answer(b"one")
    await call_on(connection, begun, 3, ("grpc-timeout", "50m"))
    late = await asyncio.to_thread(connection.answer, 3)
    assert late.client_status == "DEADLINE_EXCEEDED"
    refused = connection.headers(5, request("/test/begun", without=("te",)))
    connection.send(refused, frame(abuses.DATA, abuses.END_STREAM, 5, message(b"x")))
    assert "te: trailers" in (await asyncio.to_thread(connection.answer, 5)).grpc_message
    (await call_on(connection, begun, 7)).answer(b"two")
    assert (await asyncio.to_thread(connection.answer, 7)).messages == [b"two"]


async def test_an_rpc_with_the_headers_of_the_last_one_has_its_caller(
    begun: Begun, connection: Connection
) -> None:
    other, limited = ("x-api-key", "other"), ("grpc-timeout", "9S")
    for stream, more in enumerate(((), (), (other,), (other, limited), (other,), ())):
        (await call_on(connection, begun, 2 * stream + 1, *more)).answer(b"one")
    caller = begun.caller
    assert begun.found == [None, caller, None, None, caller, None]
