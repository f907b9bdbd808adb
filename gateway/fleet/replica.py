"""The port of a replica: connections of routers, and their requests to the data plane."""

import asyncio
import logging
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from gateway.backend import MetricReading
from gateway.conversations.turn import is_turn
from gateway.dataplane import DataPlane
from gateway.errors import InferenceError, Refusal, RefusedError, unexpected
from gateway.fleet.accepting import AcceptedLink, AcceptingPort
from gateway.fleet.announcer import LoadAnnouncer
from gateway.fleet.answer import RoutedAnswer, version_of
from gateway.fleet.bulk import BulkConnection
from gateway.fleet.choice import Load, ReplicaState
from gateway.fleet.copies import CopiedTurn, CopyChannel, ReplicaCopies
from gateway.fleet.handshake import (
    FleetKind,
    FleetRole,
    Handshake,
    HandshakeError,
    Hello,
    Identity,
)
from gateway.fleet.large import ArrivalOrder, ArrivalPlace, read_head
from gateway.fleet.meter import NO_CHANGES, LoadMeter
from gateway.fleet.metrics import COPIES_DROPPED, NEED, ROUTERS, FleetPage
from gateway.fleet.offers import Key, Offers, offer, write_load, write_offers, write_prefixes
from gateway.fleet.prefixes import KeyChanges
from gateway.fleet.quarantine import SharedSuspects
from gateway.fleet.routers import write_table
from gateway.fleet.scaling import need_of
from gateway.fleet.status import own_status, rounded
from gateway.fleet.traces import begin_trace, end_trace
from gateway.messages import InferRequest
from gateway.models.model import Model
from gateway.observability.trace import Trace
from gateway.observability.tracer import Tracer
from gateway.processes.channel import NO_CALL, Frame
from gateway.processes.inference_calls import InferenceKind
from gateway.processes.inference_messages import read_request
from gateway.server import Listeners, Server
from gateway.settings import FleetSettings
from gateway.stream import ResponseStream

log = logging.getLogger("sluice.fleet")


