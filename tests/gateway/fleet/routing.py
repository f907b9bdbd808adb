"""A router in a test, and its requests at replicas that the test drives by hand."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import NamedTuple, Protocol

from gateway.backend_loader import BackendLoader
from gateway.cache.cache import ResponseCache
from gateway.config import ModelConfig
from gateway.dataplane import DataPlane
from gateway.fleet.directory import Resolver
from gateway.fleet.router import Router
from gateway.messages import InferResponse
from gateway.models.repository import ModelRepository
from gateway.models.repository_control import RepositoryControl
from gateway.settings import FleetSettings, ModelSettings
from tests.builders import soon, text_request
from tests.conftest import tasks_left
from tests.gateway.fleet.fake_replica import FakeReplica, until
from tests.registries import no_infer


class Listening(Protocol):
    """A replica on a port of this machine."""

    @property
    def port(self) -> int: ...


class Routed(NamedTuple):
    """A router and its data plane."""

    router: Router
    dataplane: DataPlane

    @property
    def config(self) -> ModelConfig:
        """The configuration of `text`."""
        return self.dataplane.model("text").config


@asynccontextmanager
async def routing(
    repository: Path,
    *replicas: FakeReplica | Listening,
    resolver: Resolver | None = None,
    cache: ResponseCache | None = None,
) -> AsyncIterator[Routed]:
    """A router of these replicas, or of those of a resolver, for the length of the block."""
    models = ModelSettings(repositories=(repository,))
    control = RepositoryControl(ModelRepository((repository,)), models, BackendLoader(), cache)
    if resolver is None:
        places = tuple(("127.0.0.1", each.port) for each in replicas)
        router = Router(FleetSettings(replicas=places), control, summaries=False)
    else:
        settings = FleetSettings(dns=("replicas", 8003))
        router = Router(settings, control, summaries=False, resolver=resolver)
    tasks = [asyncio.create_task(control.run(no_infer)), asyncio.create_task(router.run())]
    try:
        await soon(router.attempted())
        yield Routed(router, DataPlane(control))
    finally:
        for task in reversed(tasks):
            task.cancel()
            with suppress(asyncio.CancelledError):
                await soon(task)
    if all(isinstance(each, FakeReplica) for each in replicas):  # real ports have tasks
        assert tasks_left() == []


async def calls(*replicas: FakeReplica) -> list[FakeReplica]:
    """Wait for a request; the replicas that have one."""
    await until(lambda: any(each.calls for each in replicas))
    return [each for each in replicas if each.calls]


NO_SUMS = dict.fromkeys(("requests", "retries", "continued", "moves", "quarantined"), 0)


def sums(routed: Routed) -> dict[str, float]:
    """The counts of requests on the page of a router, each over all replicas or models."""
    found = dict[str, float](NO_SUMS)
    for family in routed.router.families():
        name = family.name.removeprefix("gateway_fleet_").removesuffix("_total")
        if name in found:
            found[name] = sum(each.value for each in family.samples)
    return found


def text(response: InferResponse) -> bytes:
    """The text of a response."""
    return bytes(response.outputs[0].elements()[0])


async def answered(routed: Routed, *replicas: FakeReplica) -> FakeReplica:
    """The replica that gets a request; it answers."""
    with routed.dataplane.infer(text_request()) as stream:
        (found,) = await calls(*replicas)
        found.answer(found.calls.pop(), "hello")
        assert text(await soon(stream.only())) == b"hello"
    return found
