"""Traces of requests over gRPC."""

import asyncio

from hyperframe.frame import DataFrame

from backends.identity import ExecutionGate
from tests.builders import KeptTraces, moments, settle, soon
from tests.conftest import Serve
from tests.gateway.frontends.grpc.test_unary_infer import (
    ECHO,
    MESSAGES,
    PATH,
    echo,
    read,
    served,
    until,
    whole,
)
from tests.http2 import request


async def test_the_trace_of_a_request_without_a_task_ends_with_its_response(serve: Serve) -> None:
    gate, traces = ExecutionGate(), KeptTraces()
    async with served(serve(echo(gate=gate), config=ECHO)) as server:
        server.dataplane.tracer = traces.tracer(rate=1)
        with server.connected() as connection:
            whole(connection, MESSAGES["floats"])
            await soon(gate.reached(1))
            assert (server.tasks, traces.kept) == (0, [])
            gate.open()
            assert (await read(connection)).client_status == "OK"
    (names,) = traces.names
    assert names[:2] == ["GRPC_WAITREAD_START", "GRPC_WAITREAD_END"]
    assert names[-3:] == ["REQUEST_END", "GRPC_SEND_START", "GRPC_SEND_END"]


async def test_a_trace_begins_with_the_headers_of_its_rpc(serve: Serve) -> None:
    traces = KeptTraces()
    async with served(serve(echo(), config=ECHO)) as server:
        server.dataplane.tracer = traces.tracer(rate=1)
        with server.connected() as connection:
            connection.send(connection.headers(1, request(PATH)))
            await settle()  # the server reads them
            await asyncio.sleep(0.02)
            connection.send(DataFrame(1, MESSAGES["floats"], flags=("END_STREAM",)))
            assert (await read(connection)).client_status == "OK"
        await until(lambda: bool(traces.kept))
    (began, _), (whole, _) = moments(traces.kept[0])[:2]
    assert whole - began >= 10_000_000
