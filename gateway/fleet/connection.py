"""A router's connection to one replica: connect, handshake, pings, offers and calls."""

import asyncio
import logging
import math
from collections import defaultdict, deque
from collections.abc import Callable, Mapping

import msgspec

from gateway.conversations.copies import ConversationCopy
from gateway.errors import Code, InferenceError
from gateway.fleet.bulk import BulkConnection
from gateway.fleet.call import ReplicaCall
from gateway.fleet.choice import Demand, KnownReplica, Load, ReplicaState, wait
from gateway.fleet.copies import CopyChannel
from gateway.fleet.handshake import FleetKind, HandshakeError, Hello, Identity
from gateway.fleet.metrics import ReplicaCounts
from gateway.fleet.offers import (
    Key,
    ModelOffer,
    OfferDigests,
    Offers,
    first_load,
    read_load,
    read_offers,
    read_prefixes,
)
from gateway.fleet.pauses import Pauses
from gateway.fleet.prefixes import KeyChanges
from gateway.fleet.prompts import PrefixIndexes
from gateway.fleet.quarantine import SharedSuspects
from gateway.fleet.reaching import FleetAddress, silence_after_ping
from gateway.fleet.routers import Place, read_table
from gateway.messages import InferRequest
from gateway.processes.channel import Channel, Frame, call_numbers
from gateway.processes.request_terms import Routing
from gateway.settings import TlsSettings, netloc

log = logging.getLogger("sluice.fleet")

FIRST_PAUSE_SECS, LONGEST_PAUSE_SECS = 0.1, 2.0
"""Pause before the next connection; doubled after each that fails, or is lost within that time."""
PING_SECS = 1.0
SILENT_SECS = 3.0
"""A replica that sends nothing for this time gets no new requests."""
GONE_SECS = 10.0
"""A replica that sends nothing for this time is disconnected."""
MOST_DEAD = 64
"""The last instances whose deaths are known, so that each counts as one failure."""


