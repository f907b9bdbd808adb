"""Recordings of other routers: their streams, resumed here, and requests with idempotency keys."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from gateway.errors import Code, InferenceError
from gateway.fleet.cancellations import cancelled_at
from gateway.fleet.handshake import NAME_CHARS, FleetKind, FleetRole, Identity
from gateway.fleet.large import sent_bytes
from gateway.fleet.peers import PeerRouter, RouterAbsent
from gateway.fleet.routers import Place, RouterTable, owner_of
from gateway.messages import InferRequest, InferResponse
from gateway.models.model import Model
from gateway.policy.caller import Caller
from gateway.processes.channel import Channel, Frame
from gateway.processes.inference_calls import (
    RESPONSES,
    RequestingEnd,
    request_payload,
    waited_us,
)
from gateway.processes.inference_messages import LargeData, read_request, write_request
from gateway.request_name import RequestName
from gateway.resumption.reader import EventId, RecordingReader
from gateway.resumption.recording import Follower, Key, KeyReused, RecordedRequest
from gateway.settings import TlsSettings, netloc
from gateway.stream import INTERRUPTED

FindModel = Callable[[str, str], Model]
"""The model of a name and version; InferenceError if there is none."""


class Relay(msgspec.Struct, array_like=True):
    """A call to another router: a request with a `key`, or the stream of a `token`.

    `request` is a message of `inference_messages`; with a token it has the tenant only. `after` is
    the number of the last response that the client has.
    """

    place: str
    request: bytes
    token: str = ""
    after: Annotated[int, Meta(ge=0)] = 0
    key: str = ""
    fingerprint: bytes = b""


class Relayed(msgspec.Struct, array_like=True):
    """The answer to a call: the recording, by its token, and its request without inputs.

    With `reused` there is none: the key was used for another request.
    """

    token: str
    version: str
    request: bytes
    replayed: bool = False
    reused: bool = False


encode = msgspec.msgpack.Encoder().encode
decode_relay = msgspec.msgpack.Decoder(Relay).decode
_decode_relayed = msgspec.msgpack.Decoder(Relayed).decode


ANSWER_SECS = 5.0
"""Time limit from a call to its answer."""
MOST_BYTES = 16 << 20
"""A larger request is executed here: pings would wait behind it for too long."""


class RouterLost(InferenceError):
    """The connection to the other router was lost during a call."""

    def __init__(self, router_id: str, when: str) -> None:
        super().__init__(Code.UNAVAILABLE, f"router {router_id} was lost {when}")


class RelayCall(RequestingEnd):
    """A call to another router; `relayed` is its answer, which comes before the responses."""

    def __init__(
        self, channel: Channel, peer: PeerRouter, relay: Relay, wake: Callable[[], None]
    ) -> None:
        self.relayed: Relayed | None = None
        super().__init__(channel, next(peer.numbers), f"router {peer.id}", wake)
        channel.send(FleetKind.RELAY, self._call, encode(relay))

    def interrupt(self) -> None:
        """Cancel the request, which gets a last response that says so."""
        self._channel.send(FleetKind.INTERRUPT, self._call)

    def _take(self, frame: Frame) -> None:
        if frame.kind == FleetKind.RELAYED and self.relayed is None:
            self.relayed = _decode_relayed(frame.payload)
            self._wake()
            return
        if self.relayed is None and frame.kind in RESPONSES:
            raise ValueError("a router has sent a response before the answer to the call")
        super()._take(frame)


class RelayedRecording:
    """A recording of another router with one reader, which gets each response once.

    See `FollowedRecording`. Responses remain at the other router until the reader takes them.
    """

    recorded: RecordedRequest

    def __init__(
        self, peer: PeerRouter, channel: Channel, relay: Relay, on_end: Callable[[], None]
    ) -> None:
        self.token = relay.token
        self.last = relay.after
        self.over = False
        self.error: InferenceError | None = None
        self._peer = peer
        self._on_end = on_end
        self._has_left = False
        self._follower: Follower | None = None
        self._has_news = asyncio.Event()
        self._call = RelayCall(channel, peer, relay, self.wake)
        peer.calls += 1

    async def answered(self) -> Relayed:
        """The answer to the call, which comes before the request is executed.

        Raises the error of the other router, KeyReused, RouterLost, and RouterAbsent if it drains
        or does not have the model.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_SECS):
                await self._answer_or_end()
        if self.error is not None:
            raise self.error
        found = self._call.relayed
        if found is None:
            raise RouterAbsent if self.over else self._lost()
        if found.reused:
            raise KeyReused
        self.token = found.token
        return found

    def wake(self) -> None:
        """Have the reader look again."""
        self._has_news.set()
        if self._follower is not None:
            self._follower.wake()

    def leave(self) -> None:
        """End the call; the recording remains at the other router. Idempotent."""
        if not self._has_left:
            self._has_left = True
            self._peer.calls -= 1
            self._call.leave()
            self._on_end()

    def check(self, position: int) -> None:
        """Nothing: the other router has checked it."""

    def follow(self, follower: Follower) -> None:
        """Add the reader."""
        self._follower = follower

    def unfollow(self, follower: Follower) -> None:
        """Remove the reader."""
        self._follower = None
        self.leave()

    def after(self, position: int) -> list[InferResponse]:
        """The responses after the last that was taken."""
        return self._take()

    def fill(self) -> None:
        """Nothing: the other router reads the stream."""

    def abandon(self, error: InferenceError) -> None:
        """End reading with an error."""
        if not self.over:
            self.over, self.error = True, error
            self.wake()

    def interrupt(self) -> bool:
        """See `ResponseStream.interrupt`."""
        if self.over:
            return False
        self._call.interrupt()
        return True

    async def _answer_or_end(self) -> None:
        while self._call.relayed is None and not self.over:
            self._has_news.clear()
            self._take()
            if not self.over:
                await self._has_news.wait()

    def _take(self) -> list[InferResponse]:
        found: list[InferResponse] = []
        try:
            while not self.over and (response := self._call.take()) is not None:
                found.append(INTERRUPTED if response == INTERRUPTED else response)
                self.over = response.final
        except InferenceError as error:
            self.over, self.error = True, self._lost() if self._call.is_lost else error
        self.last += len(found)
        self.over = self.over or self._call.is_over
        return found

    def _lost(self) -> InferenceError:
        if self._call.relayed is not None:
            return RouterLost(self._peer.id, f"after response {self.last} of the stream")
        when = "before it has answered; the request may have been executed"
        return RouterLost(self._peer.id, when)


