"""A router: its connections to replicas, and the models that it has from them."""

import asyncio
import logging
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from gateway.backend import MetricReading
from gateway.config.pbtxt import parse
from gateway.conversations.copies import ConversationCopy
from gateway.errors import Code, InferenceError
from gateway.fleet.connection import ReplicaConnection
from gateway.fleet.directory import Address, Listing, Resolver, listings, resolved
from gateway.fleet.handshake import FleetRole, Identity
from gateway.fleet.instance import FleetInstance
from gateway.fleet.metrics import ModelCounts
from gateway.fleet.offers import Key, ModelOffer, OfferDigests
from gateway.fleet.prefixes import KeyIndex
from gateway.fleet.prompts import ModelPrompts, PrefixIndexes, keys_of_fleet
from gateway.fleet.quarantine import ModelSuspects, SharedSuspects
from gateway.fleet.ray_news import ModelNews, OffersByModel, RouterNews, router_news
from gateway.fleet.relays import Relays
from gateway.fleet.router_rollouts import RouterRollouts
from gateway.fleet.status import router_families, router_status
from gateway.fleet.versions import FleetModel
from gateway.models.instance_groups import InstanceSlot
from gateway.models.registry import KnownModel
from gateway.models.repository_control import RepositoryControl
from gateway.observability.statistics import ModelStatistics
from gateway.settings import FleetSettings

log = logging.getLogger("sluice.fleet")


MOST_REFUSED = 10_000
"""Offers that are refused without a further line, and those whose reason is kept."""
FIRST_ANSWER_SECS = 5.0
"""A router whose directory does not answer for this time serves without replicas."""
MOST_ABSENT = 2
"""Answers in a row without an address after which its lost connection ends."""
OTHER_CONFIG = "its configuration is not that of the other replicas"
OWN_MODEL = "the repository of this router has a model of that name"


@dataclass(slots=True)
class _Kept:
    """A connection, its task, and the answers in a row that did not have its address."""

    connection: ReplicaConnection
    task: asyncio.Task[None]
    absent: int = 0


@dataclass(slots=True)
class _Placed:
    """A served version, with the digests of the offer that it is from.

    `loads` are its loads at replicas, by the id of the replica and the time, and `kinds` the
    digests of the offers there.
    """

    digests: OfferDigests
    model: FleetModel
    instance: FleetInstance
    loads: Set[tuple[str, float]] = frozenset()
    kinds: Set[bytes] = frozenset()


