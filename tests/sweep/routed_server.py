"""A router in the loop of the sweep, with the replica that hosts its models."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from gateway.fleet.announcer import LOAD_SECS
from gateway.fleet.replica import FleetPort
from gateway.in_process.server_loop import ServerLoop
from gateway.models import model as loaded
from gateway.settings import ControlMode, FleetSettings, Settings
from tests.sweep.server import STOP_SECS, Server
from tests.sweep.steps import soon, until


class RoutedServer(Server):
    """Requests are sent to the router. The replica ends after it."""

    def _begin(self, settings: Settings, repository: Path) -> None:
        nothing = repository.parent / "nothing"
        nothing.mkdir(exist_ok=True)
        own = replace(
            settings.models,
            repositories=(nothing,),
            startup=(),
            control_mode=ControlMode.NONE,
        )
        self._routing = replace(settings, models=own)
        without_ports = {
            name: replace(getattr(settings, name), enabled=False)
            for name in ("http", "grpc", "metrics")
        }
        hosting = replace(settings, fleet=FleetSettings(port=0), **without_ports)
        self._repository = repository
        self._lost: tuple[object, ...] = ()
        self._replica = ServerLoop(hosting)
        self._hosting = asyncio.create_task(self._replica.run())

    async def started(self) -> Server:
        """Wait until both are ready."""
        started = asyncio.wrap_future(self._replica.started)
        ports = await soon(started, "the replica starts", 60)
        fleet = FleetSettings(replicas=(("127.0.0.1", ports["fleet"]),))
        super()._begin(replace(self._routing, fleet=fleet), self._repository)
        return await super().started()

    def lose_connection(self) -> None:
        """End the connection between the two."""
        self._lost = tuple(self._port.links)
        for link in self._lost:
            link.channel.abort()

    @property
    def reconnected(self) -> bool:
        """Whether the router, which may notice the loss later, has another connection."""
        links = tuple(self._port.links)
        return bool(links) and not any(each in self._lost for each in links) and self.ready

    @property
    def _port(self) -> FleetPort:
        port = self._replica.server.dataplane.fleet
        assert isinstance(port, FleetPort)
        return port

    async def recovered(self) -> None:
        """The router has also heard of what the replica announces late, up to LOAD_SECS."""
        await super().recovered()
        time = asyncio.get_running_loop().time
        heard_at = time() + 2 * LOAD_SECS
        await until(
            lambda: time() > heard_at and self.ready, lambda: "the router knows the new instances"
        )

    async def ended(self) -> None:
        try:
            await super().ended()
        finally:
            self._replica.server.stop()
            await soon(asyncio.wait([self._hosting]), "the replica ends", STOP_SECS)
        self._hosting.result()

    async def give_up(self) -> None:
        await super().give_up()
        self._replica.server.stop()
        await asyncio.wait([self._hosting], timeout=STOP_SECS)
        self._hosting.cancel()

    @property
    def ready(self) -> bool:
        """Whether the replica serves all models, and the router knows it."""
        (replica,) = self._fleet_of(self._server_loop)["replicas"]
        models = replica["models"]
        known = {each["name"] for each in models if not each["trouble"]}
        wanted = {*self.subject.needs, self.subject.name}
        return super().ready and replica["state"] == "READY" and known >= wanted

    def _models(self) -> Iterator[loaded.Model]:
        return chain(super()._models(), self._replica.server.dataplane.models())

    def _left(self) -> Iterator[str]:
        yield from super()._left()
        if number := self._replica.server.dataplane.in_flight:
            yield f"in flight at the replica: {number}"
        for each in self._fleet_of(self._replica)["routers"]:
            if each["in_flight"]:
                yield f"answers of the replica: {each}"
        for replica in self._fleet_of(self._server_loop)["replicas"]:
            for model in replica["models"]:
                if model["in_flight"] or model["queued"]:
                    yield f"calls of the router: {model}"

    def _fleet_of(self, server_loop: ServerLoop) -> dict[str, Any]:
        fleet = server_loop.server.dataplane.fleet
        return {"replicas": [], "routers": []} if fleet is None else fleet.describe()