class Relays:
    """The recordings of the routers that listen for others; see `Elsewhere`.

    The calls of a key are those of one router, as long as all routers have the same table.
    """

    def __init__(self, identity: Identity, tls: TlsSettings | None, find: FindModel) -> None:
        self.prefix = identity.id[:NAME_CHARS]
        self.table = RouterTable(identity.id, self._follow)
        self.tasks: asyncio.TaskGroup
        self._own_id = identity.id
        self._calling = identity.at(FleetRole.CALLING)
        self._tls = tls
        self._find = find
        self._peers: dict[str, PeerRouter] = {}
        self._open: set[RelayedRecording] = set()
        self._calls = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    async def open(self, recorded: RecordedRequest) -> RecordingReader | None:
        """See `Elsewhere`."""
        key, ids = recorded.key, {self._own_id, *self._peers}
        if key is None:
            return None
        relay: Relay | None = None
        while (owner := owner_of(recorded.tenant, key.name, ids)) != self._own_id:
            relay = relay or _relay(recorded, key)
            if relay is None:
                return None
            try:
                return await self._read(owner, relay, recorded.request.caller, recorded.model)
            except RouterAbsent:
                ids.discard(owner)
        return None

    async def resume(
        self, event: EventId, place: str, caller: Caller | None
    ) -> RecordingReader | None:
        """See `Elsewhere`."""
        owner = next(
            (each for each in self._peers if event.token.startswith(each[:NAME_CHARS])), None
        )
        if owner is None:
            return None
        message = write_request(InferRequest(model="", caller=caller))
        relay = Relay(_readable(place), message, event.token, event.number)
        try:
            return await self._read(owner, relay, caller)
        except (RouterAbsent, RouterLost):
            return None

    async def cancel(self, name: RequestName) -> bool:
        """Cancel the requests of a name at all other routers; whether there was one."""
        peers = tuple(self._peers.values())
        return any(await asyncio.gather(*(cancelled_at(each, name) for each in peers)))

    def wake_readers(self) -> None:
        """See `Elsewhere`."""
        for each in tuple(self._open):
            each.wake()

    def describe(self) -> list[dict[str, Any]]:
        """The other routers, as members of JSON."""
        return [
            {"id": name, "addresses": [netloc(*at) for at in each.places], "relayed": each.calls}
            for name, each in self._peers.items()
        ]

    def abandon(self, error: InferenceError) -> None:
        """See `Elsewhere`."""
        for each in tuple(self._open):
            each.abandon(error)

    async def ended(self) -> None:
        """See `Elsewhere`."""
        await self._is_idle.wait()

    async def _read(
        self, owner: str, relay: Relay, caller: Caller | None, model: Model | None = None
    ) -> RecordingReader:
        peer = self._peers.get(owner)
        if peer is None:  # it has left meanwhile
            raise RouterAbsent
        self._calls += 1
        self._is_idle.clear()
        try:
            channel = await peer.channel()
            found = RelayedRecording(peer, channel, relay, lambda: self._end(found))
        except BaseException:
            self._end()
            raise
        self._open.add(found)
        try:
            answer = await found.answered()
            request = read_request(answer.request)
            if model is None or model.version != answer.version:
                model = self._answering(request.model, answer.version)
            found.recorded = RecordedRequest(relay.place, model, request)
            return RecordingReader(found, relay.after, caller, replayed=answer.replayed)
        except BaseException:
            found.leave()
            raise

    def _answering(self, name: str, version: str) -> Model:
        """The model of an answer, for its form: if that version is not here, another one."""
        try:
            return self._find(name, version)
        except InferenceError:
            found = copy(self._find(name, ""))
            found.version = version
            return found

    def _end(self, recording: RelayedRecording | None = None) -> None:
        if recording is not None:
            self._open.discard(recording)
        self._calls -= 1
        if not self._calls:
            self._is_idle.set()

    def _follow(self, places: Mapping[str, Sequence[Place]]) -> None:
        """Keep the connections to the routers that are still there."""
        known, self._peers = self._peers, {}
        for router_id, found in places.items():
            peer = known.get(router_id)
            if peer is None:
                peer = PeerRouter(router_id, self._calling, self._tls, self.tasks)
            peer.places = found
            self._peers[router_id] = peer


def _relay(recorded: RecordedRequest, key: Key) -> Relay | None:
    """The call for a request with a key, with the version chosen here; None if it is too large."""
    request = replace(recorded.request, version=recorded.model.version)
    large: list[LargeData] = []
    message = write_request(request, waited_us(request), large)
    if len(message) + sum(map(sent_bytes, large)) > MOST_BYTES:
        return None
    if large:
        message = request_payload(request)
    return Relay(_readable(recorded.place), message, key=key.name, fingerprint=key.fingerprint)


def _readable(place: str) -> str:
    """A place in UTF-8: a path may have bytes that are none, and then no recording."""
    return place.encode("utf-8", "replace").decode()
