"""Copies of conversations that another version continues, after a promotion or a roll-back."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import pytest

from gateway.conversations.copies import ConversationCopy
from gateway.messages import SequenceTag
from gateway.models.model import Model
from gateway.stream import ResponseStream
from tests.builders import Execution, ScriptedInstance, soon
from tests.conftest import Serve
from tests.gateway.conversations.chats import CHAT, assistant, turn, user
from tests.gateway.fleet.chatting import SAID, Fleet, chatting, heard
from tests.gateway.fleet.fake_replica import offered, until


class Promotion(NamedTuple):
    """A fleet with two versions, and a second turn that is under way at the first one."""

    fleet: Fleet
    versions: tuple[Model, Model]
    conversation: int
    stream: ResponseStream
    execution: Execution

    def move(self) -> None:
        """Let the second version continue the conversations of the first one."""
        self.fleet.dataplane.conversations.move(*self.versions)

    async def copy(self) -> ConversationCopy:
        """The copy after the second turn."""
        await until(lambda: len(self.fleet.other.kept) > 1)
        found = self.fleet.other.kept[-1]
        assert len(self.fleet.other.kept) == 2
        return found


@pytest.fixture
async def promotion(tmp_path: Path, serve: Serve) -> AsyncIterator[Promotion]:
    instance = ScriptedInstance()
    stable, candidate = serve(instance, config=CHAT), serve(ScriptedInstance(), config=CHAT)
    candidate.version = "2"
    async with chatting(tmp_path, instance, stable, candidate) as fleet:
        fleet.other.offer(offered(CHAT), offered(CHAT, 2))
        connections = fleet.routed.router.connections
        await until(lambda: all(each.serves(("chat", 2)) for each in connections))
        conversation, stream, execution = await fleet.begin("1")
        execution.finish("eins")
        with stream:
            await soon(stream.only())
        await until(lambda: bool(fleet.other.kept))
        with fleet.routed.dataplane.infer(turn("two", conversation, version="1")) as stream:
            execution = await instance.begun()
            yield Promotion(fleet, (stable, candidate), conversation, stream, execution)


def said(copy: ConversationCopy) -> list[object]:
    """The messages of a copy."""
    found: list[object] = json.loads(b"[%b]" % copy.messages)
    return found


async def test_a_turn_during_which_its_conversation_moves_is_copied_at_the_other_version(
    promotion: Promotion,
) -> None:
    promotion.move()
    promotion.execution.finish("zwei")
    await soon(promotion.stream.only())
    copy = await promotion.copy()
    assert (copy.version, copy.turns) == (2, 2)
    assert said(copy) == [user("one"), assistant("eins"), user("two"), assistant("zwei")]


async def test_an_ended_turn_whose_conversation_moves_is_cut_and_copied_at_the_other_version(
    promotion: Promotion,
) -> None:
    await promotion.fleet.said(promotion.execution, ends=True)
    promotion.move()
    got = await heard(promotion.stream)
    assert len(got) < len(SAID)
    copy = await promotion.copy()
    assert (copy.version, copy.turns) == (2, 2)
    assert said(copy)[3] == assistant(got)


async def test_a_conversation_that_is_known_at_both_versions_is_copied_at_its_own(
    promotion: Promotion,
) -> None:
    fleet, (_, candidate), conversation = promotion[:3]
    other = fleet.dataplane.infer(turn("other", conversation, start=True, version="2"))
    promotion.move()
    promotion.execution.finish("zwei")
    await soon(promotion.stream.only())
    assert (await promotion.copy()).version == 1
    assert fleet.dataplane.conversations.has(candidate, SequenceTag(conversation))
    other.close()


async def test_a_turn_that_has_ended_at_once_with_its_conversation_makes_the_copy_void(
    promotion: Promotion,
) -> None:
    promotion.stream.close()
    port, (stable, _) = promotion.fleet.port, promotion.versions
    kept: list[ConversationCopy] = []

    def send(copy: ConversationCopy) -> bool:
        kept.append(copy)
        return True

    assert port.copies.turn(stable, SequenceTag(promotion.conversation + 1)).settle(b"", send)
    (copy,) = kept
    assert (copy.version, copy.turns, copy.messages) == (1, 0, b"")


async def test_a_turn_of_a_version_that_is_unloaded_meanwhile_leaves_the_copy_as_it_is(
    promotion: Promotion,
) -> None:
    await promotion.fleet.said(promotion.execution, ends=True)
    await promotion.versions[0].close()
    await heard(promotion.stream)
    (link,) = promotion.fleet.port.agreed()
    await until(lambda: link.is_idle)
    assert len(promotion.fleet.other.kept) == 1
