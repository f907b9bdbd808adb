"""Answers that are cut after their turns, because the client has not got all of them."""

from types import SimpleNamespace

import pytest

from gateway.conversations import history
from gateway.conversations.conversation import Shorten
from gateway.conversations.conversations import Conversations
from gateway.conversations.history import ByteLimits
from gateway.dataplane import DataPlane
from gateway.errors import Code, InferenceError
from gateway.messages import InferResponse, SequenceTag
from gateway.tensor import Datatype, Tensor
from tests.builders import ScriptedInstance, soon, text_response
from tests.gateway.conversations.chats import Talk, assistant, refusal, turn, user


def shortener(dataplane: DataPlane, conversation: int = 1) -> Shorten:
    """Cuts the answer of the turn that was accepted last."""
    found = dataplane.conversations.find(dataplane.model("chat"), SequenceTag(conversation))
    assert found is not None
    shorten = found.shortener()
    assert shorten is not None
    return shorten


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


async def test_an_answer_that_is_too_long_to_be_remembered_cuts_no_earlier_one(
    dataplane: DataPlane, instance: ScriptedInstance
) -> None:
    dataplane.conversations = Conversations(limits=ByteLimits(each=300, total=1000))
    await answered(dataplane, instance, "one", "eins")
    shorten = await answered(dataplane, instance, "two", '"' * 120)  # twice as long in JSON
    assert not shorten(0)
    size = dataplane.conversations.byte_size
    assert size > len('{"role":"assistant","content":"eins"}')
    assert "cannot continue" in refusal(dataplane, turn("three"))[1]


async def test_an_answer_of_a_conversation_that_began_at_the_same_time_is_not_cut(
    talk: Talk, dataplane: DataPlane, instance: ScriptedInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "time", SimpleNamespace(time_ns=lambda: 5))
    shorten = await answered(dataplane, instance, "one", "eins")
    await answered(dataplane, instance, "one", "anew")
    assert not shorten(1)
    assert (await talk.say("two", "zwei"))[1] == assistant("anew")


@pytest.mark.parametrize(
    ("size", "text"),
    [(3, "caf"), (4, "caf"), (5, "caf\ufffd "), (8, "caf\ufffd caf"), (9, None), (99, None)],
)
async def test_an_answer_that_is_not_utf8_is_cut_by_the_bytes_of_its_model(
    talk: Talk, dataplane: DataPlane, instance: ScriptedInstance, size: int, text: str | None
) -> None:
    said = Tensor("text_output", Datatype.BYTES, (1,), (b"caf\xe9 caf\xc3",))
    with dataplane.infer(turn("one", start=True)) as stream:
        shorten = shortener(dataplane)
        execution = await instance.begun()
        execution.answer(InferResponse(outputs=(said,), final=True))
        execution.end()
        await soon(stream.batch())
    assert shorten(size) is (text is not None)
    expected = "caf\ufffd caf\ufffd" if text is None else text
    assert (await talk.say("two", "zwei"))[1] == assistant(expected)


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
    assert dataplane.conversations.find(model, SequenceTag(1)) is None
