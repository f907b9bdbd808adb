"""The port of a replica whose requests a test answers, and calls of routers with large tensors."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from gateway.errors import Code, InferenceError
from gateway.fleet.call import ReplicaCall
from gateway.fleet.choice import ANY_REQUEST, ReplicaState
from gateway.fleet.connection import ReplicaConnection
from gateway.fleet.handshake import FleetRole, Identity
from gateway.fleet.offers import Key, Offers, write_offers
from gateway.fleet.prefixes import KeyIndex
from gateway.fleet.prompts import PrefixIndexes
from gateway.fleet.replica import FleetPort
from gateway.messages import InferRequest, InferResponse
from gateway.observability.trace import Trace
from gateway.observability.tracer import Tracer
from gateway.processes.inference_messages import write_request
from gateway.server import Listeners
from gateway.settings import FleetSettings
from gateway.stream import ResponseStream
from gateway.tensor import Datatype, Tensor
from tests.builders import TEXT, soon
from tests.gateway.fleet.fake_replica import offered, until

KEY: Key = ("text", 1)
LARGE = 600_000


def numbers(size: int = LARGE, name: str = "n") -> Tensor:
    data = bytes(range(256)) * (size // 256) + bytes(size % 256)
    return Tensor(name, Datatype.UINT8, (size,), data)


def texts(*elements: bytes) -> Tensor:
    return Tensor("t", Datatype.BYTES, (len(elements),), elements)


def request(*inputs: Tensor, **fields: Any) -> InferRequest:
    return InferRequest(model="text", version="1", inputs=inputs, **fields)


def message(*tensors: Tensor) -> bytes:
    """A request without its large tensors."""
    return write_request(request(*tensors), large=[])


@dataclass
class Replica:
    """The port of a replica; a test answers the requests on their streams."""

    port: FleetPort
    asked: list[InferRequest] = field(default_factory=list)
    streams: list[ResponseStream] = field(default_factory=list)

    def infer(self, request: InferRequest, trace: Trace | None) -> ResponseStream:
        """Take a request."""
        self.asked.append(request)
        self.streams.append(ResponseStream())
        return self.streams[-1]

    async def request(self, count: int = 1) -> InferRequest:
        """The request of that count."""
        await until(lambda: len(self.asked) >= count)
        return self.asked[count - 1]

    @property
    def answers(self) -> int:
        """The number of answers under way."""
        return sum(len(each.answers) for each in self.port.links)


@asynccontextmanager
async def listening_port() -> AsyncIterator[Replica]:
    """A replica on a free port for the length of the block."""
    changed = asyncio.Event()

    def unknown(*_: object) -> None:
        raise InferenceError(Code.NOT_FOUND, "no load is announced")

    dataplane: Any = SimpleNamespace(changed=changed.wait, model=unknown, tracer=Tracer())
    port = FleetPort(SimpleNamespace(dataplane=dataplane), Listeners(), FleetSettings(port=0))  # type: ignore[arg-type]
    found = Replica(port)
    dataplane.infer = found.infer
    offers = write_offers(Offers(ReplicaState.READY, (offered(TEXT),)))
    port.offers = lambda: offers  # type: ignore[method-assign]
    await port.bind()
    async with asyncio.TaskGroup() as tasks:
        await port.open(tasks)
        yield found
        port.stop_accepting(tasks, 0.01)
        port.stop_waiting(tasks, 0.01)


@asynccontextmanager
async def connecting(port: int) -> AsyncIterator[ReplicaConnection]:
    """A router's connection to a replica, which serves."""
    identity = Identity("sluice", FleetRole.ROUTER)
    indexes = PrefixIndexes(KeyIndex)
    found = ReplicaConnection("127.0.0.1", port, identity, lambda: None, indexes)
    task = asyncio.create_task(found.run())
    try:
        await until(lambda: found.serves(KEY))
        yield found
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


class Call:
    """A call of a router, and what has arrived."""

    def __init__(self, router: ReplicaConnection, asked: InferRequest) -> None:
        self._news = asyncio.Event()
        self.call: ReplicaCall = router.call(KEY, asked, self._news.set, ANY_REQUEST)

    async def next(self) -> InferResponse | None:
        """The next response; None after the last."""

        async def found() -> InferResponse | None:
            while (response := self.call.take()) is None and not self.call.is_over:
                self._news.clear()
                await self._news.wait()
            return response

        return await soon(found())

    async def rest(self) -> list[InferResponse]:
        """The responses up to the last, after which the call is left."""
        responses = []
        while (response := await self.next()) is not None:
            responses.append(response)
        self.call.leave()
        return responses


async def completes(router: ReplicaConnection, replica: Replica) -> None:
    """A large request and its answer pass."""
    call = Call(router, request(numbers()))
    await replica.request(count := len(replica.asked) + 1)
    replica.streams[count - 1].put(InferResponse(outputs=(numbers(),), final=True))
    (response,) = await call.rest()
    assert response.outputs[0].raw() == numbers().raw()
