"""A router's connection to one replica: connect, handshake, pings, offers and calls."""

import asyncio
import logging
import math
import ssl
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from time import monotonic

import msgspec

from gateway.errors import Code, InferenceError
from gateway.fleet.choice import ANY_REQUEST, Demand, KnownReplica, Load, ReplicaState, wait
from gateway.fleet.handshake import (
    HANDSHAKE_BYTES,
    HANDSHAKE_SECS,
    FleetKind,
    Handshake,
    HandshakeError,
    Identity,
)
from gateway.fleet.metrics import ReplicaCounts
from gateway.fleet.offers import (
    Key,
    ModelOffer,
    Offers,
    first_load,
    read_load,
    read_offers,
    read_prefixes,
)
from gateway.fleet.pauses import Pauses
from gateway.fleet.prefixes import KeyChanges
from gateway.fleet.prompts import PrefixIndexes
from gateway.messages import InferRequest
from gateway.processes.channel import MOST_BYTES, NO_CALL, Channel, Frame, call_numbers
from gateway.processes.inference_calls import RequestingEnd
from gateway.settings import TlsSettings, netloc
from gateway.tls.certificates import client_context

log = logging.getLogger("sluice.fleet")

FIRST_PAUSE_SECS, LONGEST_PAUSE_SECS = 0.1, 2.0
"""Pause before the next connection; doubled after each that fails, or is lost within that time."""
PING_SECS = 1.0
SILENT_SECS = 3.0
"""A replica that sends nothing for this time gets no new requests."""
GONE_SECS = 10.0
"""A replica that sends nothing for this time is disconnected."""
CONNECT_SECS = 5.0


