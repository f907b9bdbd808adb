"""A router: its connections to replicas, and the models that it has from them."""

import asyncio
import logging
import sys
import time
from pathlib import Path

from gateway.config.pbtxt import parse
from gateway.errors import Code, InferenceError
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


MOST_REFUSED = 10_000
"""Offers that are refused without a further line."""


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
        self._placed: dict[Key, bytes] = {}
        self._unusable: set[tuple[Key, bytes]] = set()
        self._logged: set[tuple[str, Key, bytes]] = set()
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
                if self._is_new(replica, key):
                    self._serve_or_refuse(replica, key, offer)
        # A version that no replica offers any more leaves its requests to the others.
        offered = {key for each in self.connections for key in each.models}
        names = {name for name, _ in offered}
        for key in [each for each in self._placed if each not in offered and each[0] in names]:
            del self._placed[key]
            self._control.displace(*key)
        self._control.registry.notify()

    def _is_new(self, replica: ReplicaConnection, key: Key) -> bool:
        placed, digest = self._placed.get(key), replica.digests[key]
        if placed == digest or (key, digest) in self._unusable:
            return False
        if placed is None:
            return not self._control.is_own(key[0])
        if any(each.digests.get(key) == placed for each in self.connections):
            self._refuse(replica, key, "its configuration is not that of the other replicas")
            return False
        return True

    def _refuse(self, replica: ReplicaConnection, key: Key, reason: str) -> None:
        """Log an offer that is not used, once for each replica and description."""
        offered = replica.id, key, replica.digests[key]
        if offered in self._logged:
            return
        if len(self._logged) < MOST_REFUSED:
            self._logged.add(offered)
        about = {"model": key[0], "version": key[1], "address": replica.address, "reason": reason}
        log.error("offer refused", extra=about)

    def _serve_or_refuse(self, replica: ReplicaConnection, key: Key, offer: ModelOffer) -> None:
        try:
            self._serve(key, offer, replica.digests[key])
            return
        except InferenceError as error:
            reason = error.message
        except Exception:
            # Around one offer: the models of others stay in service.
            log.exception("offer not used", extra={"model": key[0], "address": replica.address})
            reason = "it cannot be used"
        self._unusable.add((key, replica.digests[key]))
        self._refuse(replica, key, reason)

    def _serve(self, key: Key, offer: ModelOffer, digest: bytes) -> None:
        name, version = key
        config = parse(offer.config, f"{name}/config.pbtxt of a replica")
        if config.name != name:
            text = f"its configuration has the name '{config.name}', expected '{name}'"
            raise InferenceError(Code.INVALID_ARG, text)
        statistics = ModelStatistics.of(config, summaries=self._summaries)

        def instance() -> FleetInstance:
            return FleetInstance(config, offer, self._with(key, digest))

        async def load() -> FleetInstance:
            return instance()

        slot = InstanceSlot(load, instance=instance())
        model = FleetModel(config, version, statistics, [slot], offer.labels)
        model.further_names = tuple(dict.fromkeys((*model.further_names, *offer.adapters)))
        model.max_model_len = offer.max_model_len or None
        model.loaded_at = time.time()
        # Each replica has the limit of the configuration, and announces its room.
        model.most_in_flight = sys.maxsize
        self._control.place(model)
        self._placed[key] = digest
        log.info("model placed", extra={"model": name, "version": version})

    def _with(self, key: Key, digest: bytes) -> Connections:
        """The connections, without replicas that describe the model in another way."""

        def connections() -> list[ReplicaConnection]:
            return [each for each in self.connections if each.digests.get(key, digest) == digest]

        return connections