class RouterLink(AcceptedLink):
    """The connection of one router: its handshake, then its requests.

    `seen` has the number of the latest call of each model. `answers` are those under way. `bulk` is
    the connection of their large tensors, `nonce` names this one there. Turns that have ended are
    unsettled until the router has left them.
    """

    def __init__(self, port: "FleetPort") -> None:
        super().__init__(port)
        self._port = port
        self.seen: dict[Key, int] = {}
        self._informed: dict[Key, LoadMeter] = {}
        self.answers: set[RoutedAnswer] = set()
        self.bulk = BulkConnection(self.channel)
        self._copies: CopyChannel | None = None
        self._order = ArrivalOrder()
        self._unsettled: dict[int, CopiedTurn] = {}
        self._final_ends = self._settles = False
        self._large_of: RouterLink | None = None

    @property
    def is_idle(self) -> bool:
        has_sent_copies = self._copies is None or self._copies.is_idle
        return not self.answers and not self._unsettled and has_sent_copies

    def announce(self, key: Key, meter: LoadMeter, load: Load, changes: KeyChanges) -> None:
        """Send the load of a model, and its changed prefixes: all, if the router has others."""
        known = self._informed.get(key)
        if known is not meter:
            self._informed[key] = meter
            changes = meter.all_prefixes()
            if known is None and not changes.gained:
                changes = NO_CHANGES
        if changes:
            self.channel.send(FleetKind.PREFIXES, NO_CALL, write_prefixes(key, changes))
        own = replace(load, seen=self.seen.get(key, 0))
        self.channel.send(FleetKind.LOAD, NO_CALL, write_load(key, own))

    def finish(self, grace_secs: float) -> None:
        for call in self._unsettled:
            asyncio.get_running_loop().call_soon(self._copy_whole, call)
        super().finish(grace_secs)

    def end(self) -> None:
        super().end()
        self._port.suspects.leave(self.channel)
        self.bulk.abort()

    def hear(self, frame: Frame) -> None:
        if frame.kind in (InferenceKind.REQUEST, FleetKind.LARGE_REQUEST):
            self._begin(frame)
        elif frame.kind == FleetKind.SUSPECTS:
            self._hear_suspects(frame.payload)
        elif frame.kind == InferenceKind.GONE and frame.call in self._unsettled:
            self._settle(self._unsettled.pop(frame.call), frame.payload)
            self.finish_if_idle()
        else:
            self.bulk.hear(frame)

    def _hear_suspects(self, payload: bytes) -> None:
        try:
            self._port.suspects.hear(self.channel, payload)
        except msgspec.DecodeError as error:
            log.warning("router dropped", extra={"reason": f"suspects cannot be read: {error}"})
            self.close()

    def check(self, handshake: Handshake) -> None:
        self._large_of = self._port.link(handshake.link) if handshake.link else None

    def agree(self, peer: Hello) -> None:
        if self._large_of is None:
            super().agree(peer)
        else:
            self._give_to(self._large_of)

    def begin(self) -> None:
        self._final_ends = self.peer is not None and self.peer.final_ends
        self._settles = self.peer is not None and self.peer.settles
        self._copies = CopyChannel(self.bulk, self._port.copies.keep, self.finish_if_idle)
        self.channel.send(FleetKind.OFFERS, NO_CALL, self._port.offers())
        self._port.loads.announce_tokens()
        self._port.suspects.join(self.channel)

    def _give_to(self, link: "RouterLink") -> None:
        """Let a link have this connection, for its large tensors."""
        self.channel.hand_over(link.bulk)
        link.bulk.open()
        link.channel.send(FleetKind.BULK)
        self.close()

    def _begin(self, frame: Frame) -> None:
        answer = RoutedAnswer(self.bulk, frame.call, final_ends=self._final_ends)
        is_large = frame.kind == FleetKind.LARGE_REQUEST
        try:
            request = read_head(frame.payload) if is_large else read_request(frame.payload)
            key = request.model, version_of(request)
        except InferenceError as error:
            answer.refuse(error)
            return
        self.seen[key] = frame.call
        self._port.loads.change(key)
        self.answers.add(answer)
        place = self._order.join(request, is_large=is_large)
        answer.open(partial(self._ended, frame.call, answer, key, place))
        if place is None and not is_large:
            self._submit(answer, request)
            return
        self._port.loads.arriving[answer] = key
        if is_large:
            answer.receive(frame.payload, partial(self._arrived, place, answer))
        else:
            self._arrived(place, answer, request)

    def _arrived(
        self, place: ArrivalPlace | None, answer: RoutedAnswer, request: InferRequest
    ) -> None:
        """Submit a request behind those of its sequence that are still arriving."""
        if place is None:
            self._submit(answer, request)
        else:
            place.reached(partial(self._submit, answer, request))

    def _submit(self, answer: RoutedAnswer, request: InferRequest) -> None:
        prompt, loads = request.prompt, self._port.loads
        key = request.model, int(request.version)
        if loads.arriving.pop(answer, None) is not None:
            loads.change(key)
        try:
            answer.trace = begin_trace(self._port.tracer, request, answer.received_ns)
            stream = self._port.infer(request, answer.trace)
            # Its model may have another version than `key`: that of a rollout, or the conversation.
            if request.sequence is not None and is_turn(request):
                answer.turn = self._port.copies.turn(stream.model, request.sequence)
            metered = None
            if prompt is not None:
                metered = loads.begin((request.model, int(stream.model.version)), prompt)
            answer.begin(stream, metered)
        except InferenceError as error:
            answer.fail(error)
        except Exception:
            # Around one request: the one before it in its sequence has begun it.
            log.exception("request not begun")
            answer.fail(unexpected())

    def _ended(self, call: int, answer: RoutedAnswer, key: Key, place: ArrivalPlace | None) -> None:
        end_trace(answer.trace)
        self.answers.discard(answer)
        if place is not None:
            place.leave()
        self._port.loads.arriving.pop(answer, None)
        self._port.loads.change(key)
        if answer.turn is not None and answer.passed_on is None and self._settles:
            self._unsettled[call] = answer.turn
            if self._is_finishing:
                self._copy_whole(call)
        elif answer.turn is not None:
            self._settle(answer.turn, answer.passed_on or b"")
        self.finish_if_idle()

    def _copy_whole(self, call: int) -> None:
        """Send the conversation of an unsettled turn, uncut: GONE may be too late for a copy."""
        if call in self._unsettled:
            self._settle(self._unsettled[call], b"")

    def _settle(self, turn: CopiedTurn, passed_on: bytes) -> None:
        """Send the conversation of a turn for another replica, unless it has that copy."""
        if self._copies is not None and not turn.settle(passed_on, self._copies.send):
            self._port.copies.dropped += 1


