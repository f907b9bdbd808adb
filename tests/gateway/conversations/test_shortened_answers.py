"""Answers that are cut after their turns, because the client has not got all of them."""

import pytest

from gateway.conversations.conversation import Shorten
from gateway.dataplane import DataPlane
from gateway.errors import Code, InferenceError
from gateway.messages import SequenceTag
from tests.builders import ScriptedInstance, soon, text_response
from tests.gateway.conversations.chats import Talk, assistant, turn, user


def shortener(dataplane: DataPlane, conversation: int = 1) -> Shorten:
    """Cuts the answer of the turn that was accepted last."""
    found = dataplane.conversations.shortener(dataplane.model("chat"), SequenceTag(conversation))
    assert found is not None
    return found


async def answered(
    dataplane: DataPlane, instance: ScriptedInstance, said: str, answer: str
) -> Shorten:
    """Have a turn answered, whose answer may be cut."""
    with dataplane.infer(turn(said, start=said == "one")) as stream:
        found = shortener(dataplane)
        (await instance.begun()).finish(answer)
        await soon(stream.batch())
    return found


@pytest.mark.parametrize(
    ("size", "text"), [(0, ""), (4, "eins"), (5, "eins"), (6, "einsé"), (100, "einsé und")]
)
async def test_the_next_turn_has_the_answer_up_to_that_number_of_bytes(
    talk: Talk, dataplane: DataPlane, instance: ScriptedInstance, size: int, text: str
) -> None:
    shorten = await answered(dataplane, instance, "one", "einsé und")
    assert shorten(size) is (size < 100)
    assert not shorten(size)
    copy = dataplane.conversations.copy(dataplane.model("chat"), SequenceTag(1))
    assert copy is not None
    assert dataplane.conversations.byte_size == len(copy.messages) - len(",")
    assert await talk.say("two", "zwei") == [user("one"), assistant(text), user("two")]


async def test_a_turn_that_was_cancelled_while_it_ran_is_cut_once_it_has_ended(
    talk: Talk, dataplane: DataPlane, instance: ScriptedInstance
) -> None:
    with dataplane.infer(turn("one", start=True)) as stream:
        shorten = shortener(dataplane)
        (await instance.begun()).answer(text_response("eins zwei"))
        await soon(stream.batch())
        shorten(1)  # there is no answer to be cut
    shorten(4)
    assert (await talk.say("two", "zwei"))[1] == assistant("eins")


async def test_an_answer_in_the_prompt_of_a_later_turn_stays(
    talk: Talk, dataplane: DataPlane, instance: ScriptedInstance
) -> None:
    shorten = await answered(dataplane, instance, "one", "eins")
    with dataplane.infer(turn("two")) as stream:
        execution = await instance.begun()
        shorten(1)
        execution.finish("zwei")
        await soon(stream.batch())
    shorten(1)
    told = await talk.say("three", "drei")
    assert told == [*(user("one"), assistant("eins"), user("two"), assistant("zwei")), told[-1]]


async def test_a_turn_that_is_not_remembered_cuts_no_earlier_answer(
    talk: Talk, dataplane: DataPlane, instance: ScriptedInstance
) -> None:
    await talk.say("one", "eins", start=True)
    with dataplane.infer(turn("two")) as stream:
        shorten = shortener(dataplane)
        (await instance.begun()).answer(InferenceError(Code.UNKNOWN, "no"))
        with pytest.raises(InferenceError, match="no"):
            await soon(stream.batch())
    shorten(0)
    assert (await talk.say("two", "zwei"))[1] == assistant("eins")


async def test_a_conversation_that_is_forgotten_is_not_cut(
    talk: Talk, dataplane: DataPlane, instance: ScriptedInstance
) -> None:
    shorten = await answered(dataplane, instance, "one", "eins")
    await talk.say("bye", "bye", end=True)
    shorten(0)
    assert dataplane.conversations.byte_size == 0
    model = dataplane.model("chat")
    assert dataplane.conversations.shortener(model, SequenceTag(1)) is None
