"""A router and its replica as whole servers in the event loop of a test, without processes."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from gateway.dataplane import DataPlane
from gateway.frontends.http.app import build_app
from gateway.metrics_page import MetricsPage
from gateway.server import Server
from gateway.settings import (
    FleetSettings,
    GrpcSettings,
    HttpSettings,
    MetricsSettings,
    ModelSettings,
    Settings,
)
from tests.builders import soon

PAGE = MetricsSettings(enabled=False, cpu=False, gpu=False)
SETTINGS = Settings(
    exit_timeout_secs=2.0,
    http=HttpSettings(enabled=False),
    grpc=GrpcSettings(enabled=False),
    metrics=PAGE,
)


@asynccontextmanager
async def running(settings: Settings) -> AsyncIterator[tuple[Server, Mapping[str, int]]]:
    """A ready server, with its ports, for the length of the block."""
    ready: asyncio.Future[Mapping[str, int]] = asyncio.get_running_loop().create_future()
    server = Server(settings)
    task = asyncio.create_task(server.run(ready.set_result))
    try:
        await soon(asyncio.wait((task, ready), return_when=asyncio.FIRST_COMPLETED))
        yield server, ready.result()
    finally:
        server.stop()
        await soon(task)


@asynccontextmanager
async def pair(
    models: Path,
    nothing: Path,
    of_router: Mapping[str, Any] | None = None,
    of_replica: Mapping[str, Any] | None = None,
) -> AsyncIterator[tuple[DataPlane, DataPlane]]:
    """A router with the repository `nothing`, and its replica of `models`."""
    hosting = replace(
        SETTINGS,
        models=ModelSettings(repositories=(models,)),
        fleet=FleetSettings(port=0),
        **(of_replica or {}),
    )
    async with running(hosting) as (replica, ports):
        routing = replace(
            SETTINGS,
            models=ModelSettings(repositories=(nothing,)),
            fleet=FleetSettings(replicas=(("127.0.0.1", ports["fleet"]),)),
            **(of_router or {}),
        )
        async with running(routing) as (router, _):
            yield router.dataplane, replica.dataplane


async def get(dataplane: DataPlane, path: str) -> httpx.Response:
    """The response to a GET by HTTP."""
    app = build_app(dataplane, SETTINGS.http, "triton")
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        return await soon(client.get(path))


async def metrics(dataplane: DataPlane) -> dict[str, float]:
    """The values of the metrics page, by name and labels."""
    page = (await MetricsPage(dataplane, PAGE).render()).decode()
    rows = (line.rpartition(" ") for line in page.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in rows}
