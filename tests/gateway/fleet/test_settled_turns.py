"""Ended turns of a conversation: their replica settles them once the router has left them."""

import asyncio
import gc
import json
import weakref
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from gateway.fleet import connection, copies
from gateway.fleet import instance as fleet_instance
from gateway.fleet.handshake import Hello
from gateway.fleet.replica import RouterLink
from gateway.messages import InferResponse, SequenceTag
from gateway.processes.request_terms import Routing
from gateway.rollouts.choice import VersionChoice
from gateway.stream import INTERRUPTED
from gateway.tensor import Datatype, Tensor, text_tensor
from tests.builders import ScriptedInstance, soon, text_response
from tests.conftest import Serve
from tests.gateway.conversations.chats import CHAT, assistant, chat, told, turn, user
from tests.gateway.fleet.chatting import COUNT, SAID, Fleet, chatting, heard, is_over
from tests.gateway.fleet.fake_replica import listening, offered, until
from tests.gateway.fleet.routing import routing, text


@pytest.fixture
async def fleet(tmp_path: Path, serve: Serve) -> AsyncIterator[Fleet]:
    instance = ScriptedInstance()
    async with chatting(tmp_path, instance, serve(instance, config=CHAT)) as found:
        yield found


def link(fleet: Fleet) -> RouterLink:
    """The connection of the router at the replica."""
    (found,) = fleet.port.agreed()
    return found


def copied(fleet: Fleet) -> str:
    """The first answer in the only copy."""
    (copy,) = fleet.other.kept
    answer = json.loads(b"[%b]" % copy.messages)[1]
    assert answer == assistant(answer["content"])
    found: str = answer["content"]
    return found


@pytest.mark.parametrize("kib", [1, 300, 4096])
async def test_a_copy_of_any_size_is_sent_once_the_router_has_left_the_turn(
    fleet: Fleet, kib: int
) -> None:
    conversation, first, execution = await fleet.begin()
    first.close()
    await until(lambda: bool(fleet.other.kept))
    fleet.other.kept.clear()
    large = turn("x" * (kib << 10), conversation, start=True)
    stream = fleet.routed.dataplane.infer(large)
    execution = await fleet.instance.begun()
    await fleet.said(execution, ends=True)
    await asyncio.sleep(0.05)
    assert fleet.other.kept == []
    got = await heard(stream)
    await until(lambda: bool(fleet.other.kept))
    assert copied(fleet) == got
    assert await fleet.remembered(conversation, "x" * (kib << 10)) == got


async def test_a_turn_that_is_read_to_its_end_is_settled(fleet: Fleet) -> None:
    _, stream, execution = await fleet.begin()
    execution.finish("eins")
    with stream:
        await soon(stream.only())
    await until(lambda: bool(fleet.other.kept))
    assert copied(fleet) == "eins"
    await until(lambda: link(fleet).is_idle)


async def test_an_ended_turn_that_is_not_settled_holds_none_of_its_responses(fleet: Fleet) -> None:
    _, stream, execution = await fleet.begin()
    (answer,) = link(fleet).answers
    kept = weakref.ref(answer)
    del answer
    await fleet.said(execution, ends=True)
    gc.collect()
    assert kept() is None
    assert not link(fleet).is_idle
    await heard(stream)


@is_over
async def test_a_draining_replica_copies_its_ended_turns_and_waits_for_their_cuts(
    fleet: Fleet, ends: bool
) -> None:
    _, stream, execution = await fleet.begin()
    await fleet.said(execution, ends=ends)
    link(fleet).finish(60.0)
    if not ends:
        execution.finish("")
    await until(lambda: bool(fleet.other.kept))
    assert copied(fleet) == SAID
    fleet.other.kept.clear()
    got = await heard(stream)
    await until(lambda: not fleet.port.links)
    await until(lambda: bool(fleet.other.kept))
    assert copied(fleet) == got
    assert len(got) < len(SAID)


async def test_a_draining_replica_copies_a_turn_that_is_read_after_all_once(fleet: Fleet) -> None:
    _, stream, execution = await fleet.begin()
    await fleet.said(execution, ends=True)
    link(fleet).finish(60.0)
    while await soon(stream.batch()):
        pass
    await until(lambda: not fleet.port.links)
    await until(lambda: bool(fleet.other.kept))
    assert copied(fleet) == SAID


