"""A chat model at a replica of a router: its turns, and their text that a client has got."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from gateway.dataplane import DataPlane
from gateway.fleet.choice import ReplicaState
from gateway.fleet.connection import ReplicaConnection
from gateway.fleet.offers import Offers, write_offers
from gateway.fleet.replica import FleetPort
from gateway.messages import InferResponse
from gateway.models.model import Model
from gateway.observability.tracer import Tracer
from gateway.server import Listeners
from gateway.settings import FleetSettings
from gateway.stream import INTERRUPTED, ResponseStream
from tests.builders import Execution, ScriptedInstance, soon, text_response
from tests.gateway.conversations.chats import CHAT, assistant, dataplane_of, told, turn, user
from tests.gateway.fleet.fake_replica import FakeReplica, listening, offered, until
from tests.gateway.fleet.routing import Routed, routing, text

COUNT = 200
"""Responses of a turn: more than a stream has room for."""
SAID = "".join(f"{number} " for number in range(COUNT))

is_over = pytest.mark.parametrize("ends", [False, True], ids=["running", "ended"])
"""Whether the turn has ended at the replica when its client or its router leaves it."""


class Fleet(NamedTuple):
    """A router; a replica whose model answers as the test says, and one that the test drives."""

    routed: Routed
    dataplane: DataPlane
    instance: ScriptedInstance
    other: FakeReplica
    port: FleetPort

    def is_own(self, connection: ReplicaConnection) -> bool:
        """Whether it is the router's connection to the first replica."""
        return connection.address == f"127.0.0.1:{self.port.ports['fleet']}"

    async def begin(self, version: str = "") -> tuple[int, ResponseStream, Execution]:
        """Begin conversations until one is at the replica: its id, its stream and its execution."""
        for conversation in range(1, 50):
            stream = self.routed.dataplane.infer(
                turn("one", conversation, start=True, version=version)
            )
            await until(lambda: bool(self.instance.executions or self.other.calls))
            if self.instance.executions:
                return conversation, stream, await self.instance.begun()
            self.other.answer(self.other.calls.pop(), "elsewhere")
            await soon(stream.only())
            stream.close()
        raise AssertionError("no conversation is at the replica")

    async def said(self, execution: Execution, *, ends: bool) -> None:
        """Let the model say more than the router passes on."""
        for number in range(COUNT):
            execution.answer(text_response(f"{number} "))
            await until(lambda number=number: execution.taken > number)
        if ends:
            execution.finish("")
            await until(lambda: self.dataplane.in_flight == 0)

    async def remembered(self, conversation: int, said: str = "one") -> str:
        """The answer of the first turn that the model is given in the second one."""
        with self.routed.dataplane.infer(turn("two", conversation)) as stream:
            execution = await self.instance.begun()
            execution.finish("zwei")
            await soon(stream.only())
        first, answer, second = told(execution)
        assert (first, second) == (user(said), user("two"))
        assert answer == assistant(answer["content"])
        return answer["content"]


@asynccontextmanager
async def chatting(
    folder: Path, instance: ScriptedInstance, *versions: Model
) -> AsyncIterator[Fleet]:
    """A fleet whose first replica has these versions; the instance is that of version 1."""
    changed, dataplane = asyncio.Event(), dataplane_of(*versions)
    hosted: Any = SimpleNamespace(
        changed=changed.wait,
        model=dataplane.model,
        infer=dataplane.infer,
        conversations=dataplane.conversations,
        tracer=Tracer(),
    )
    port = FleetPort(SimpleNamespace(dataplane=hosted), Listeners(), FleetSettings(port=0))  # type: ignore[arg-type]
    own = tuple(offered(CHAT, int(each.version)) for each in versions)
    offers = write_offers(Offers(ReplicaState.READY, own))
    port.offers = lambda: offers  # type: ignore[method-assign]
    await port.bind()
    async with listening() as other, asyncio.TaskGroup() as tasks:
        other.offer(offered(CHAT))
        await port.open(tasks)
        async with routing(folder, SimpleNamespace(port=port.ports["fleet"]), other) as routed:
            yield Fleet(routed, dataplane, instance, other, port)
        port.stop_accepting(tasks, 0.01)
        port.stop_waiting(tasks, 0.01)


async def heard(stream: ResponseStream) -> str:
    """The text that the client of an interrupted request gets."""
    assert stream.interrupt()
    found: list[InferResponse] = []
    while responses := await soon(stream.batch()):
        found += responses
    assert found.pop() is INTERRUPTED
    return "".join(text(each).decode() for each in found)