class ReplicaConnection:
    """The connection to the replica at an address, made again whenever it is lost.

    `state` and `models` are the last offers of the replica, None and empty without a connection.
    `on_change` is called after each change of them. `loads` has what the choice needs of each
    model, `digests` those of their descriptions; `attempted` is set after the first attempt. The
    prefixes of the replica are in `indexes` while it is connected.
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
        self._place = host, port
        self._tls = tls
        self._identity = identity
        self._on_change = on_change
        self._indexes = indexes
        self._numbers = call_numbers()
        self._channel: Channel | None = None
        self._handshake: Handshake | None = None
        self._agreed: asyncio.Future[None] | None = None
        self._fault = ""
        self._known: dict[Key, KnownReplica] = {}
        self._pauses: defaultdict[Key, Pauses] = defaultdict(Pauses)
        self.digests: dict[Key, bytes] = {}

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
                self.counts.losses += 1
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
        """Whether it takes new requests of a model."""
        return self.state is ReplicaState.READY and self.continues(key)

    def continues(self, key: Key) -> bool:
        """Whether it takes requests of sequences that are open there; a draining one does."""
        offer, silent_secs = self.models.get(key), self.silent_secs
        if silent_secs is None or offer is None or offer.trouble:
            return False
        return silent_secs <= SILENT_SECS

    def call(
        self, key: Key, request: InferRequest, on_news: Callable[[], None], demand: Demand
    ) -> "ReplicaCall":
        """Send a request to a model; raises InferenceError if it cannot be encoded."""
        channel, known = self._channel, self.loads.get(key)
        if channel is None or known is None:
            raise InferenceError(Code.UNAVAILABLE, f"replica {self.id} is disconnected")
        if key in self._pauses:
            self._pauses[key].send(asyncio.get_running_loop().time())
            self._leave_out(key)
        number = next(self._numbers)
        call = ReplicaCall(channel, number, request, known, on_news)
        call.expected_secs = wait(known, demand)
        known.send(number, known.work(demand))
        return call

    def fail(self, key: Key) -> None:
        """Count a failure of a model; after three in ten seconds it is left out for a while."""
        self._pauses[key].fail(asyncio.get_running_loop().time())
        self._leave_out(key)

    def answered(self, key: Key) -> None:
        """Count an answer of a model, which ends the pauses after failures."""
        if key in self._pauses:
            self._pauses[key].answer()
            self._leave_out(key)

    def _count_loss(self) -> None:
        """Count the loss of the replica as one failure of each model, unless it has drained."""
        if self.state is not ReplicaState.DRAINING:
            for key in self._known:
                self.fail(key)

    def _leave_out(self, key: Key) -> None:
        known, pauses = self._known.get(key), self._pauses.get(key)
        if known is not None and pauses is not None:
            known.refused_until = pauses.left_out_until

    async def _connect(self) -> None:
        """Connect, and agree with the replica. Raises HandshakeError, OSError, TimeoutError."""
        loop = asyncio.get_running_loop()
        channel = Channel(self._on_frame, HANDSHAKE_BYTES)
        async with asyncio.timeout(CONNECT_SECS):
            # Read again for each connection: a certificate may have been renewed.
            context: ssl.SSLContext | None = None
            if self._tls is not None:
                context = await asyncio.to_thread(client_context, self._tls)
            await loop.create_connection(lambda: channel, *self._place, ssl=context)
        self._channel, self._agreed = channel, loop.create_future()
        self._handshake, self._fault = Handshake(self._identity), ""
        channel.send(FleetKind.HELLO, NO_CALL, self._handshake.hello())
        lost = asyncio.ensure_future(channel.lost())
        try:
            async with asyncio.timeout(HANDSHAKE_SECS):
                await asyncio.wait((lost, self._agreed), return_when=asyncio.FIRST_COMPLETED)
            if not self._agreed.done():
                raise HandshakeError("it has disconnected during the handshake")
            self._agreed.result()
        finally:
            lost.cancel()
        log.info("replica connected", extra={"address": self.address, "id": self.id})

    async def _follow(self) -> str:
        """Ping until the replica is lost or silent for too long; returns the reason."""
        channel, time = self._channel, asyncio.get_running_loop().time
        assert channel is not None  # noqa: S101 - it is connected
        while not channel.is_lost:
            channel.send(FleetKind.PING)
            with suppress(TimeoutError):
                async with asyncio.timeout(PING_SECS):
                    await channel.lost()
            if time() - channel.heard_at > GONE_SECS:
                return f"it has sent nothing for {GONE_SECS:g} s"
        return self._fault or "it has disconnected"

    def _lose(self) -> None:
        """Disconnect: open calls end, and no more begin."""
        channel, self._channel = self._channel, None
        self.state, self._handshake = None, None
        self.models, self.loads, self.digests, self._known = {}, {}, {}, {}
        for index in self._indexes.values():
            index.remove(self.id)
        if channel is not None:
            channel.abort()
            self._on_change()

    def _on_frame(self, frame: Frame) -> None:
        if self._agreed is not None and not self._agreed.done():
            self._agree(frame, self._agreed)
            return
        try:
            if frame.kind == FleetKind.OFFERS:
                self._take_offers(read_offers(frame.payload))
            elif frame.kind == FleetKind.LOAD:
                self._take_load(*read_load(frame.payload))
            elif frame.kind == FleetKind.PREFIXES:
                self._take_prefixes(*read_prefixes(frame.payload))
        except (msgspec.DecodeError, ValueError) as error:
            self._fault = f"its announcements cannot be used: {error}"
            if self._channel is not None:
                self._channel.abort()

    def _agree(self, frame: Frame, agreed: asyncio.Future[None]) -> None:
        channel, handshake = self._channel, self._handshake
        if channel is None or handshake is None:
            return
        try:
            proof = handshake.take(frame)
        except HandshakeError as error:
            channel.send(FleetKind.REFUSAL, NO_CALL, str(error).encode())
            channel.close()
            agreed.set_exception(error)
            return
        if proof is not None:
            channel.send(FleetKind.PROOF, NO_CALL, proof)
        if handshake.peer is not None:
            self.id = handshake.peer.id
            channel.limit(MOST_BYTES)
            agreed.set_result(None)

    def _take_offers(self, offers: Offers) -> None:
        self.state = offers.state
        self.models = {each.key: each for each in offers.models}
        self.loads = {key: self._load_of(each) for key, each in self.models.items()}
        self.digests = {key: each.digest for key, each in self.models.items()}
        if offers.state is not ReplicaState.STARTING:
            self.attempted.set()
        self._on_change()

    def _load_of(self, offer: ModelOffer) -> KnownReplica:
        """The load of an offered model; it outlasts offers without the model, as the calls do."""
        known = self._known.get(offer.key)
        if known is None:
            known = KnownReplica(self.id, first_load(offer), distance_secs=0.0)
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


class ReplicaCall(RequestingEnd):
    """A call to a replica; its load counts the call until `leave`.

    `expected_secs` is the time until its first response, as expected when it was sent.
    """

    def __init__(
        self,
        channel: Channel,
        number: int,
        request: InferRequest,
        known: KnownReplica,
        on_news: Callable[[], None],
    ) -> None:
        super().__init__(channel, number, request, "its replica", on_news)
        self._known = known
        self.expected_secs = wait(known, ANY_REQUEST)
        self._sent_at = monotonic()

    @property
    def age_secs(self) -> float:
        """The time since it was sent."""
        return monotonic() - self._sent_at

    def leave(self) -> int:
        self._known.end(self._call)
        return super().leave()


def _nothing() -> None:
    """A change that no router needs to know."""


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "it does not answer"
    return (isinstance(error, OSError) and error.strerror) or str(error)
