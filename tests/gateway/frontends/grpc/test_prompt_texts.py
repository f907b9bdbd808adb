"""ModelStreamInfer: texts that are sent in the code that puts them."""

import asyncio

from hyperframe.frame import DataFrame

from gateway.messages import Sink
from gateway.models.model import Model
from gateway.protos import grpc_service_pb2 as pb
from tests.builders import Execution, KeptTraces, ScriptedInstance, settle, text_response
from tests.conftest import Serve
from tests.gateway.frontends.grpc.stream_clients import MANY, StreamClient, begun, final_flag
from tests.gateway.frontends.grpc.test_unary_infer import read, served
from tests.http2 import Connection, message, request

PATH = "/inference.GRPCInferenceService/ModelStreamInfer"
OUTPUT = text_response("").outputs[0].name


async def answered(call: StreamClient, execution: Execution) -> Sink:
    """The sink of a request with one sent response, whose answer waits for more."""
    execution.answer(text_response("one"))
    assert (await call.said())[1] == "one"
    await settle()
    sink = execution.requests[0].sink
    assert sink is not None
    return sink


async def test_texts_are_sent_in_the_code_that_puts_them(
    models: list[Model], many: ScriptedInstance
) -> None:
    async with StreamClient(*models) as call:
        call.writes = True
        call.ask("many", "r1")
        execution = await many.begun()
        sink = await answered(call, execution)
        sink.put_texts(OUTPUT, (b"two", b"three"), (1, 1))
        assert call.written == 2
        sink.put_texts(OUTPUT, (b"four",), (1,))
        assert call.written == 3
        execution.finish("five")
        found = [await call.said() for _ in range(4)]
        assert found == [("r1", text) for text in ("two", "three", "four", "five")]
        assert call.written == 3


async def test_a_text_that_is_sent_at_once_is_as_any_other(
    models: list[Model], many: ScriptedInstance
) -> None:
    async with StreamClient(*models) as call:
        call.ask("many", "r1")
        execution = await many.begun()
        sink = await answered(call, execution)
        sink.put_texts(OUTPUT, (b"same",), (1,))
        first = await call.answer()
        await settle()
        call.writes = True
        sink.put_texts(OUTPUT, (b"same",), (1,))
        assert (call.written, final_flag(first)) == (1, False)
        assert await call.answer() == first


async def behind_another(call: StreamClient, many: ScriptedInstance) -> Sink:
    """The sink of a request, whose text waits while a message of another one is sent."""
    call.writes = True
    call.ask("many", "r1")
    call.ask("many", "r2")
    first, second = await begun(many, 2)
    sink = await answered(call, first)
    call.reads.clear()
    second.answer(text_response("x"))
    await settle()
    sink.put_texts(OUTPUT, (b"two",), (1,))
    return sink


async def test_texts_wait_while_a_message_of_another_request_is_sent(
    models: list[Model], many: ScriptedInstance
) -> None:
    async with StreamClient(*models) as call:
        await behind_another(call, many)
        assert call.written == 0
        call.reads.set()
        assert [await call.said() for _ in range(2)] == [("r2", "x"), ("r1", "two")]


async def test_no_text_overtakes_those_before_it(
    models: list[Model], many: ScriptedInstance
) -> None:
    async with StreamClient(*models) as call:
        sink = await behind_another(call, many)
        await settle()  # its answer waits for the message that is being sent
        call.reads.set()
        await asyncio.sleep(0)
        assert await call.said() == ("r2", "x")
        sink.put_texts(OUTPUT, (b"three",), (1,))
        assert [await call.said() for _ in range(2)] == [("r1", "two"), ("r1", "three")]


async def test_texts_that_cannot_be_sent_at_once_wait_in_the_stream(
    models: list[Model], many: ScriptedInstance
) -> None:
    async with StreamClient(*models) as call:
        call.ask("many", "r1")
        sink = await answered(call, await many.begun())
        sink.put_texts(OUTPUT, (b"two",), (1,))
        call.writes = True
        sink.put_texts(OUTPUT, (b"three",), (1,))  # the answer has not taken the one before
        assert [await call.said() for _ in range(2)] == [("r1", "two"), ("r1", "three")]
        assert call.written == 0


async def test_the_answer_to_a_timed_request_sends_each_text_itself(
    models: list[Model], many: ScriptedInstance
) -> None:
    async with StreamClient(*models) as call:
        call.writes = call.rpc.is_timed = True
        call.ask("many", "r1")
        sink = await answered(call, await many.begun())
        sink.put_texts(OUTPUT, (b"two",), (1,))
        assert await call.said() == ("r1", "two")
        assert call.written == 0


def ask(connection: Connection) -> None:
    """Send a request whose client may send more."""
    asked = pb.ModelInferRequest(model_name="many")
    asked.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    asked.raw_input_contents.append(b"\x01\0\0\0x")
    data = DataFrame(1, message(asked.SerializeToString()))
    connection.send(connection.headers(1, request(PATH)), data)


def next_data(connection: Connection) -> bytes:
    """The data of the next DATA frame."""
    while not isinstance(frame := connection.receive(), DataFrame):
        connection.take(frame)
    return frame.data


async def test_the_texts_of_a_lone_stream_are_written_in_the_code_that_puts_them(
    serve: Serve,
) -> None:
    many = ScriptedInstance()
    async with served(serve(many, config=MANY)) as server:
        with server.connected() as connection:
            ask(connection)
            execution = await many.begun()
            execution.answer(text_response("one"))
            await asyncio.to_thread(next_data, connection)
            await settle()
            sink = execution.requests[0].sink
            assert sink is not None
            sink.put_texts(OUTPUT, (b"two",), (1,))
            assert b"two" in next_data(connection)  # the event loop has no turn meanwhile
            execution.finish("three")
            connection.send(DataFrame(1, flags=("END_STREAM",)))
            assert b"three" in (await read(connection)).body


async def test_the_trace_of_a_request_has_the_times_of_each_text(serve: Serve) -> None:
    many, traces = ScriptedInstance(), KeptTraces()
    async with served(serve(many, config=MANY)) as server:
        server.dataplane.tracer = traces.tracer(rate=1)
        with server.connected() as connection:
            ask(connection)
            execution = await many.begun()
            execution.answer(text_response("one"))
            await asyncio.to_thread(next_data, connection)
            await settle()
            sink = execution.requests[0].sink
            assert sink is not None
            sink.put_texts(OUTPUT, (b"two",), (1,))
            await asyncio.to_thread(next_data, connection)
            execution.finish("three")
            connection.send(DataFrame(1, flags=("END_STREAM",)))
            await read(connection)
    (names,) = traces.names
    assert names.count("GRPC_SEND_START") == 3
