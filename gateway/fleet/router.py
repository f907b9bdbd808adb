"""A router: its connections to replicas, and the models that it has from them."""

import asyncio
import logging
import time
from pathlib import Path

from gateway.config.pbtxt import parse
from gateway.errors import InferenceError
from gateway.fleet.connection import ReplicaConnection
from gateway.fleet.handshake import FleetRole, Identity
from gateway.fleet.instance import Connections, FleetInstance
from gateway.fleet.offers import Key, ModelOffer
from gateway.models.instances import InstanceSlot
from gateway.models.model import Model
from gateway.models.repository_control import RepositoryControl
from gateway.observability.statistics import ModelStatistics
from gateway.schedulers.scheduler import DirectScheduler, Scheduler
from gateway.settings import FleetSettings

log = logging.getLogger("sluice.fleet")


class FleetModel(Model):
    """A version that replicas host: their schedulers batch, and keep its sequences."""

    of_fleet = True

    def _scheduler(self, statistics: ModelStatistics, folder: Path) -> Scheduler:
        return DirectScheduler(statistics)


class Router:
    """The models of a fleet in a server: each is served while the server runs.

    A model of the server's own repository is preferred to one of a replica. Of replicas with
    different configurations of one version only those with the first one are used.
    """

    def __init__(
        self, settings: FleetSettings, control: RepositoryControl, *, summaries: bool
    ) -> None:
        self._control = control
        self._summaries = summaries
        self._placed: dict[Key, ModelOffer] = {}
        self._refused: set[tuple[str, Key]] = set()
        identity = Identity(settings.name, FleetRole.ROUTER, settings.secret)
        self.connections = [
            ReplicaConnection(*each, identity, self._place, settings.tls)
            for each in settings.replicas
        ]

    async def run(self) -> None:
        """Keep the connections, from the time when the server's own models are loaded."""
        await self._control.registry.wait_settled()
        async with asyncio.TaskGroup() as tasks:
            for each in self.connections:
                tasks.create_task(each.run())

    async def attempted(self) -> None:
        """Wait until each replica has been reached and is ready, or could not be reached."""
        for each in self.connections:
            await each.attempted.wait()

    def _place(self) -> None:
        """Serve the models that replicas offer, and look for ready ones again."""
        for replica in self.connections:
            for key, offer in replica.models.items():
                if self._is_new(replica, key, offer):
                    self._serve(key, offer)
        self._control.registry.notify()

    def _is_new(self, replica: ReplicaConnection, key: Key, offer: ModelOffer) -> bool:
        placed = self._placed.get(key)
        if placed is None:
            return not self._control.is_own(key[0])
        if placed.description == offer.description:
            return False
        others = [each for each in self.connections if each is not replica and key in each.models]
        if any(each.models[key].description == placed.description for each in others):
            self._refuse(replica, key)
            return False
        return True

    def _refuse(self, replica: ReplicaConnection, key: Key) -> None:
        """Log a replica whose configuration differs from that of the others."""
        if (replica.id, key) not in self._refused:
            self._refused.add((replica.id, key))
            about = {"model": key[0], "version": key[1], "address": replica.address}
            log.error("replica with another configuration refused", extra=about)

    def _serve(self, key: Key, offer: ModelOffer) -> None:
        name, version = key
        try:
            config = parse(offer.config, f"{name}/config.pbtxt of a replica")
        except InferenceError as error:
            log.error("offer refused", extra={"model": name, "reason": error.message})
            return
        statistics = ModelStatistics.of(config, summaries=self._summaries)

        def instance() -> FleetInstance:
            return FleetInstance(config, offer, self._with(key, offer))

        async def load() -> FleetInstance:
            return instance()

        slot = InstanceSlot(load, instance=instance())
        model = FleetModel(config, version, statistics, [slot], offer.labels)
        model.further_names = tuple(dict.fromkeys((*model.further_names, *offer.adapters)))
        model.max_model_len = offer.max_model_len or None
        model.loaded_at = time.time()
        self._control.place(model)
        self._placed[key] = offer
        log.info("model placed", extra={"model": name, "version": version})

    def _with(self, key: Key, offer: ModelOffer) -> Connections:
        """The connections, without replicas that describe the model in another way."""

        def connections() -> list[ReplicaConnection]:
            return [
                each
                for each in self.connections
                if each.models.get(key, offer).description == offer.description
            ]

        return connections
