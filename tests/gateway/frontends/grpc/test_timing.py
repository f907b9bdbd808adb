"""Receipts of requests over gRPC."""

import asyncio
from dataclasses import replace

import pytest

from gateway.dataplane import DataPlane
from gateway.frontends.grpc.server import GrpcServer
from gateway.protos import grpc_service_pb2 as pb
from gateway.settings import GrpcTransport
from tests.builders import LoadedModels, soon
from tests.conftest import Serve
from tests.gateway.frontends.grpc.test_unary_infer import ECHO, SETTINGS, echo, read, whole
from tests.http2 import Connection, message


@pytest.mark.parametrize("transport", GrpcTransport)
async def test_a_refused_request_has_a_receipt_and_an_account(
    serve: Serve, transport: GrpcTransport
) -> None:
    """On hyper's transport it has no task."""
    models = LoadedModels(serve(echo(), config=ECHO))
    dataplane = DataPlane(models)  # type: ignore[arg-type]
    server = GrpcServer(dataplane, replace(SETTINGS, transport=transport), "id")
    asked = message(pb.ModelInferRequest(model_name="echo", id="a").SerializeToString())
    await server.start()
    with Connection(server.port) as connection:
        connection.begin()
        whole(connection, asked, ("x-want-timing", "1"))
        answer = await read(connection)
    await soon(asyncio.gather(server.stop(), server.cut_off(0)))
    assert answer.client_status == "INVALID_ARGUMENT"
    parts = [each.partition(";")[0] for each in (answer.text("server-timing") or "").split(", ")]
    assert parts == ["recv", "decode", "encode", "total"]
    account = dataplane.receipts.why("", "a")
    assert account is not None
    assert account["status"].startswith("refused: ")
