"""gRPC's test service on each transport, and each of grpcio's clients."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping

import pytest
import uvloop

from gateway.frontends.grpc.rpc import Transport
from gateway.frontends.grpc.server import TRANSPORTS, methods
from gateway.settings import CompressionLevel, GrpcSettings, GrpcTransport
from tests.interop.clients import KINDS, Client, connect
from tests.interop.messages import SERVICE
from tests.interop.service import InteropServicer


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Tests of this folder run on the loop that the server runs on."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
def servicer() -> InteropServicer:
    """The implementation behind the service."""
    return InteropServicer()


@pytest.fixture
def compression_level() -> CompressionLevel:
    """The compression of answers, unless a test sets another."""
    return CompressionLevel.NONE


@pytest.fixture(params=list(GrpcTransport))
async def transport(
    request: pytest.FixtureRequest, servicer: InteropServicer, compression_level: CompressionLevel
) -> AsyncIterator[Transport]:
    """The service on each transport in turn; it ends well after every client."""
    settings = GrpcSettings(
        address="127.0.0.1", port=0, transport=request.param, compression=compression_level
    )
    served = dict(methods(SERVICE, servicer, compressing=SERVICE.methods_by_name))
    found = TRANSPORTS[request.param](served, settings)
    await found.start()
    yield found
    async with asyncio.timeout(10):
        await asyncio.gather(found.stop(), found.cut_off(1.0))


@pytest.fixture
def target(transport: Transport) -> str:
    """The address of the service."""
    return f"127.0.0.1:{transport.port}"


@pytest.fixture(params=KINDS)
async def client(request: pytest.FixtureRequest, target: str) -> AsyncIterator[Client]:
    """Each client in turn."""
    async with connect(request.param, target) as found:
        yield found