class FleetPort(AcceptingPort[RouterLink]):
    """The port of a replica.

    Every connected router gets the offers again whenever a model changes, and those that listen for
    other routers get the table of them.
    """

    def __init__(self, server: Server, inner: Listeners, settings: FleetSettings) -> None:
        identity = Identity(settings.name, FleetRole.REPLICA, settings.secret, zone=settings.zone)
        super().__init__(identity, inner, settings)
        self._dataplane: DataPlane = server.dataplane
        self.copies = ReplicaCopies(self._dataplane)
        self.suspects = SharedSuspects(relays=True)
        self._announcing: asyncio.Task[None] | None = None
        self.loads = LoadAnnouncer(self._dataplane, self.links)

    async def open(self, tasks: asyncio.TaskGroup) -> None:
        await super().open(tasks)
        self._announcing = tasks.create_task(self._announce())

    def stop_accepting(self, tasks: asyncio.TaskGroup, grace_secs: float) -> None:
        self._send_offers()
        super().stop_accepting(tasks, grace_secs)

    def stop_waiting(self, tasks: asyncio.TaskGroup, grace_secs: float) -> None:
        if self._announcing is not None:
            self._announcing.cancel()
        self.loads.stop()
        super().stop_waiting(tasks, grace_secs)

    def new_link(self) -> RouterLink:
        return RouterLink(self)

    def changed(self, peer: Hello) -> None:
        if not peer.port:
            return
        listening = [each for each in self.agreed() if each.peer is not None and each.peer.port]
        table = write_table((each.peer, each.channel.host) for each in listening)
        for each in listening:
            each.channel.send(FleetKind.ROUTERS, NO_CALL, table)

    def describe(self) -> dict[str, Any]:
        """See `FleetMember`."""
        now = asyncio.get_running_loop().time()
        routers = [
            {
                "id": link.router_id,
                "silent_secs": rounded(now - link.channel.heard_at),
                "in_flight": len(link.answers),
            }
            for link in self.agreed()
        ]
        return {**own_status(self.identity), "state": self._state, "routers": routers}

    def families(self) -> list[MetricReading]:
        """See `FleetMember`."""
        page = FleetPage()
        page.add(ROUTERS, len(self.agreed()))
        page.add(COPIES_DROPPED, self.copies.dropped)
        for model in self._dataplane.models():
            meter = self.loads.meter(model)
            needed = need_of(model, meter.load(), meter.idle_secs())
            page.add(NEED, needed, model=model.name, version=model.version)
        return page.families()

    @property
    def tracer(self) -> Tracer:
        """The selection of the requests to trace."""
        return self._dataplane.tracer

    @property
    def _state(self) -> ReplicaState:
        if self._dataplane.exiting:
            return ReplicaState.DRAINING
        # A model that is not ready says so in its offer, and leaves the others in service.
        return ReplicaState.READY if self._dataplane.settled else ReplicaState.STARTING

    def link(self, nonce: str) -> RouterLink:
        """The link of that nonce, without its connection of large tensors; else HandshakeError."""
        for each in self.links:
            if each.nonce == nonce and each.agreed and not each.bulk.is_made:
                return each
        raise HandshakeError("found no connection of messages that lacks one of large tensors")

    def offers(self) -> bytes:
        """The present offers, as a payload."""
        models = self._dataplane.models()
        offers = tuple(offer(each, self._dataplane.labels_of(each)) for each in models)
        return write_offers(Offers(self._state, offers))

    def infer(self, request: InferRequest, trace: Trace | None) -> ResponseStream:
        """Submit a request of a router; raises RefusedError if it is not queued."""
        try:
            if request.chosen:
                return self._dataplane.infer(request, self._chosen(request), trace)
            return self._dataplane.infer(request, trace=trace)
        except Refusal:
            raise
        except InferenceError as error:
            refusal = RefusedError(error.code, error.message)
            refusal.lacks_instance = error.lacks_instance
            raise refusal from None

    def _chosen(self, request: InferRequest) -> Model:
        """The version that a router has chosen, or another one if that has been unloaded."""
        try:
            return self._dataplane.model(request.model, request.version)
        except InferenceError:
            return self._dataplane.model(request.model)

    async def _announce(self) -> None:
        while True:
            await self._dataplane.changed()
            self.loads.forget_unloaded()
            self._send_offers()

    def _send_offers(self) -> None:
        payload = self.offers()
        for link in self.agreed():
            link.channel.send(FleetKind.OFFERS, NO_CALL, payload)
