"""A replica that a test drives by hand: the port of one, on a loopback socket."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from gateway.config import ModelConfig
from gateway.config.pbtxt import to_text
from gateway.conversations.copies import ConversationCopy
from gateway.errors import InferenceError
from gateway.fleet.bulk import BulkConnection
from gateway.fleet.choice import Location, ReplicaState
from gateway.fleet.copies import CopyChannel
from gateway.fleet.handshake import HANDSHAKE_BYTES, FleetKind, FleetRole, Handshake, Identity
from gateway.fleet.offers import ModelOffer, Offers, write_offers
from gateway.messages import InferRequest, InferResponse, Usage
from gateway.processes.channel import NO_CALL, Channel, Frame
from gateway.processes.error_messages import write_error
from gateway.processes.inference_calls import InferenceKind
from gateway.processes.inference_messages import read_request, write_response
from gateway.tensor import text_tensor
from tests.builders import soon

NO_OFFERS = Offers(ReplicaState.READY)


class FakeReplica:
    """Agrees with every router, sends it the `offers`, and answers its pings unless `silent`.

    `links` are the connections so far that have agreed. `calls` are the numbers of the requests
    that the last one has sent, `requests` all requests by their numbers, `gone` those that it has
    left. `bulk` is the connection of its large tensors. `copies` sends those of conversations,
    `kept` are those of other replicas. `location` is its place.
    """

    def __init__(self) -> None:
        self.offers = NO_OFFERS
        self.silent = False
        self.links: list[Channel] = []
        self.calls: list[int] = []
        self.requests: dict[int, InferRequest] = {}
        self.gone: list[int] = []
        self.port = 0
        self.bulk: BulkConnection
        self.copies: CopyChannel
        self.kept: list[ConversationCopy] = []
        self._identity = Identity("sluice", FleetRole.REPLICA)

    @property
    def location(self) -> Location:
        return self._identity.location

    @location.setter
    def location(self, place: Location) -> None:
        self._identity.location = place

    def accept(self) -> asyncio.Protocol:
        """The protocol of a new connection."""
        handshake = Handshake(self._identity)

        def on_frame(frame: Frame) -> None:
            if handshake.peer is None:
                self._agree(channel, handshake, frame)
            elif frame.kind == FleetKind.PING and not self.silent:
                channel.send(FleetKind.PONG)
            elif frame.kind == InferenceKind.REQUEST:
                self.calls.append(frame.call)
                self.requests[frame.call] = read_request(frame.payload)
            else:
                if frame.kind == InferenceKind.GONE:
                    self.gone.append(frame.call)
                self.bulk.hear(frame)

        channel = Channel(on_frame, HANDSHAKE_BYTES)
        return channel

    def offer(self, *models: ModelOffer, state: ReplicaState = ReplicaState.READY) -> None:
        """Offer these models, also to later connections."""
        self.offers = Offers(state, models)
        if self.links:
            self.send(FleetKind.OFFERS, write_offers(self.offers))

    def send(self, kind: int, payload: bytes) -> None:
        """Send a frame to the latest router."""
        self.links[-1].send(kind, NO_CALL, payload)

    def answer(self, call: int, text: str, usage: Usage | None = None) -> None:
        """Answer a request with one text."""
        outputs = (text_tensor("text_output", [text]),)
        self.respond(call, InferResponse(outputs=outputs, final=True, usage=usage))

    def respond(self, call: int, *responses: InferResponse) -> None:
        """Send responses to a request; a final one ends it."""
        for each in responses:
            self.links[-1].send(InferenceKind.DATA, call, write_response(each))
            if each.final:
                self.links[-1].send(InferenceKind.END, call)

    def restart(self) -> None:
        """Be another process at the same address."""
        self._identity = Identity("sluice", FleetRole.REPLICA)
        self.lose()

    def lose(self) -> None:
        """Lose all connections."""
        for each in self.links:
            each.abort()

    def fail(self, call: int, error: InferenceError) -> None:
        """End a request with an error."""
        self.links[-1].send(InferenceKind.REFUSED, call, write_error(error))

    def _agree(self, channel: Channel, handshake: Handshake, frame: Frame) -> None:
        proof = handshake.take(frame)
        if proof is not None:
            channel.send(FleetKind.HELLO, NO_CALL, handshake.hello())
            channel.send(FleetKind.PROOF, NO_CALL, proof)
        if handshake.peer is not None and handshake.peer.link:
            channel.hand_over(self.bulk)
            self.bulk.open()
            self.send(FleetKind.BULK, b"")
        elif handshake.peer is not None:
            self.links.append(channel)
            self.bulk = BulkConnection(channel)
            self.copies = CopyChannel(self.bulk, self.kept.append, lambda: None)
            self.calls.clear()
            self.send(FleetKind.OFFERS, write_offers(self.offers))


@asynccontextmanager
async def listening() -> AsyncIterator[FakeReplica]:
    """A replica on a free port for the length of the block."""
    found = FakeReplica()
    server = await asyncio.get_running_loop().create_server(found.accept, "127.0.0.1", 0)
    found.port = server.sockets[0].getsockname()[1]
    try:
        yield found
    finally:
        server.close()
        found.lose()
        if found.links:
            found.bulk.abort()


def offered(config: ModelConfig, version: int = 1, trouble: str = "") -> ModelOffer:
    """The offer of a model of that configuration."""
    return ModelOffer(config.name, version, to_text(config), {}, (), 0, trouble)


async def until(condition: Callable[[], bool]) -> None:
    """Poll until the condition holds."""

    async def poll() -> None:
        while not condition():  # noqa: ASYNC110 - the other end of a socket
            await asyncio.sleep(0.002)

    await soon(poll())
