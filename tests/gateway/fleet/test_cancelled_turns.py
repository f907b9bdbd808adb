"""Cancelled turns of a conversation: its replica remembers what the client has got."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway.fleet.call import ReplicaCall
from tests.builders import ScriptedInstance, soon, text_response
from tests.conftest import Serve
from tests.gateway.conversations.chats import CHAT, assistant, turn, user
from tests.gateway.fleet.chatting import SAID, Fleet, chatting, heard, is_over
from tests.gateway.fleet.fake_replica import until
from tests.gateway.fleet.routing import text


@pytest.fixture
async def fleet(tmp_path: Path, serve: Serve) -> AsyncIterator[Fleet]:
    instance = ScriptedInstance()
    async with chatting(tmp_path, instance, serve(instance, config=CHAT)) as found:
        yield found


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
    got = await heard(stream)
    expected = [user("one"), assistant(got)]

    def is_kept() -> bool:
        kept = [each for each in fleet.other.kept if each.correlation_id == conversation]
        return bool(kept) and json.loads(b"[%b]" % kept[-1].messages) == expected

    await until(is_kept)
    assert len(fleet.other.kept) == 1


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