async def test_an_ended_turn_is_copied_before_its_replica_disconnects_at_its_limit(
    fleet: Fleet,
) -> None:
    _, stream, execution = await fleet.begin()
    await fleet.said(execution, ends=True)
    link(fleet).finish(0.2)
    await until(lambda: not fleet.port.links)
    assert copied(fleet) == SAID
    while await soon(stream.batch()):
        pass


@is_over
async def test_of_a_lost_router_turns_that_had_ended_are_remembered(
    fleet: Fleet, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "FIRST_PAUSE_SECS", 0.01)
    conversation, stream, execution = await fleet.begin()
    execution.finish("eins")
    with stream:
        await soon(stream.only())
    await until(lambda: bool(fleet.other.kept))
    with fleet.routed.dataplane.infer(turn("two", conversation)) as stream:
        execution = await fleet.instance.begun()
        await fleet.said(execution, ends=ends)
        lost = link(fleet)
        lost.channel.abort()
        await until(lambda: lost not in fleet.port.links and fleet.dataplane.in_flight == 0)
    fleet.other.offer()
    await until(lambda: bool(fleet.port.agreed()))
    (own,) = [each for each in fleet.routed.router.connections if fleet.is_own(each)]
    await until(lambda: own.serves(("chat", 1)))
    fleet.instance.executions.clear()
    with fleet.routed.dataplane.infer(turn("three", conversation)) as stream:
        execution = await fleet.instance.begun()
        execution.finish("drei")
        await soon(stream.only())
    second = [user("two"), assistant(SAID)] if ends else []
    assert told(execution) == [user("one"), assistant("eins"), *second, user("three")]


async def test_a_draining_replica_copies_a_turn_again_that_there_was_no_room_for(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "MOST_BYTES_UNDER_WAY", 10)
    _, stream, execution = await fleet.begin()
    await fleet.said(execution, ends=True)
    link(fleet).finish(60.0)
    await until(lambda: bool(fleet.other.kept))
    assert fleet.other.kept.pop().messages == b""
    monkeypatch.setattr(copies, "MOST_BYTES_UNDER_WAY", 10_000)
    while await soon(stream.batch()):
        pass
    await until(lambda: bool(fleet.other.kept))
    assert copied(fleet) == SAID


async def test_the_request_of_a_lost_router_is_cancelled_in_its_backend(fleet: Fleet) -> None:
    _, stream, execution = await fleet.begin()
    cancellation, told = execution.requests[0].cancellation, asyncio.Event()
    assert cancellation is not None
    cancellation.subscribe(told.set)
    link(fleet).channel.abort()
    await soon(told.wait())
    assert cancellation.cancelled
    stream.close()


async def test_a_draining_replica_without_copies_disconnects_behind_its_turns(
    tmp_path: Path, serve: Serve
) -> None:
    instance = ScriptedInstance()
    config = chat(conversation_copies=0)
    async with chatting(tmp_path, instance, serve(instance, config=config)) as fleet:
        _, stream, execution = await fleet.begin()
        await fleet.said(execution, ends=True)
        link(fleet).finish(60.0)
        await heard(stream)
        await until(lambda: not fleet.port.links)
    assert fleet.other.kept == []


async def test_for_a_router_of_an_earlier_release_a_turn_is_settled_at_its_end(
    tmp_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Hello, "settles", property(lambda _: False))
    instance = ScriptedInstance()
    async with chatting(tmp_path, instance, serve(instance, config=CHAT)) as fleet:
        _, stream, execution = await fleet.begin()
        with stream:
            await fleet.said(execution, ends=True)
            await until(lambda: bool(fleet.other.kept))
            assert copied(fleet) == SAID
            await until(lambda: link(fleet).is_idle)


async def test_a_router_leaves_the_calls_of_ended_turns_only(tmp_path: Path) -> None:
    turns = []
    async with listening() as replica:
        replica.offer(offered(CHAT))
        async with routing(tmp_path, replica) as routed:
            for sequence in (None, SequenceTag(0), SequenceTag(1, start=True)):
                request = replace(turn("one"), sequence=sequence)
                with routed.dataplane.infer(request) as stream:
                    await until(lambda: bool(replica.calls))
                    turns = [replica.calls.pop()]
                    replica.answer(turns[0], "eins")
                    await soon(stream.only())
            await until(lambda: bool(replica.gone))
            await until(lambda: replica.gone[-1] == turns[0])
    assert replica.gone == turns


