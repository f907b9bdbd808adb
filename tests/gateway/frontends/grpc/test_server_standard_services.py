"""grpc.health.v1: checks and watches."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from grpc_health.v1 import health_pb2 as pb

from gateway.frontends.grpc.server import HealthServicer
from gateway.frontends.grpc.status import RpcError, StatusCode
from tests.builders import soon

SERVING, NOT_SERVING, UNKNOWN = 1, 2, 3


class Watcher:
    """Keeps the statuses that it is sent."""

    def __init__(self, health: HealthServicer, service: str = "v2") -> None:
        self.seen: asyncio.Queue[int] = asyncio.Queue()
        call: Any = self
        self.task = asyncio.create_task(health.Watch(pb.HealthCheckRequest(service=service), call))

    async def send(self, messages: Sequence[bytes]) -> None:
        for message in messages:
            self.seen.put_nowait(pb.HealthCheckResponse.FromString(message).status)


async def check(health: HealthServicer, service: str) -> int:
    call: Any = None
    return (await health.Check(pb.HealthCheckRequest(service=service), call)).status


@pytest.mark.parametrize("service", ["", "v2"])
async def test_the_server_and_its_services_are_as_ready_as_was_said(service: str) -> None:
    health = HealthServicer(("v2",))
    health.set(ready=False)
    assert await check(health, service) == NOT_SERVING
    health.set(ready=True)
    assert await check(health, service) == SERVING


async def test_a_service_that_is_not_served_is_not_found() -> None:
    with pytest.raises(RpcError, match="'other'") as caught:
        await check(HealthServicer(("v2",)), "other")
    assert caught.value.status is StatusCode.NOT_FOUND


async def test_a_watcher_receives_the_status_initially_and_after_each_change() -> None:
    health = HealthServicer(("v2",))
    watcher = Watcher(health)
    assert await soon(watcher.seen.get()) == SERVING
    health.set(ready=True)
    health.set(ready=False)
    assert await soon(watcher.seen.get()) == NOT_SERVING
    assert watcher.seen.empty()
    watcher.task.cancel()


async def test_a_disconnect_of_one_watcher_does_not_affect_others() -> None:
    health = HealthServicer(("v2",))
    leaving, staying = Watcher(health), Watcher(health)
    assert await soon(leaving.seen.get()) == await soon(staying.seen.get()) == SERVING
    leaving.task.cancel()
    await asyncio.wait([leaving.task])
    health.set(ready=False)
    assert await soon(staying.seen.get()) == NOT_SERVING
    staying.task.cancel()


async def test_watching_an_unknown_service_reports_it() -> None:
    watcher = Watcher(HealthServicer(("v2",)), "other")
    assert await soon(watcher.seen.get()) == UNKNOWN
    watcher.task.cancel()


async def test_shutdown_ends_all_watches() -> None:
    health = HealthServicer(("v2",))
    watcher = Watcher(health)
    assert await soon(watcher.seen.get()) == SERVING
    health.close()
    health.set(ready=True)
    assert await soon(watcher.seen.get()) == NOT_SERVING
    with pytest.raises(RpcError) as caught:
        await soon(watcher.task)
    assert caught.value.status is StatusCode.UNAVAILABLE