class Router:
    """The models of a fleet in a server: each is served while the server runs.

    A model of the server's own repository is preferred to one of a replica. Replicas of one version
    are used together if requests cannot tell their configurations apart. Else those of the one that
    most ready replicas have are used; on Ray a model that was changed is used once a replica of it
    is ready. A replica that is connected is kept, also after the directory has dropped it.
    """

    def __init__(
        self,
        settings: FleetSettings,
        control: RepositoryControl,
        *,
        summaries: bool,
        resolver: Resolver = resolved,
    ) -> None:
        self._control = control
        self._summaries = summaries
        self._placed: dict[Key, _Placed] = {}
        self.rollouts = RouterRollouts()
        self._unusable: dict[tuple[Key, bytes], str] = {}
        self._logged: set[tuple[str, Key, bytes]] = set()
        self.identity = Identity(
            settings.name, FleetRole.ROUTER, settings.secret, zone=settings.zone
        )
        self._tls = settings.tls
        self.relays = Relays(self.identity, settings.tls, control.registry.find)
        self._keys = keys_of_fleet(settings.name, settings.secret)
        self._indexes = PrefixIndexes(KeyIndex)
        self._suspects = SharedSuspects(relays=False)
        self._listings = listings(settings, resolver, self)
        self._coming: Mapping[str, ModelNews] | None = None
        self._known_offers: dict[str, tuple[ModelOffer, ...]] = {}
        self._answered = asyncio.Event()
        self._answers_again = not settings.replicas
        self._answered_at = time.monotonic()
        self._kept: dict[Address, _Kept] = {}
        self._hosts: dict[tuple[Key, bytes], list[ReplicaConnection]] = {}
        self._outdated: frozenset[Address] = frozenset()

    @property
    def connections(self) -> list[ReplicaConnection]:
        """The connections to replicas, also those that are lost."""
        return [each.connection for each in self._kept.values()]

    async def run(self) -> None:
        """Keep the connections, from the time when the server's own models are loaded."""
        await self._control.registry.wait_settled()
        async with asyncio.TaskGroup() as tasks:
            self.relays.tasks = tasks
            async for listing in self._listings:
                self._follow(listing, tasks)
                self._answered.set()
                self._answered_at = time.monotonic()

    async def attempted(self) -> None:
        """Wait until each replica has been reached and is ready, or could not be reached."""
        await self._control.registry.wait_settled()
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_ANSWER_SECS):
                await self._answered.wait()
        for each in self.connections:
            await each.attempted.wait()

    def _follow(self, listing: Listing, tasks: asyncio.TaskGroup) -> None:
        """Connect to new addresses; end lost connections to those that the directory dropped."""
        addresses = listing.addresses
        self._hosts.clear()
        for address in addresses:
            if address not in self._kept:
                found = ReplicaConnection(
                    *address, self.identity, self._place, self._indexes, self._tls
                )
                found.on_copy = partial(self._forward, found)
                found.suspects = self._suspects
                found.on_routers = partial(self.relays.table.take, address)
                self._kept[address] = _Kept(found, tasks.create_task(found.run()))
        for address, kept in list(self._kept.items()):
            kept.absent = 0 if address in addresses else kept.absent + 1
            if kept.absent >= MOST_ABSENT and kept.connection.state is None:
                del self._kept[address]
                kept.task.cancel()
                self.relays.table.take(address, {})
                about = {"address": kept.connection.address}
                log.info("replica dropped by the directory", extra=about)
        # A silent replica of an earlier description has no address in the table.
        absent = {each for each in self._outdated if each in self._kept and each not in addresses}
        if listing.outdated | absent != self._outdated:
            self._outdated = listing.outdated | absent
            self._place()

    def take_news(self, models: Mapping[str, ModelNews], offers: OffersByModel) -> None:
        """See `Correspondent`."""
        is_changed = self.rollouts.take(models) or self._coming is None or bool(offers)
        self._coming = models
        self._known_offers.update(offers)
        if is_changed:
            self._place()

    def news(self) -> RouterNews:
        """See `Correspondent`."""
        needs: defaultdict[str, float] = defaultdict(float)
        for (name, _), placed in self._placed.items():
            needs[name] += placed.instance.room.need
        offers = (
            offer
            for address, kept in self._kept.items()
            if address not in self._outdated
            for key, offer in kept.connection.models.items()
            if not offer.trouble and not self._refusal(kept.connection, key)
        )
        lacking = {name: need for name, need in needs.items() if need}
        found = router_news(lacking, self._coming or {}, offers)
        counts, changes = self.rollouts.evidence(), self.rollouts.changes
        return msgspec.structs.replace(found, evidence=counts, changes=changes)

    def _may_come(self, name: str) -> str | None:
        """See `Coming`; a directory that knows addresses only leaves it to the model's rules."""
        if self._coming is None:
            return ""
        model = self._coming.get(name)
        return None if model is None else model.refusal

    def _forward(self, source: ReplicaConnection, copy: ConversationCopy) -> None:
        """Send the copy of a conversation at a replica to another one."""
        placed = self._placed.get((copy.model, copy.version))
        target = None if placed is None else placed.instance.placement.keeper(copy, source)
        if target is not None:
            target.send_copy(copy)

    def describe(self) -> dict[str, Any]:
        """See `FleetMember`."""
        found = router_status(self.identity, self.connections, self._instances(), self._refusal)
        return {**found, "rollouts": self.rollouts.describe(), "routers": self.relays.describe()}

    def families(self) -> list[MetricReading]:
        """See `FleetMember`."""
        age_secs = time.monotonic() - self._answered_at if self._answers_again else None
        return router_families(self.connections, self._instances(), age_secs)

    def _instances(self) -> Mapping[Key, FleetInstance]:
        return {key: each.instance for key, each in self._placed.items()}

    def _refusal(self, replica: ReplicaConnection, key: Key) -> str:
        """The reason why an offer is not used; "" if it is."""
        placed, digests = self._placed.get(key), replica.digests[key]
        if placed is not None and placed.digests.interface == digests.interface:
            return ""
        unusable = self._unusable.get((key, digests.whole))
        return unusable or (OTHER_CONFIG if placed else OWN_MODEL)

    def _place(self) -> None:
        """Serve the models that replicas offer, and look for ready ones again."""
        self._hosts.clear()
        hosts: dict[Key, list[ReplicaConnection]] = {}
        for replica in self.connections:
            for key in replica.models:
                hosts.setdefault(key, []).append(replica)
        for key, found in hosts.items():
            if not self._control.is_own(key[0]):
                self._choose(key, found)
        # A version that no replica offers any more leaves its requests to the others.
        offered = hosts.keys() | self._serve_absent({name for name, _ in hosts})
        names = {name for name, _ in offered}
        for key in [each for each in self._placed if each not in offered and each[0] in names]:
            room = self._placed.pop(key).instance.room
            room.replace(f"version {key[1]} has been replaced")
            self._indexes.pop(key, None)
            self._control.displace(*key)
        named = {key[0] for key, found in hosts.items() if any(r.models[key].names for r in found)}
        self.rollouts.follow(named, self._control.registry, self._ready_offers)
        for key, placement in list(self._placed.items()):
            self._follow_loads(key, placement)
            placement.instance.room.look()
        self._control.registry.notify()

    def _ready_offers(self, known: KnownModel) -> list[Mapping[int, ModelOffer]]:
        """The usable versions of a model at each replica that takes requests for one of them."""
        keys = [(known.id.name, number) for number in known.versions]
        found = [
            {
                key[1]: each.models[key]
                for key in keys
                if each.serves(key) and not self._refusal(each, key)
            }
            for each in self.connections
        ]
        return [each for each in found if each]

    def _serve_absent(self, present: Set[str]) -> Set[Key]:
        """Serve the models without replicas that the controller knows; returns their versions."""
        found = set()
        for name in (self._coming or {}).keys() - present:
            for offer in self._known_offers.get(name, ()):
                found.add(offer.key)
                placed, whole = self._placed.get(offer.key), offer.digests.whole
                is_known = (offer.key, whole) in self._unusable or self._control.is_own(name)
                if not is_known and (placed is None or placed.digests != offer.digests):
                    self._serve_or_refuse(None, offer)
        return found

    def _choose(self, key: Key, hosts: Sequence[ReplicaConnection]) -> None:
        """Serve the description of a version that is preferred, of those that can be used."""
        placed = self._placed.get(key)
        if placed is not None and {each.digests[key] for each in hosts} == {placed.digests}:
            return
        usable = [each for each in hosts if (key, each.digests[key].whole) not in self._unusable]
        if not usable:
            return
        interface = self._preferred(key, usable, placed)
        used = [each for each in usable if each.digests[key].interface == interface]
        if placed is None or placed.digests not in [each.digests[key] for each in used]:
            chosen = next((each for each in used if each.serves(key)), used[0])
            if not self._serve_or_refuse(chosen, chosen.models[key]):
                self._choose(key, hosts)
                return
        for each in usable:
            if each not in used:
                self._refuse(each, each.models[key], OTHER_CONFIG)

    def _preferred(
        self, key: Key, usable: Sequence[ReplicaConnection], placed: _Placed | None
    ) -> bytes:
        """The interface that most ready replicas have, the present one if others have as many.

        On Ray one that has a ready replica of the wanted description is preferred.
        """
        outdated = {self._kept[each].connection for each in self._outdated if each in self._kept}
        ready = [each for each in usable if each.serves(key)]
        counts = Counter(each.digests[key].interface for each in ready)
        wanted = {each.digests[key].interface for each in ready if each not in outdated}
        present = None if placed is None else placed.digests.interface
        return max(
            (each.digests[key].interface for each in usable),
            key=lambda found: (found in wanted, counts[found], found == present),
        )

    def _follow_loads(self, key: Key, placement: _Placed) -> None:
        """Forget cached responses at each new load: the files of the model may have changed.

        Likewise once no replica has one of several configurations.
        """
        hosts = self._with(key, placement.digests.interface)
        loads = {(each.id, each.models[key].loaded_at) for each in hosts if key in each.models}
        kinds = {each.digests[key].whole for each in hosts if key in each.models}
        if loads and not (loads <= placement.loads and kinds == placement.kinds):
            placement.loads, placement.kinds = loads, kinds
            self._control.cache_responses(placement.model, repr(sorted(loads)).encode())

    def _refuse(self, replica: ReplicaConnection | None, offer: ModelOffer, reason: str) -> None:
        """Log an offer that is not used, once for each replica and description."""
        key = offer.key
        offered = "" if replica is None else replica.id, key, offer.digests.whole
        if offered in self._logged:
            return
        if len(self._logged) < MOST_REFUSED:
            self._logged.add(offered)
        address = "" if replica is None else replica.address
        about = {"model": key[0], "version": key[1], "address": address, "reason": reason}
        log.error("offer refused", extra=about)

    def _serve_or_refuse(self, replica: ReplicaConnection | None, offer: ModelOffer) -> bool:
        """Whether an offer can be served: that of a replica, or None for the controller."""
        try:
            self._serve(offer.key, offer, offer.digests)
        except InferenceError as error:
            reason = error.message
        except Exception:
            # Around one offer: the models of others stay in service.
            log.exception("offer not used", extra={"model": offer.name})
            reason = "it cannot be used"
        else:
            return True
        if len(self._unusable) >= MOST_REFUSED:
            del self._unusable[next(iter(self._unusable))]
        self._unusable[offer.key, offer.digests.whole] = reason
        self._refuse(replica, offer, reason)
        return False

    def _serve(self, key: Key, offer: ModelOffer, digests: OfferDigests) -> None:
        name, version = key
        config = parse(offer.config, f"{name}/config.pbtxt of a replica")
        if config.name != name:
            text = f"its configuration has the name '{config.name}', expected '{name}'"
            raise InferenceError(Code.INVALID_ARG, text)
        statistics = ModelStatistics.of(config, summaries=self._summaries)
        before = self._placed.get(key)
        counts = ModelCounts() if before is None else before.instance.counts
        prompts = ModelPrompts(key, self._keys, self._indexes[key], offer.adapters)
        own = self.identity
        # All routers have the same interface, also where replicas have several configurations.
        interface = digests.interface
        suspects = ModelSuspects(self._suspects, key, interface, own.fleet, own.secret)
        connections = partial(self._with, key, interface)
        instance = FleetInstance(config, offer, connections, counts, prompts, suspects)
        instance.room.coming = self._may_come

        async def load() -> FleetInstance:
            return instance

        slot = InstanceSlot(load, instance=instance)
        model = FleetModel(config, version, statistics, [slot], offer.labels)
        model.instance = instance
        model.further_names = tuple(dict.fromkeys((*model.further_names, *offer.adapters)))
        model.max_model_len = offer.max_model_len or None
        model.loaded_at = time.time()
        # Each replica has the limit of the configuration, and announces its room.
        model.most_in_flight = sys.maxsize
        self._control.place(model)
        self._placed[key] = _Placed(digests, model, instance)
        if before is not None:
            instance.placement.sequences = before.instance.placement.sequences
            for waiting in instance.room.take_over(before.instance.room):
                waiting.join(instance)
        log.info("model placed", extra={"model": name, "version": version})

    def _with(self, key: Key, interface: bytes) -> list[ReplicaConnection]:
        """The connections, without replicas that describe the model in another way."""
        hosts = self._hosts.get((key, interface))
        if hosts is None:  # the first request after a change
            hosts = [each for each in self.connections if each.may_have(key, interface)]
            self._hosts[key, interface] = hosts
        return hosts