async def test_a_replica_waits_for_nothing_behind_a_request_that_is_no_turn(fleet: Fleet) -> None:
    while not fleet.instance.executions:
        request = replace(turn("one"), sequence=SequenceTag(0))
        with fleet.routed.dataplane.infer(request) as stream:
            await until(lambda: bool(fleet.instance.executions or fleet.other.calls))
            if fleet.instance.executions:
                (await fleet.instance.begun()).finish("eins")
            else:
                fleet.other.answer(fleet.other.calls.pop(), "eins")
            await soon(stream.only())
    await until(lambda: link(fleet).is_idle)


async def test_only_texts_that_a_slow_client_has_got_are_remembered(fleet: Fleet) -> None:
    conversation, stream, execution = await fleet.begin()
    for number in range(COUNT):
        execution.answer(text_response(f"{number} " + "z" * 5000))
    await until(lambda: execution.taken > 100)
    found: list[InferResponse] = []
    for _ in range(2):
        found += await soon(stream.batch())
        await asyncio.sleep(0.05)
    assert stream.interrupt()
    while responses := await soon(stream.batch()):
        found += responses
    assert found.pop() is INTERRUPTED
    await until(lambda: fleet.dataplane.in_flight == 0)
    assert len(found) < COUNT
    assert await fleet.remembered(conversation) == b"".join(map(text, found)).decode()


async def test_texts_of_another_output_do_not_count(fleet: Fleet) -> None:
    conversation, stream, execution = await fleet.begin()
    execution.answer(text_response("0 "))
    await soon(stream.batch())
    for _ in range(3):
        execution.answer(InferResponse(outputs=(text_tensor("thoughts", ["z" * 500]),)))
    await until(lambda: execution.taken > 3)
    await fleet.said(execution, ends=False)
    found: list[InferResponse] = []
    assert stream.interrupt()
    while responses := await soon(stream.batch()):
        found += responses
    assert found.pop() is INTERRUPTED
    await until(lambda: fleet.dataplane.in_flight == 0)
    names = [each.outputs[0].name for each in found]
    assert names.count("thoughts") == 3
    got = b"0 " + b"".join(text(each) for each in found if each.output("text_output"))
    assert await fleet.remembered(conversation) == got.decode()


async def test_an_answer_that_is_not_utf8_is_cut_where_its_client_has_got_it(fleet: Fleet) -> None:
    conversation, stream, execution = await fleet.begin()
    said = b"caf\xe9 caf\xe9 caf\xe9 end"
    output = Tensor("text_output", Datatype.BYTES, (1,), (said,))
    execution.answer(InferResponse(outputs=(output,)))
    (first,) = await soon(stream.batch())
    assert text(first) == said
    assert stream.interrupt()
    await until(lambda: fleet.dataplane.in_flight == 0)
    assert await fleet.remembered(conversation) == said.decode("utf-8", "replace")


@pytest.mark.parametrize("version", ["1", "2"])
async def test_a_turn_at_the_version_of_its_conversation_is_cut_with_any_choice_of_its_router(
    tmp_path: Path, serve: Serve, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def chosen(own: str, *terms: object) -> Routing:
        return Routing(own, *terms[:2], True)  # type: ignore[arg-type]

    monkeypatch.setattr(fleet_instance, "Routing", chosen)
    instance = ScriptedInstance()
    stable = serve(instance, config=CHAT)
    candidate = serve(ScriptedInstance(), config=CHAT)
    candidate.version = "2"
    async with chatting(tmp_path, instance, stable, candidate) as fleet:
        choice = VersionChoice(stable, candidate, fleet.dataplane.conversations)
        choice.weight = 50.0
        stable.chooser = candidate.chooser = choice
        conversation, first, execution = await fleet.begin("1")
        execution.finish("null")
        with first:
            await soon(first.only())
        await until(lambda: bool(fleet.other.kept))
        ask = partial(turn, conversation=conversation, version=version)
        stream = fleet.routed.dataplane.infer(ask("two"))
        await fleet.said(await instance.begun(), ends=True)
        got = await heard(stream)
        await until(lambda: len(fleet.other.kept) == 2)
        copy = fleet.other.kept[-1]
        assert (copy.version, copy.turns) == (1, 2)
        assert json.loads(b"[%b]" % copy.messages)[3] == assistant(got)
        with fleet.routed.dataplane.infer(ask("three")) as stream:
            execution = await instance.begun()
            execution.finish("drei")
            await soon(stream.only())
        assert told(execution)[2:4] == [user("two"), assistant(got)]
