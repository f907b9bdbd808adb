"""Cancelled turns of a conversation: its replica remembers what the client has got."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from gateway.dataplane import DataPlane
from gateway.fleet import replica
from gateway.fleet.call import ReplicaCall
from gateway.fleet.choice import ReplicaState
from gateway.fleet.offers import Offers, write_offers
from gateway.fleet.replica import FleetPort
from gateway.messages import InferResponse
from gateway.observability.tracer import Tracer
from gateway.server import Listeners
from gateway.settings import FleetSettings
from gateway.stream import INTERRUPTED, ResponseStream
from tests.builders import Execution, ScriptedInstance, soon, text_response
from tests.conftest import Serve
from tests.gateway.conversations.chats import CHAT, assistant, dataplane_of, told, turn, user
from tests.gateway.fleet.fake_replica import FakeReplica, listening, offered, until
from tests.gateway.fleet.routing import Routed, routing, text

COUNT = 200
"""Responses of a turn: more than a stream has room for."""
SAID = "".join(f"{number} " for number in range(COUNT))


class Fleet(NamedTuple):
    """A router; a replica whose model answers as the test says, and one that the test drives."""

    routed: Routed
    dataplane: DataPlane
    instance: ScriptedInstance
    other: FakeReplica

    async def begin(self) -> tuple[int, ResponseStream, Execution]:
        """Begin conversations until one is at the replica: its id, its stream and its execution."""
        for conversation in range(1, 50):
            stream = self.routed.dataplane.infer(turn("one", conversation, start=True))
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

    async def remembered(self, conversation: int) -> str:
        """The answer of the first turn that the model is given in the second one."""
        with self.routed.dataplane.infer(turn("two", conversation)) as stream:
            execution = await self.instance.begun()
            execution.finish("zwei")
            await soon(stream.only())
        first, answer, second = told(execution)
        assert (first, second) == (user("one"), user("two"))
        assert answer == assistant(answer["content"])
        return answer["content"]


@pytest.fixture
async def fleet(tmp_path: Path, serve: Serve) -> AsyncIterator[Fleet]:
    instance, changed = ScriptedInstance(), asyncio.Event()
    dataplane = dataplane_of(serve(instance, config=CHAT))
    hosted: Any = SimpleNamespace(
        changed=changed.wait,
        model=dataplane.model,
        infer=dataplane.infer,
        conversations=dataplane.conversations,
        tracer=Tracer(),
    )
    port = FleetPort(SimpleNamespace(dataplane=hosted), Listeners(), FleetSettings(port=0))  # type: ignore[arg-type]
    offers = write_offers(Offers(ReplicaState.READY, (offered(CHAT),)))
    port.offers = lambda: offers  # type: ignore[method-assign]
    await port.bind()
    async with listening() as other, asyncio.TaskGroup() as tasks:
        other.offer(offered(CHAT))
        await port.open(tasks)
        async with routing(tmp_path, SimpleNamespace(port=port.ports["fleet"]), other) as routed:
            yield Fleet(routed, dataplane, instance, other)
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


is_over = pytest.mark.parametrize("ends", [False, True], ids=["running", "ended"])
"""Whether the turn has ended at the replica when its client cancels it."""


@is_over
async def test_a_turn_cancelled_by_id_is_remembered_as_the_client_has_got_it(
    fleet: Fleet, ends: bool
) -> None:
    conversation, stream, execution = await fleet.begin()
    await fleet.said(execution, ends=ends)
    got = await heard(stream)
    assert SAID.startswith(got)
    assert 0 < len(got) < len(SAID)
    await soon(execution.stopped.wait())
    await until(lambda: fleet.dataplane.in_flight == 0)
    assert await fleet.remembered(conversation) == got


@is_over
async def test_a_turn_that_its_client_leaves_is_remembered_as_the_router_has_passed_it_on(
    fleet: Fleet, ends: bool
) -> None:
    conversation, stream, execution = await fleet.begin()
    execution.answer(text_response("first "))
    (first,) = await soon(stream.batch())
    assert text(first) == b"first "
    await fleet.said(execution, ends=ends)
    stream.close()
    await until(lambda: fleet.dataplane.in_flight == 0)
    found = await fleet.remembered(conversation)
    assert ("first " + SAID).startswith(found)
    assert len("first ") < len(found) < len(SAID)


@is_over
async def test_the_copy_of_a_cancelled_turn_is_cut_as_well(fleet: Fleet, ends: bool) -> None:
    conversation, stream, execution = await fleet.begin()
    await fleet.said(execution, ends=ends)
    if ends:
        await until(lambda: bool(fleet.other.kept))
    got = await heard(stream)
    expected = [user("one"), assistant(got)]

    def is_kept() -> bool:
        kept = [each for each in fleet.other.kept if each.correlation_id == conversation]
        return bool(kept) and json.loads(b"[%b]" % kept[-1].messages) == expected

    await until(is_kept)
    voids = [not each.messages for each in fleet.other.kept]
    assert voids == ([False, True, False] if ends else [False])


async def test_a_waiting_turn_that_is_cancelled_cuts_nothing(fleet: Fleet) -> None:
    conversation, stream, execution = await fleet.begin()
    with stream:
        waiting = fleet.routed.dataplane.infer(turn("waits", conversation))
        await until(lambda: fleet.dataplane.in_flight == 2)
        waiting.interrupt()
        await until(lambda: fleet.dataplane.in_flight == 1)
        execution.finish("eins")
        await soon(stream.only())
    assert await fleet.remembered(conversation) == "eins"


async def test_a_turn_that_has_ended_is_remembered_whole(fleet: Fleet) -> None:
    conversation, stream, execution = await fleet.begin()
    with stream:
        execution.answer(text_response("eins"))
        execution.finish(" zwei")
        await soon(stream.batch())
        await until(lambda: stream.done)
    assert await fleet.remembered(conversation) == "eins zwei"


@pytest.mark.parametrize("payload", [b"", b"odd"], ids=["of an earlier release", "malformed"])
async def test_a_router_that_does_not_say_what_it_has_passed_on_cuts_nothing(
    fleet: Fleet, payload: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ReplicaCall, "_farewell", lambda _: payload)
    conversation, stream, execution = await fleet.begin()
    await fleet.said(execution, ends=False)
    stream.close()
    await until(lambda: fleet.dataplane.in_flight == 0)
    assert await fleet.remembered(conversation) == SAID
    assert "frame not handled" not in caplog.text


async def test_the_ended_turns_whose_answers_may_be_cut_are_bounded(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica, "MOST_TURNS", 1)
    conversation, stream, execution = await fleet.begin()
    await fleet.said(execution, ends=True)
    for number in range(100, 200):
        other = fleet.routed.dataplane.infer(turn("other", number, start=True))
        await until(lambda: len(fleet.instance.executions) > 1 or bool(fleet.other.calls))
        is_here = not fleet.other.calls
        if is_here:
            (await fleet.instance.begun()).finish("x")
        else:
            fleet.other.answer(fleet.other.calls.pop(), "x")
        await soon(other.only())
        if is_here:
            break
    await heard(stream)
    assert await fleet.remembered(conversation) == SAID
