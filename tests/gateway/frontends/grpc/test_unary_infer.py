"""ModelInfer of messages that arrive as a whole: they need no task."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hyperframe.frame import DataFrame, Frame, RstStreamFrame, WindowUpdateFrame

from backends.identity import ExecutionGate
from gateway.dataplane import DataPlane
from gateway.errors import Code, InferenceError, unexpected
from gateway.frontends.grpc.hyper_limits import TURN_BYTES
from gateway.frontends.grpc.hyper_transport import HyperConnection, HyperTransport
from gateway.frontends.grpc.response import InferResponseEncoder
from gateway.frontends.grpc.server import GrpcServer
from gateway.messages import InferResponse
from gateway.protos import grpc_service_pb2 as pb
from gateway.settings import CompressionLevel, GrpcSettings
from tests.builders import DECOUPLED, WAIT_SECS, LoadedModels, ScriptedInstance, settle, soon
from tests.conftest import Serve
from tests.gateway.frontends.http.test_infer import ECHO, FLOATS, echo
from tests.http2 import CANCEL, DEFAULT_WINDOW, Answer, Connection, message, request

PATH = "/inference.GRPCInferenceService/ModelInfer"
SETTINGS = GrpcSettings(address="127.0.0.1", port=0)
LLM = replace(ECHO, name="llm", model_transaction_policy=DECOUPLED)


def asked(data: bytes = FLOATS, **fields: Any) -> bytes:
    """A message with one input of floats."""
    found = pb.ModelInferRequest(**{"model_name": "echo", **fields})
    found.inputs.add(name="X", datatype="FP32", shape=[len(data) // 4])
    found.raw_input_contents.append(data)
    return found.SerializeToString()


ASKED = asked()
MESSAGES = {
    "floats": message(ASKED),
    "an id": message(asked(id="a")),
    "a version": message(asked(model_version="1")),
    "no model": message(asked(model_name="none")),
    "no version": message(asked(model_version="7")),
    "a decoupled model": message(asked(model_name="llm")),
    "no input": message(pb.ModelInferRequest(model_name="echo").SerializeToString()),
    "no protobuf": message(b"\xff"),
    "nothing": message(b""),
    "a wrong flag": message(ASKED, flag=2),
    "a compressed message": message(ASKED, flag=1),
    "two messages": message(ASKED) + message(ASKED),
    "half a message": message(ASKED)[:-1],
    "no message": b"",
}
HEADERS: dict[str, list[tuple[str, str]]] = {
    "a malformed deadline": [("grpc-timeout", "soon")],
    "an encoding": [("grpc-encoding", "identity")],
    "an unknown encoding": [("grpc-encoding", "br")],
    "another content type": [("content-type", "text/plain")],
}


@dataclass(slots=True)
class Served:
    """A server of gRPC, and its data plane."""

    server: GrpcServer
    dataplane: DataPlane

    @contextmanager
    def connected(self, **settings: int) -> Any:
        with Connection(self.server.port) as found:
            yield found.begin(**settings)

    @property
    def connections(self) -> set[HyperConnection]:
        transport = self.server._transport  # noqa: SLF001 - tasks of RPCs are not visible otherwise
        assert isinstance(transport, HyperTransport)
        return transport._shared.connections  # noqa: SLF001

    @property
    def tasks(self) -> int:
        """The number of RPCs that have a task."""
        return sum(len(each._rpcs) for each in self.connections)  # noqa: SLF001


@asynccontextmanager
async def served(*models: Any, settings: GrpcSettings = SETTINGS) -> AsyncIterator[Served]:
    """A server; afterwards nothing of a request is left."""
    dataplane = DataPlane(LoadedModels(*models))  # type: ignore[arg-type]
    found = Served(GrpcServer(dataplane, settings, "id"), dataplane)
    await found.server.start()
    yield found
    await soon(asyncio.gather(found.server.stop(), found.server.cut_off(60.0)))
    assert not found.connections
    assert not any(model.requests for model in models)


def whole(connection: Connection, body: bytes, *more: tuple[str, str], stream: int = 1) -> None:
    """Send a request in one write."""
    headers = connection.headers(stream, request(PATH, *more))
    connection.send(headers, DataFrame(stream, body, flags=("END_STREAM",)))


async def read(connection: Connection, stream: int = 1) -> Answer:
    return await asyncio.to_thread(connection.answer, stream)


def shown(answer: Answer) -> tuple[Any, ...]:
    return answer.head, answer.body, answer.trailers, answer.reset


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_SECS):
        while not holds():  # noqa: ASYNC110 - the other end of a socket
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("name", MESSAGES)
async def test_a_message_in_one_piece_has_the_same_answer_as_in_two(
    serve: Serve, name: str
) -> None:
    body = MESSAGES[name]
    async with served(serve(echo(), config=ECHO), serve(echo(), config=LLM)) as server:
        with server.connected() as connection:
            whole(connection, body)
            found = await read(connection)
        with server.connected() as connection:
            connection.send(connection.headers(1, request(PATH)), DataFrame(1, body[:3]))
            connection.send(DataFrame(1, body[3:], flags=("END_STREAM",)))
            assert shown(await read(connection)) == shown(found)


@pytest.mark.parametrize("name", HEADERS)
async def test_headers_that_need_a_task_have_their_answer(serve: Serve, name: str) -> None:
    gate = ExecutionGate()
    async with served(serve(echo(gate=gate), config=ECHO)) as server, asyncio.TaskGroup() as tasks:
        with server.connected() as connection:
            whole(connection, MESSAGES["floats"], *HEADERS[name])
            answer = tasks.create_task(read(connection))
            if name == "an encoding":
                await soon(gate.reached(1))
                assert server.tasks == 1
                gate.open()
            found = await answer
        assert (found.grpc_status == 0) == (name == "an encoding")


@pytest.mark.parametrize(
    "headers", [[], [("grpc-timeout", "10S")]], ids=["no deadline", "a deadline"]
)
async def test_no_task_waits_for_the_response(serve: Serve, headers: list[tuple[str, str]]) -> None:
    gate = ExecutionGate()
    async with served(serve(echo(gate=gate), config=ECHO)) as server:
        with server.connected() as connection:
            whole(connection, MESSAGES["floats"], *headers)
            await soon(gate.reached(1))
            assert server.tasks == 0
            gate.open()
            (found,) = (await read(connection)).messages
            assert pb.ModelInferResponse.FromString(found).raw_output_contents == [FLOATS]
        with server.connected() as connection:
            connection.send(connection.headers(1, request(PATH)))
            await until(lambda: server.tasks == 1)


async def test_a_deadline_ends_the_request_without_a_task(serve: Serve) -> None:
    gate = ExecutionGate()
    async with served(serve(echo(gate=gate), config=ECHO)) as server:
        with server.connected() as connection:
            whole(connection, MESSAGES["floats"], ("grpc-timeout", "100m"))
            await soon(gate.reached(1))
            assert server.tasks == 0
            found = await read(connection)
            assert found.client_status == "DEADLINE_EXCEEDED"
            assert found.grpc_message == "Deadline Exceeded"
            await until(lambda: not server.dataplane.model("echo", "").requests)
            gate.open()
            whole(connection, MESSAGES["floats"], stream=3)
            assert (await read(connection, stream=3)).grpc_status == 0


async def test_messages_that_need_a_task_get_one(serve: Serve) -> None:
    gate = ExecutionGate()
    small, large = bytes(TURN_BYTES // 2), bytes(TURN_BYTES)
    async with served(serve(echo(gate=gate), config=ECHO)) as server:
        with server.connected() as connection:
            whole(connection, message(asked(small)))
            await soon(gate.reached(1))
            assert server.tasks == 0
            whole(connection, message(asked(large)), stream=3)
            await until(lambda: server.tasks == 1)
            gate.open()
            assert (await read(connection)).client_status == "OK"
            assert (await read(connection, 3)).client_status == "OK"


async def test_compression_needs_a_task(serve: Serve) -> None:
    gate = ExecutionGate()
    settings = replace(SETTINGS, compression=CompressionLevel.LOW)
    async with served(serve(echo(gate=gate), config=ECHO), settings=settings) as server:
        with server.connected() as connection:
            whole(connection, MESSAGES["floats"])
            await soon(gate.reached(1))
            assert server.tasks == 1
            gate.open()
            assert (await read(connection)).client_status == "OK"


async def test_requests_of_one_write_are_answered(serve: Serve) -> None:
    streams = range(1, 41, 2)
    async with served(serve(echo(), config=ECHO)) as server:
        with server.connected() as connection:
            parts: list[bytes | Frame] = []
            for each in streams:
                body = message(asked(id=f"{each}"))
                parts += [connection.headers(each, request(PATH))]
                parts += [DataFrame(each, body, flags=("END_STREAM",))]
            connection.send(*parts)
            for each in streams:
                (found,) = (await read(connection, each)).messages
                assert pb.ModelInferResponse.FromString(found).id == f"{each}"


def reset(connection: Connection) -> None:
    connection.send(RstStreamFrame(1, CANCEL))


@pytest.mark.parametrize("leave", [reset, Connection.close, Connection.reset])
async def test_the_model_stops_when_the_client_disconnects(
    serve: Serve, leave: Callable[[Connection], None]
) -> None:
    instance = ScriptedInstance()
    async with served(serve(instance, config=ECHO)) as server:
        with server.connected() as connection:
            whole(connection, MESSAGES["floats"])
            execution = await instance.begun()
            leave(connection)
            await soon(execution.stopped.wait())
        await until(lambda: not server.dataplane.model("echo").requests)


async def test_a_reset_while_the_request_is_queued_ends_it(serve: Serve) -> None:
    instance = ScriptedInstance(concurrency=1)
    model = serve(instance, config=ECHO)
    async with served(model) as server:
        with server.connected() as first, server.connected() as connection:
            whole(first, MESSAGES["floats"])
            execution = await instance.begun()
            whole(connection, MESSAGES["floats"])
            await until(lambda: len(model.requests) == 2)
            reset(connection)
            await until(lambda: len(model.requests) == 1)
            execution.end()
            assert (await read(first)).client_status == "INTERNAL"
            assert len(instance.executions) == 1


async def test_a_client_without_a_window_is_waited_for(serve: Serve) -> None:
    async with served(serve(echo(), config=ECHO)) as server:
        with server.connected(INITIAL_WINDOW_SIZE=0) as connection:
            whole(connection, MESSAGES["floats"])
            await asyncio.to_thread(connection.head, 1)
            assert server.tasks == 1
            assert not server.dataplane.model("echo").requests
            connection.send(WindowUpdateFrame(1, DEFAULT_WINDOW))
            assert (await read(connection)).client_status == "OK"
            await until(lambda: server.tasks == 0)


async def test_a_client_without_a_window_may_reset_its_stream(serve: Serve) -> None:
    async with served(serve(echo(), config=ECHO)) as server:
        with server.connected(INITIAL_WINDOW_SIZE=0) as connection:
            whole(connection, MESSAGES["floats"])
            await asyncio.to_thread(connection.head, 1)
            reset(connection)
            await until(lambda: server.tasks == 0)


async def test_a_large_answer_is_sent_as_a_whole(serve: Serve) -> None:
    instance = ScriptedInstance()
    async with served(serve(instance, config=ECHO)) as server:
        with server.connected() as connection:
            whole(connection, MESSAGES["floats"])
            execution = await instance.begun()
            (given,) = execution.requests[0].inputs
            large = replace(given, name="Y", shape=(250_000,), data=bytes(1_000_000))
            execution.answer(InferResponse(outputs=(large,), final=True))
            execution.end()
            (found,) = (await read(connection)).messages
            assert pb.ModelInferResponse.FromString(found).raw_output_contents == [large.data]


@pytest.mark.parametrize(
    "error", [InferenceError(Code.UNAVAILABLE, "no such token"), RuntimeError("secret")]
)
async def test_an_error_of_the_model_is_the_status(serve: Serve, error: Exception) -> None:
    instance = ScriptedInstance()
    async with served(serve(instance, config=ECHO)) as server:
        with server.connected() as connection:
            whole(connection, MESSAGES["floats"])
            (await instance.begun()).steps.put_nowait(error)
            found = await read(connection)
    assert found.client_status == (
        "UNAVAILABLE" if isinstance(error, InferenceError) else "INTERNAL"
    )
    assert "secret" not in found.grpc_message


async def test_a_defect_is_answered_and_logged(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(InferResponseEncoder, "encode", lambda *_: 1 / 0)
    async with served(serve(echo(), config=ECHO)) as server:
        with server.connected() as connection:
            whole(connection, MESSAGES["floats"])
            found = await read(connection)
    assert (found.client_status, found.grpc_message) == ("INTERNAL", unexpected().message)
    assert "ZeroDivisionError" in caplog.text


async def test_a_request_in_flight_is_answered_during_shutdown(serve: Serve) -> None:
    instance = ScriptedInstance()
    async with served(serve(instance, config=ECHO)) as server:
        with server.connected() as connection:
            whole(connection, MESSAGES["floats"])
            execution = await instance.begun()
            stopping = asyncio.create_task(server.server.stop())
            reading = asyncio.create_task(asyncio.to_thread(until_trailers, connection))
            await settle()
            assert not stopping.done()
            execution.answer(InferResponse(outputs=execution.requests[0].inputs, final=True))
            execution.end()
            assert (await soon(reading)).client_status == "OK"
        await soon(stopping)


def until_trailers(connection: Connection) -> Answer:
    """The answer of a connection that the server shuts down."""
    found = connection.known(1)
    while not found.ended:
        part = connection.receive()
        if part is not None and type(part).__name__ != "GoAwayFrame":
            connection.take(part)
    return found


async def test_a_request_ends_with_its_connection_at_the_end_of_the_grace_period(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    instance = ScriptedInstance()
    async with served(serve(instance, config=ECHO)) as server:
        with server.connected() as connection:
            whole(connection, MESSAGES["floats"])
            execution = await instance.begun()
            await soon(asyncio.gather(server.server.stop(), server.server.cut_off(0.01)))
            await soon(execution.stopped.wait())
    assert [each for each in caplog.records if each.levelno >= logging.WARNING] == []


async def test_the_answer_is_written_in_the_call_that_puts_the_response(serve: Serve) -> None:
    instance = ScriptedInstance()
    model = serve(instance, config=ECHO)
    async with served(model) as server:
        with server.connected() as connection:
            whole(connection, MESSAGES["floats"])
            execution = await instance.begun()
            (stream,) = model.requests.values()
            stream.put(InferResponse(outputs=execution.requests[0].inputs, final=True))
            # No turn of the event loop: this thread reads itself.
            assert connection.answer(1).client_status == "OK"
            execution.end()


async def test_answers_of_several_streams_are_written_together(serve: Serve) -> None:
    instance = ScriptedInstance()
    model = serve(instance, config=ECHO)
    async with served(model) as server:
        with server.connected() as connection:
            for each in (1, 3):
                whole(connection, MESSAGES["floats"], stream=each)
            executions = [await instance.begun() for _ in range(2)]
            (connection_there,) = server.connections
            response = InferResponse(outputs=executions[0].requests[0].inputs, final=True)
            for stream in tuple(model.requests.values()):
                stream.put(response)
                assert connection_there._server.connection.has_pending()  # noqa: SLF001
            for each in (1, 3):
                assert (await read(connection, each)).client_status == "OK"
            for execution in executions:
                execution.end()