class ReplicaConnection:
    """The connection to the replica at an address, made again whenever it is lost.

    `state` and `models` are the last offers of the replica, None and empty without a connection.
    `on_change` is called after each change of them. `loads` has what the choice needs of each
    model, `digests` those of their descriptions; `attempted` is set after the first attempt. The
    prefixes of the replica are in `indexes` while it is connected. `on_copy` gets the copies of its
    conversations, `on_routers` its table of routers. `suspects` are those of the router.
    """

    def __init__(
        self,
        host: str,
        port: int,
        identity: Identity,
        on_change: Callable[[], None],
        indexes: PrefixIndexes,
        tls: TlsSettings | None = None,
    ) -> None:
        self.address = netloc(host, port)
        self.id = ""
        self.state: ReplicaState | None = None
        self.models: dict[Key, ModelOffer] = {}
        self.trouble = "it has not been reached yet"
        self.loads: dict[Key, KnownReplica] = {}
        self.attempted = asyncio.Event()
        self.counts = ReplicaCounts()
        self.on_copy: Callable[[ConversationCopy], None] = _unused
        self.suspects = SharedSuspects(relays=False)
        self.on_routers: Callable[[Mapping[str, Place]], None] = _unused
        self._address = FleetAddress(host, port, identity, tls)
        self._identity = identity
        self._distance_secs = 0.0
        self._on_change = on_change
        self._indexes = indexes
        self._numbers = call_numbers()
        self._channel: Channel | None = None
        self._bulk: BulkConnection | None = None
        self._copies: CopyChannel | None = None
        self._link = ""
        self._fault = ""
        self._known: dict[Key, KnownReplica] = {}
        self._pauses: defaultdict[Key, Pauses] = defaultdict(Pauses)
        self._dead_instances: deque[int] = deque(maxlen=MOST_DEAD)
        self.digests: dict[Key, OfferDigests] = {}

    async def run(self) -> None:
        """Connect, and connect again, until cancelled; one line is logged for equal failures."""
        pause, logged, time = FIRST_PAUSE_SECS, "", asyncio.get_running_loop().time
        while True:
            connected_at = math.inf
            try:
                await self._connect()
                connected_at = time()
                event, self.trouble = "replica lost", await self._follow()
                self._count_loss()
                self.counts.lost()
            except asyncio.CancelledError:
                self._on_change = _nothing  # the router ends
                raise
            except (HandshakeError, OSError, TimeoutError, UnicodeError) as error:
                event, self.trouble = "replica not reached", _reason(error)
            finally:
                self._lose()
                self.attempted.set()
            if time() - connected_at > LONGEST_PAUSE_SECS:
                pause, logged = FIRST_PAUSE_SECS, ""
            if self.trouble != logged:
                log.warning(event, extra=self._about())
            logged = self.trouble
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECS)

    @property
    def silent_secs(self) -> float | None:
        """The time since it has sent anything; None without a connection."""
        channel = self._channel
        if channel is None or channel.is_lost:
            return None
        return asyncio.get_running_loop().time() - channel.heard_at

    def serves(self, key: Key) -> bool:
        """Whether the replica accepts new requests of a model."""
        return self.state is ReplicaState.READY and self.continues(key)

    def continues(self, key: Key) -> bool:
        """Whether it takes requests of sequences that are open there; a draining one does."""
        offer, channel, bulk = self.models.get(key), self._channel, self._bulk
        if offer is None or offer.trouble or channel is None or channel.is_lost or bulk is None:
            return False
        silent_secs = asyncio.get_running_loop().time() - channel.heard_at
        return bulk.is_open and silent_secs <= SILENT_SECS

    @property
    def has_both(self) -> bool:
        """Whether the connection of large tensors has been made, too."""
        return self._bulk is not None and self._bulk.is_open

    def may_have(self, key: Key, interface: bytes) -> bool:
        """Whether its offer of a model has that interface, or does not exist yet."""
        digests = self.digests.get(key)
        return digests is None or digests.interface == interface

    def call(
        self,
        key: Key,
        request: InferRequest,
        on_news: Callable[[], None],
        demand: Demand,
        routing: Routing | None = None,
    ) -> ReplicaCall:
        """Send a request to a model; raises InferenceError if it cannot be encoded."""
        bulk, known = self._bulk, self.loads.get(key)
        if bulk is None or known is None:
            raise InferenceError(Code.UNAVAILABLE, f"replica {self.id} is disconnected")
        if key in self._pauses:
            self._pauses[key].send(asyncio.get_running_loop().time())
            self._leave_out(key)
        number = next(self._numbers)
        call = ReplicaCall(bulk, number, request, known, on_news, routing)
        call.expected_secs = wait(known, demand)
        call.expected_tokens = demand.held.get(self.id, 0)
        known.send(number, known.work(demand))
        return call

    def send_copy(self, copy: ConversationCopy) -> None:
        """Have the replica keep a copy of a conversation; dropped without a connection."""
        if self._copies is not None and not self._copies.send(copy):
            self.counts.copies_dropped += 1

    def fail(self, key: Key) -> None:
        """Count a failure of a model; after three in ten seconds it is left out for a while."""
        self._pauses[key].fail(asyncio.get_running_loop().time())
        self._leave_out(key)

    def lose_instance(self, key: Key, number: int) -> None:
        """Count the death of an instance as one failure of its model, by the number it had."""
        if number not in self._dead_instances:
            self._dead_instances.append(number)
            self.fail(key)

    def answered(self, key: Key) -> None:
        """Count an answer of a model, which ends the pauses after failures."""
        if key in self._pauses:
            self._pauses[key].answer()
            self._leave_out(key)

    def refuse(self, key: Key) -> None:
        """Note that a model had no room for a request: others are preferred for a second."""
        known = self._known.get(key)
        if known is not None:
            known.refuse(asyncio.get_running_loop().time())

    def _count_loss(self) -> None:
        """Count the loss of the replica as one failure of each model, unless it has drained."""
        if self.state is not ReplicaState.DRAINING:
            for key in self._known:
                self.fail(key)

    def _leave_out(self, key: Key) -> None:
        known, pauses = self._known.get(key), self._pauses.get(key)
        if known is not None and pauses is not None:
            known.left_out_until = pauses.left_out_until

    async def _connect(self) -> None:
        """Connect, and agree with the replica. Raises HandshakeError, OSError, TimeoutError."""
        self._fault = ""
        place = await self._address.reach(self._begin, self._on_frame)
        bulk = self._bulk
        if bulk is None:
            raise HandshakeError(self._fault)
        await self._address.at(*place).reach(
            lambda channel, _: channel.hand_over(bulk), bulk.hear, self._link
        )
        log.info("replica connected", extra={"address": self.address, "id": self.id})

    def _begin(self, channel: Channel, peer: Hello) -> None:
        if peer.id in self._indexes.replicas:
            self._fault = f"replica {peer.id} is connected at another address"
            channel.abort()
            return
        self._indexes.replicas.add(peer.id)
        self._channel, self._bulk = channel, BulkConnection(channel)
        self._copies = CopyChannel(self._bulk, self.on_copy, _nothing)
        self.id, self._link = peer.id, peer.nonce
        self._distance_secs = self._identity.location.secs_to(peer.location)
        self._dead_instances.clear()
        self.suspects.join(channel)

    async def _follow(self) -> str:
        """Ping until the replica is lost or silent for too long; returns the reason."""
        channel = self._channel
        assert channel is not None  # noqa: S101 - it is connected
        while not channel.is_lost:
            self.counts.pinged(asyncio.get_running_loop().time())
            if await silence_after_ping(channel, PING_SECS) > GONE_SECS:
                return f"it has sent nothing for {GONE_SECS:g} s"
        return self._fault or "it has disconnected"

    def _lose(self) -> None:
        """Disconnect: open calls end, and no more begin."""
        channel, self._channel = self._channel, None
        bulk, self._bulk = self._bulk, None
        self._copies = None
        if channel is None or bulk is None:
            return
        self._indexes.replicas.discard(self.id)
        self.state = None
        self.models, self.loads, self.digests, self._known = {}, {}, {}, {}
        for index in self._indexes.values():
            index.remove(self.id)
        self.suspects.leave(channel)
        bulk.abort()
        channel.abort()
        self._on_change()

    def _on_frame(self, frame: Frame) -> None:
        try:
            self._hear(frame)
        except (msgspec.DecodeError, ValueError) as error:
            self._fault = f"its announcements cannot be used: {error}"
            if self._channel is not None:
                self._channel.abort()

    def _hear(self, frame: Frame) -> None:
        """Handle a frame after the handshake; DecodeError, ValueError if it cannot be used."""
        if frame.kind == FleetKind.OFFERS:
            self._take_offers(read_offers(frame.payload))
        elif frame.kind == FleetKind.LOAD:
            self._take_load(*read_load(frame.payload))
        elif frame.kind == FleetKind.PREFIXES:
            self._take_prefixes(*read_prefixes(frame.payload))
        elif frame.kind == FleetKind.PONG:
            self.counts.ponged(asyncio.get_running_loop().time())
        elif frame.kind == FleetKind.SUSPECTS and self._channel is not None:
            self.suspects.hear(self._channel, frame.payload)
        elif frame.kind == FleetKind.ROUTERS:
            self.on_routers(read_table(frame.payload, self._address.host))
        elif self._bulk is not None:
            self._bulk.hear(frame)
            if frame.kind == FleetKind.BULK:
                self._changed()

    def _take_offers(self, offers: Offers) -> None:
        self.state = offers.state
        self.models = {each.key: each for each in offers.models}
        self.loads = {key: self._load_of(each) for key, each in self.models.items()}
        self.digests = {key: each.digests for key, each in self.models.items()}
        self._changed()

    def _changed(self) -> None:
        """Note that it may take requests now, or no longer."""
        if self.has_both and self.state not in (None, ReplicaState.STARTING):
            self.attempted.set()
        self._on_change()

    def _load_of(self, offer: ModelOffer) -> KnownReplica:
        """The load of an offered model; it outlasts offers without the model, as the calls do."""
        known = self._known.get(offer.key)
        if known is None:
            known = KnownReplica(self.id, first_load(offer), distance_secs=self._distance_secs)
            self._known[offer.key] = known
            self._leave_out(offer.key)
        known.resize(offer.concurrency)
        return known

    def _take_load(self, key: Key, load: Load) -> None:
        known = self._known.get(key)
        if known is not None:
            known.announce(load)

    def _take_prefixes(self, key: Key, changes: KeyChanges) -> None:
        if key in self._known:
            self._indexes[key].announce(self.id, changes)

    def _about(self) -> dict[str, str]:
        return {"address": self.address, "reason": self.trouble}


def _nothing() -> None:
    """A change that no router needs to know."""


def _unused(announced: object) -> None:
    """A copy of a conversation, or a table, that is not used."""


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "it does not answer"
    return (isinstance(error, OSError) and error.strerror) or str(error)
