"""The port of a replica: connections of routers, and their requests to the data plane."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from functools import partial

from gateway.dataplane import DataPlane
from gateway.errors import InferenceError
from gateway.fleet.choice import ReplicaState
from gateway.fleet.handshake import (
    HANDSHAKE_BYTES,
    HANDSHAKE_SECS,
    FleetKind,
    FleetRole,
    Handshake,
    HandshakeError,
    Identity,
)
from gateway.fleet.offers import Key, LoadMeter, Offers, offer, write_load, write_offers
from gateway.messages import InferRequest, InferResponse
from gateway.processes.channel import MOST_BYTES, NO_CALL, Channel, Frame
from gateway.processes.inference_calls import AnsweringEnd, InferenceKind
from gateway.server import Listeners, Server, StartFailed
from gateway.settings import FleetSettings, netloc

log = logging.getLogger("sluice.fleet")

MOST_ROUTERS = 1024
"""Connections of routers at one time, those in their handshake included."""
LOAD_SECS = 0.05
"""The shortest time between two loads."""
SILENT_SECS = 10.0
"""A router that sends nothing for this time is disconnected."""


class RouterLink:
    """The connection of one router: its handshake, then its requests.

    `seen` has the number of the latest call of each model.
    """

    def __init__(self, port: "FleetPort") -> None:
        self._port = port
        self._handshake: Handshake | None = Handshake(port.identity)
        self._calls: set[AnsweringEnd] = set()
        self.seen: dict[Key, int] = {}
        loop = asyncio.get_running_loop()
        self._heard_at = loop.time()
        self._expiry = loop.call_later(HANDSHAKE_SECS, self._expire)
        self.channel = Channel(self._on_frame, HANDSHAKE_BYTES)
        self._watch = port.tasks.create_task(self._until_lost())

    @property
    def agreed(self) -> bool:
        """Whether the handshake is over."""
        return self._handshake is None

    def close(self) -> None:
        """Disconnect; open calls are cancelled."""
        self._expiry.cancel()
        self.channel.abort()
        self._watch.cancel()
        for call in tuple(self._calls):
            call.lose()

    async def _until_lost(self) -> None:
        try:
            await self.channel.lost()
        finally:
            self._expiry.cancel()
            self._port.links.discard(self)

    def _expire(self) -> None:
        """Disconnect a router that is late with its handshake, or silent."""
        loop = asyncio.get_running_loop()
        silent_secs = loop.time() - self._heard_at
        if self._handshake is not None:
            log.warning("router dropped", extra={"reason": "no handshake in time"})
            self.channel.abort()
        elif silent_secs >= SILENT_SECS:
            log.warning("router dropped", extra={"reason": f"silent for {silent_secs:.0f} s"})
            self.channel.abort()
        else:
            self._expiry = loop.call_later(SILENT_SECS - silent_secs, self._expire)

    def _on_frame(self, frame: Frame) -> None:
        self._heard_at = asyncio.get_running_loop().time()
        if self._handshake is not None:
            self._agree(frame, self._handshake)
        elif frame.kind == InferenceKind.REQUEST:
            self._begin(frame)
        elif frame.kind == FleetKind.PING:
            self.channel.send(FleetKind.PONG)

    def _agree(self, frame: Frame, handshake: Handshake) -> None:
        try:
            proof = handshake.take(frame)
        except HandshakeError as error:
            log.warning("router refused", extra={"reason": str(error)})
            self.channel.send(FleetKind.REFUSAL, NO_CALL, str(error).encode())
            self.channel.close()
            return
        if proof is not None:
            self.channel.send(FleetKind.HELLO, NO_CALL, handshake.hello())
            self.channel.send(FleetKind.PROOF, NO_CALL, proof)
        if handshake.peer is not None:
            self._handshake = None
            self.channel.limit(MOST_BYTES)
            log.info("router connected", extra={"id": handshake.peer.id})
            self.channel.send(FleetKind.OFFERS, NO_CALL, self._port.offers())

    def _begin(self, frame: Frame) -> None:
        call = AnsweringEnd(self.channel, frame.call, frame.payload)
        respond = partial(self._port.responses, self, frame.call)
        call.task = self._port.tasks.create_task(call.run(respond))
        self._calls.add(call)
        call.task.add_done_callback(partial(self._ended, frame.call, call))

    def _ended(self, number: int, call: AnsweringEnd, _: object) -> None:
        self.channel.leave(number)
        self._calls.discard(call)


class FleetPort(Listeners):
    """The port of a replica, and the `inner` listeners of its process.

    Every connected router gets the offers again whenever a model changes.
    """

    def __init__(self, server: Server, inner: Listeners, settings: FleetSettings) -> None:
        self.identity = Identity(settings.name, FleetRole.REPLICA, settings.secret)
        self.links: set[RouterLink] = set()
        self.tasks: asyncio.TaskGroup
        self._dataplane: DataPlane = server.dataplane
        self._inner = inner
        self._settings = settings
        self._server: asyncio.Server | None = None
        self._announcing: asyncio.Task[None] | None = None
        self._meters: dict[Key, LoadMeter] = {}
        self._changed: set[Key] = set()
        self._sending: asyncio.TimerHandle | None = None

    @property
    def ports(self) -> Mapping[str, int]:  # type: ignore[override]  # most need no property
        sockets = () if self._server is None else self._server.sockets
        own = {"fleet": sockets[0].getsockname()[1]} if sockets else {}
        return {**self._inner.ports, **own}

    async def open(self, tasks: asyncio.TaskGroup) -> None:
        self.tasks = tasks
        await self._inner.open(tasks)
        loop = asyncio.get_running_loop()
        place = self._settings.address, self._settings.port or 0
        try:
            self._server = await loop.create_server(self._accept, *place)
        except OSError as error:
            reason = error.strerror or str(error)
            raise StartFailed(f"cannot listen on {netloc(*place)} for fleet: {reason}") from None
        log.info("listening", extra={"for": "fleet", "port": self.ports["fleet"]})
        self._announcing = tasks.create_task(self._announce())

    def stop_accepting(self, tasks: asyncio.TaskGroup, grace_secs: float) -> None:
        if self._server is not None:
            self._server.close()
        self._send_offers()
        self._inner.stop_accepting(tasks, grace_secs)

    def stop_waiting(self, tasks: asyncio.TaskGroup, grace_secs: float) -> None:
        if self._announcing is not None:
            self._announcing.cancel()
        if self._sending is not None:
            self._sending.cancel()
        for link in tuple(self.links):
            link.close()
        self._inner.stop_waiting(tasks, grace_secs)

    def offers(self) -> bytes:
        """The present offers, as a payload."""
        dataplane = self._dataplane
        if dataplane.exiting:
            state = ReplicaState.DRAINING
        else:
            state = ReplicaState.READY if dataplane.ready else ReplicaState.STARTING
        return write_offers(Offers(state, tuple(offer(model) for model in dataplane.models())))

    async def responses(
        self, link: RouterLink, number: int, request: InferRequest
    ) -> AsyncGenerator[InferResponse, None]:
        """The responses of the data plane to a request of a router."""
        key = request.model, int(request.version)
        link.seen[key] = number
        try:
            with self._dataplane.infer(request) as stream:
                self._change_load(key)
                async for response in stream:
                    yield response
        finally:
            self._change_load(key)

    def _accept(self) -> asyncio.BaseProtocol:
        link = RouterLink(self)
        self.links.add(link)
        if len(self.links) > MOST_ROUTERS:
            log.warning("router refused", extra={"reason": f"{MOST_ROUTERS} are connected"})
            asyncio.get_running_loop().call_soon(link.close)
        return link.channel

    async def _announce(self) -> None:
        while True:
            await self._dataplane.changed()
            self._send_offers()

    def _change_load(self, key: Key) -> None:
        """Send the load of a model soon."""
        self._changed.add(key)
        if self._sending is None:
            loop = asyncio.get_running_loop()
            self._sending = loop.call_later(LOAD_SECS, self._send_loads)

    def _send_loads(self) -> None:
        self._sending = None
        changed, self._changed = self._changed, set()
        for key in changed:
            try:
                model = self._dataplane.model(key[0], str(key[1]))
            except InferenceError:  # it has been unloaded
                continue
            meter = self._meters.setdefault(key, LoadMeter())
            for link in self.links:
                if link.agreed:
                    load = meter.load(model, link.seen.get(key, 0))
                    link.channel.send(FleetKind.LOAD, NO_CALL, write_load(key, load))

    def _send_offers(self) -> None:
        payload = self.offers()
        for link in self.links:
            if link.agreed:
                link.channel.send(FleetKind.OFFERS, NO_CALL, payload)
