"""Copies of conversations at another server: which continue, which are kept, and their room."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
import pytest

from gateway.conversations.conversations import Conversations
from gateway.conversations.copies import ConversationCopy
from gateway.conversations.history import ByteLimits
from gateway.dataplane import DataPlane
from gateway.errors import Code, InferenceError
from gateway.messages import SequenceTag
from gateway.models.limits import NS_PER_SECOND
from gateway.models.model import Model
from tests.builders import ScriptedInstance, read_all, soon, text_response
from tests.conftest import Serve
from tests.gateway.conversations.chats import (
    Talk,
    assistant,
    chat,
    dataplane_of,
    interrupted,
    refusal,
    turn,
    user,
)

SAID = (user("one"), assistant("eins"))
MESSAGES = b'{"role":"user","content":"x"}'


class There:
    """Another server with the same model."""

    def __init__(self, serve: Serve, **parameters: object) -> None:
        self.instance = ScriptedInstance()
        self.model = serve(self.instance, config=chat(**parameters))
        self.dataplane = dataplane_of(self.model)
        self.talk = Talk(self.dataplane, self.instance)

    def keep(self, copy: ConversationCopy | None) -> None:
        """Keep a copy of the first server."""
        assert copy is not None
        self.dataplane.conversations.keep(self.model, copy)

    @property
    def byte_size(self) -> int:
        """The size of its conversations and copies."""
        return self.dataplane.conversations.byte_size


@pytest.fixture
async def there(serve: Serve) -> There:
    return There(serve)


def copy_of(dataplane: DataPlane, conversation: int = 1, **tag: Any) -> ConversationCopy:
    """The present copy of a conversation."""
    model = dataplane.model("chat")
    found = dataplane.conversations.copy(model, SequenceTag(conversation, **tag))
    assert found is not None
    return found


def made(number: int = 1, *, turns: int = 1, size: int = len(MESSAGES)) -> ConversationCopy:
    """A copy of a conversation that began at second 1."""
    messages = MESSAGES.ljust(size)
    return ConversationCopy("chat", 1, "", number, NS_PER_SECOND, turns, 7, messages)


async def test_a_conversation_continues_with_its_copy_and_so_does_the_copy_of_that(
    talk: Talk, dataplane: DataPlane, there: There
) -> None:
    await talk.say("one", "eins", start=True)
    there.keep(copy_of(dataplane))
    assert await there.talk.say("two", "zwei") == [*SAID, user("two")]
    back = copy_of(there.dataplane)
    assert back.turns == 2
    dataplane.conversations.keep(dataplane.model("chat"), back)
    expected = [*SAID, user("two"), assistant("zwei"), user("three")]
    assert await talk.say("three", "drei") == expected


async def test_a_copy_has_the_tokens_and_turns_of_its_conversation(serve: Serve) -> None:
    there = There(serve, conversation_max_turns=3, conversation_max_tokens=8)
    there.keep(made(1, turns=3))
    assert "has had 3 turns" in refusal(there.dataplane, turn("x"))[1]
    there.keep(msgspec.structs.replace(made(2), tokens=8))
    assert "has 8 tokens" in refusal(there.dataplane, turn("x", 2))[1]
    there.keep(made(3))
    assert await there.talk.say("y", "z", 3) == [user("x"), user("y")]


async def test_a_copy_has_completed_turns_only(
    dataplane: DataPlane, instance: ScriptedInstance, there: There
) -> None:
    first = dataplane.infer(turn("one", start=True))
    second = dataplane.infer(turn("two"))
    assert copy_of(dataplane).messages == b""
    (await instance.begun()).finish("eins")
    await soon(read_all(first))
    there.keep(copy_of(dataplane))
    (await instance.begun()).crash(InferenceError(Code.INTERNAL, "broken"))
    with pytest.raises(InferenceError, match="broken"):
        await soon(read_all(second))
    assert copy_of(dataplane).turns == 1
    assert await there.talk.say("three", "drei") == [*SAID, user("three")]


async def test_a_cancelled_turn_is_copied_with_its_answer_so_far(
    dataplane: DataPlane, instance: ScriptedInstance
) -> None:
    with dataplane.infer(turn("one", start=True)) as stream:
        execution = await instance.begun()
        await interrupted(stream, execution, "ei")
        stream.close()
        assert b'"ei"' in copy_of(dataplane).messages
    await soon(execution.stopped.wait())


@pytest.mark.parametrize("order", [(1, 2), (2, 1), (2, 2)])
async def test_an_older_copy_does_not_replace_a_newer_one(
    there: There, order: tuple[int, int]
) -> None:
    for turns in order:
        there.keep(made(turns=turns, size=100 * turns))
    assert there.byte_size == 200
    assert await there.talk.say("y", "z") == [user("x"), user("y")]
    assert copy_of(there.dataplane).turns == 3


@pytest.mark.parametrize("turns", [1, 2, 3])
async def test_a_copy_without_messages_makes_no_newer_one_void(there: There, turns: int) -> None:
    there.keep(made(turns=2))
    there.keep(msgspec.structs.replace(made(turns=turns), messages=b""))
    assert (there.byte_size > 0) is (turns == 1)


async def test_a_copy_without_an_age_makes_all_of_its_conversation_void(there: There) -> None:
    there.keep(made(1))
    there.keep(made(2))
    there.keep(ConversationCopy("chat", 1, "", 1))
    assert there.byte_size == len(MESSAGES)


async def test_of_two_copies_of_one_age_the_later_one_is_kept(there: There) -> None:
    for size in (200, 100):
        there.keep(made(size=size))
    assert there.byte_size == 100


async def test_a_copy_of_a_conversation_that_began_later_replaces_one_with_more_turns(
    there: There,
) -> None:
    there.keep(made(turns=9))
    there.keep(msgspec.structs.replace(made(size=200), began_ns=2 * NS_PER_SECOND))
    assert there.byte_size == 200


async def test_a_copy_does_not_replace_a_conversation_with_as_many_turns_or_one_under_way(
    there: There,
) -> None:
    there.keep(made())
    await there.talk.say("y", "z")
    present = copy_of(there.dataplane)
    there.keep(made(turns=2))
    assert copy_of(there.dataplane) == present
    with there.dataplane.infer(turn("y")) as stream:
        execution = await there.instance.begun()
        there.keep(made(turns=9))
        execution.finish("z")
        await stream.batch()
    assert copy_of(there.dataplane).turns == 3
    there.keep(made(turns=9))
    assert await there.talk.say("y", "z") == [user("x"), user("y")]


async def test_a_conversation_that_has_ended_makes_its_copy_void(
    talk: Talk, dataplane: DataPlane, there: There
) -> None:
    await talk.say("one", "eins", start=True)
    there.keep(copy_of(dataplane))
    await talk.say("two", "zwei", end=True)
    there.keep(copy_of(dataplane))
    assert there.byte_size == 0
    assert "is not open" in refusal(there.dataplane, turn("three"))[1]


async def test_a_conversation_that_cannot_continue_has_no_copy(serve: Serve) -> None:
    here = There(serve)
    here.dataplane.conversations = Conversations(limits=ByteLimits(each=200, total=1000))
    await here.talk.say("one", "eins", start=True)
    assert copy_of(here.dataplane).messages
    with here.dataplane.infer(turn("two")) as stream:
        execution = await here.instance.begun()
        execution.answer(text_response("2" * 200))
        execution.end()
        await soon(read_all(stream))
    last = copy_of(here.dataplane)
    assert (last.messages, last.turns) == (b"", 1)


async def test_a_copy_is_that_of_its_tenant(there: There) -> None:
    there.keep(msgspec.structs.replace(made(), tenant="ours"))
    for tenant in ("", "theirs"):
        request = replace(turn("y"), sequence=SequenceTag(1, tenant=tenant))
        assert "is not open" in refusal(there.dataplane, request)[1]
    request = replace(turn("y"), sequence=SequenceTag(1, tenant="ours"))
    with there.dataplane.infer(request) as stream:
        (await there.instance.begun()).finish("z")
        await stream.batch()


async def test_a_conversation_that_begins_anew_drops_the_copy(there: There) -> None:
    there.keep(made(size=5000))
    assert await there.talk.say("y", "z", start=True) == [user("y")]
    assert there.byte_size < 100


@pytest.mark.parametrize("parameters", [{"conversation_copies": 0}, {"conversation_max": 0}])
async def test_a_model_without_copies_neither_makes_nor_keeps_one(
    serve: Serve, parameters: Mapping[str, int]
) -> None:
    there = There(serve, **parameters)
    there.keep(made())
    assert there.byte_size == 0
    with there.dataplane.infer(turn("y", start=True)) as stream:
        (await there.instance.begun()).finish("z")
        await stream.batch()
    assert there.dataplane.conversations.copy(there.model, SequenceTag(1)) is None


async def test_a_copy_expires_as_an_idle_conversation(serve: Serve) -> None:
    there, now_ns = There(serve, conversation_idle_secs=10), [NS_PER_SECOND]
    there.dataplane.conversations = Conversations(lambda: now_ns[0])
    for number, passed in ((1, 9), (2, 2)):
        there.keep(made(number))
        now_ns[0] += passed * NS_PER_SECOND
    assert "is not open" in refusal(there.dataplane, turn("y"))[1]
    assert await there.talk.say("y", "z", 2) == [user("x"), user("y")]


async def test_there_are_as_many_copies_as_conversations(serve: Serve) -> None:
    there = There(serve, conversation_max=2)
    for number in (1, 2, 3):
        there.keep(made(number))
    assert "is not open" in refusal(there.dataplane, turn("y"))[1]
    assert await there.talk.say("y", "z", 2) == [user("x"), user("y")]


async def test_copies_make_room_for_conversations_and_take_only_what_those_leave(
    serve: Serve,
) -> None:
    there = There(serve)
    there.dataplane.conversations = Conversations(limits=ByteLimits(each=400, total=800))
    for number in (1, 2, 3):
        there.keep(made(number, size=300))
    assert there.byte_size == 600
    there.keep(made(4, size=401))
    assert there.byte_size == 600
    await there.talk.say("x" * 300, "y", 5, start=True)
    assert 300 < there.byte_size - 300 < 400  # the third copy, and the conversation
    await there.talk.say("x" * 300, "y", 6, start=True)
    full = there.byte_size
    there.keep(made(7, size=400))
    assert there.byte_size == full
    assert len(await there.talk.say("x", "y", 5)) == 3


async def test_a_copy_that_wakes_is_a_conversation_of_its_model(serve: Serve) -> None:
    there = There(serve, conversation_max=1)
    there.keep(made())
    with there.dataplane.infer(turn("y", 2, start=True)) as stream:
        code, _ = refusal(there.dataplane, turn("y"))
        assert code is Code.UNAVAILABLE
        (await there.instance.begun()).finish("z")
        await stream.batch()
    assert await there.talk.say("y", "z") == [user("x"), user("y")]
    assert there.dataplane.conversations.count(there.model) == 1


async def test_with_its_model_the_copies_are_dropped(serve: Serve) -> None:
    there = There(serve)
    there.keep(made())
    await there.model.close()
    assert there.byte_size == 0


class Successor(NamedTuple):
    """A server, and another version of its model that is to continue its conversations."""

    there: There
    model: Model

    @property
    def kept(self) -> list[int]:
        """The conversations that it has, of six."""
        has = self.there.dataplane.conversations.has
        return [number for number in range(1, 7) if has(self.model, SequenceTag(number))]

    def keep(self, copy: ConversationCopy) -> None:
        """Keep a copy of its own."""
        self.there.dataplane.conversations.keep(
            self.model, msgspec.structs.replace(copy, version=2)
        )

    def move(self) -> None:
        """Continue the conversations of the first version."""
        self.there.dataplane.conversations.move(self.there.model, self.model)


@pytest.fixture
async def successor(serve: Serve) -> Successor:
    there = There(serve, conversation_max=4)
    model = serve(there.instance, config=there.model.config)
    model.version = "2"
    there.dataplane = dataplane_of(there.model, model)
    return Successor(there, model)


async def test_copies_move_with_conversations_to_another_version(successor: Successor) -> None:
    there = successor.there
    there.keep(made(1))
    there.keep(made(2))
    successor.move()
    assert not there.dataplane.conversations.has(there.model, SequenceTag(1))
    assert (successor.kept, there.byte_size) == ([1, 2], 2 * len(MESSAGES))
    talk = Talk(there.dataplane, there.instance)
    assert await talk.say("y", "z", 2, version="2") == [user("x"), user("y")]


@pytest.mark.parametrize("turns", [1, 2, 3])
async def test_of_the_copies_at_both_versions_the_newer_one_is_kept(
    successor: Successor, turns: int
) -> None:
    there = successor.there
    there.keep(made(turns=turns, size=100 * turns))
    successor.keep(made(turns=2, size=200))
    successor.move()
    assert there.byte_size == max(200, 100 * turns)


async def test_a_copy_does_not_move_where_its_conversation_is_known(successor: Successor) -> None:
    there = successor.there
    talk = Talk(there.dataplane, there.instance)
    await talk.say("one", "eins", start=True, version="2")
    size = there.byte_size
    there.keep(made(turns=9))
    successor.move()
    assert there.byte_size == size
    assert await talk.say("two", "zwei", version="2") == [*SAID, user("two")]


async def test_a_newer_copy_takes_the_place_of_an_idle_conversation_that_moves(
    successor: Successor,
) -> None:
    there = successor.there
    talk = Talk(there.dataplane, there.instance)
    await talk.say("one", "eins", start=True, version="1")
    found = there.dataplane.conversations.copy(there.model, SequenceTag(1))
    assert found is not None
    successor.keep(msgspec.structs.replace(found, turns=found.turns + 1, messages=MESSAGES))
    successor.move()
    assert there.byte_size == len(MESSAGES)
    assert await talk.say("two", "zwei", version="2") == [user("x"), user("two")]


async def test_beyond_the_limit_the_oldest_copies_of_both_versions_are_dropped(
    successor: Successor,
) -> None:
    there, now_ns = successor.there, [0]
    there.dataplane.conversations = Conversations(lambda: now_ns[0])
    for number in range(1, 7):
        (there if number % 2 else successor).keep(made(number))
        now_ns[0] += NS_PER_SECOND
    successor.move()
    assert successor.kept == [3, 4, 5, 6]
