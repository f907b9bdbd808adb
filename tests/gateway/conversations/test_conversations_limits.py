"""Limits of conversations: turns, tokens, bytes, number."""

from dataclasses import replace

import pytest

from gateway.conversations.conversation import MAX_WAITING
from gateway.dataplane import DataPlane
from gateway.errors import Code, InferenceError
from gateway.messages import SequenceTag
from tests.builders import (
    ScriptedInstance,
    read_all,
    settle,
    soon,
    text_response,
)
from tests.conftest import Serve
from tests.gateway.conversations.chats import (
    CHAT,
    Narrow,
    Talk,
    assistant,
    chat,
    dataplane_of,
    raw_turn,
    refusal,
    turn,
    user,
)

BROKEN = InferenceError(Code.INTERNAL, "broken")


async def test_the_turns_of_a_conversation_are_limited(
    serve: Serve, instance: ScriptedInstance
) -> None:
    dataplane = dataplane_of(serve(instance, config=chat(conversation_max_turns=3)))
    talk = Talk(dataplane, instance)
    for number in range(3):
        await talk.say("x", "y", start=number == 0)
    code, message = refusal(dataplane, turn("x"))
    assert code is Code.INVALID_ARG
    assert "has had 3 turns" in message
    assert "'conversation_max_turns'" in message
    assert await talk.say("x", "y", start=True) == [user("x")]


async def test_turns_that_wait_count_and_those_that_failed_do_not(
    serve: Serve, instance: ScriptedInstance
) -> None:
    dataplane = dataplane_of(serve(instance, config=chat(conversation_max_turns=2)))
    streams = [dataplane.infer(turn("one", start=True)), dataplane.infer(turn("two"))]
    assert refusal(dataplane, turn("three"))[0] is Code.INVALID_ARG
    (await instance.begun()).crash(BROKEN)
    (await instance.begun()).finish("zwei")
    await soon(read_all(streams[1]))
    assert len(await Talk(dataplane, instance).say("three", "drei")) == 3
    assert refusal(dataplane, turn("four"))[0] is Code.INVALID_ARG


async def test_the_tokens_of_a_conversation_are_limited(
    serve: Serve, instance: ScriptedInstance
) -> None:
    dataplane = dataplane_of(serve(instance, config=chat(conversation_max_tokens=10)))
    for number, tokens in enumerate((9, 10)):
        with dataplane.infer(turn("x", start=number == 0)) as stream:
            execution = await instance.begun()
            execution.answer(text_response("y", tokens=4))
            execution.answer(text_response("y", tokens=tokens - 4, final=True))
            execution.end()
            await soon(read_all(stream))
    code, message = refusal(dataplane, turn("x"))
    assert code is Code.INVALID_ARG
    assert "has 10 tokens, and the limit is 10" in message
    with dataplane.infer(turn("x", start=True)):
        await instance.begun()


async def test_a_turn_that_waited_is_refused_if_the_tokens_are_too_many_when_it_comes(
    serve: Serve, instance: ScriptedInstance
) -> None:
    dataplane = dataplane_of(serve(instance, config=chat(conversation_max_tokens=10)))
    first, second = dataplane.infer(turn("x", start=True)), dataplane.infer(turn("x"))
    execution = await instance.begun()
    execution.answer(text_response("y", tokens=10, final=True))
    execution.end()
    await soon(read_all(first))
    with pytest.raises(InferenceError, match="conversation_max_tokens"):
        await soon(read_all(second))
    assert len(instance.executions) == 1


async def test_the_number_of_waiting_turns_has_a_limit(
    dataplane: DataPlane, instance: ScriptedInstance
) -> None:
    streams = [dataplane.infer(turn("x", start=number == 0)) for number in range(1 + MAX_WAITING)]
    code, message = refusal(dataplane, turn("x"))
    assert code is Code.UNAVAILABLE
    assert f"has {MAX_WAITING} turns that wait" in message
    assert refusal(dataplane, turn("x", start=True))[0] is Code.UNAVAILABLE
    (await instance.begun()).finish("y")
    await soon(read_all(streams[0]))
    streams.append(dataplane.infer(turn("x")))
    for stream in streams[1:]:
        (await instance.begun()).finish("y")
        await soon(read_all(stream))


async def test_the_bytes_of_a_conversation_are_limited(
    serve: Serve, instance: ScriptedInstance
) -> None:
    narrow = Narrow(each=200, total=1000)
    narrow.add(serve(instance, config=CHAT))
    talk = Talk(narrow, instance)
    await talk.say("x" * 80, "y" * 10, start=True)
    code, message = refusal(narrow, turn("x" * 80))
    assert code is Code.INVALID_ARG
    assert "the most it may have is 200" in message
    await talk.say("x", "y")


async def test_messages_that_are_too_long_are_not_even_parsed(
    serve: Serve, instance: ScriptedInstance
) -> None:
    narrow = Narrow(each=200, total=1000)
    narrow.add(serve(instance, config=CHAT))
    code, message = refusal(narrow, raw_turn("[" * 201, SequenceTag(1, True, False)))
    assert code is Code.INVALID_ARG
    assert message == "input 'messages' has 201 bytes, and a conversation at most 200"


@pytest.mark.parametrize("many", [1, 7], ids=["one response", "many"])
async def test_an_answer_that_is_too_long_is_not_kept_and_nothing_can_follow_it(
    serve: Serve, instance: ScriptedInstance, many: int
) -> None:
    narrow = Narrow(each=200, total=1000)
    narrow.add(serve(instance, config=CHAT))
    with narrow.infer(turn("x", start=True)) as stream, narrow.infer(turn("waits")) as behind:
        execution = await instance.begun()
        for _ in range(many):
            execution.answer(text_response("y" * (210 // many)))
        execution.finish("")
        assert sum(map(len, await soon(read_all(stream)))) == 210
        with pytest.raises(InferenceError, match="too long to be remembered"):
            await soon(read_all(behind))
    assert narrow.conversations.byte_size <= 200
    code, message = refusal(narrow, turn("and then?"))
    assert code is Code.INVALID_ARG
    assert "latest answer was too long to be remembered" in message
    assert await Talk(narrow, instance).say("x", "y", start=True) == [user("x")]


async def test_an_answer_is_too_long_if_its_json_is(
    serve: Serve, instance: ScriptedInstance
) -> None:
    narrow = Narrow(each=200, total=1000)
    narrow.add(serve(instance, config=CHAT))
    await Talk(narrow, instance).say("x", "\n" * 100, start=True)
    assert "too long to be remembered" in refusal(narrow, turn("x"))[1]


async def test_a_turn_that_failed_leaves_no_trace_of_an_answer_that_was_too_long(
    serve: Serve, instance: ScriptedInstance
) -> None:
    narrow = Narrow(each=200, total=1000)
    narrow.add(serve(instance, config=CHAT))
    talk = Talk(narrow, instance)
    await talk.say("one", "eins", start=True)
    before = narrow.conversations.byte_size
    with narrow.infer(turn("two")) as stream:
        execution = await instance.begun()
        execution.answer(text_response("y" * 210))
        execution.crash(BROKEN)
        with pytest.raises(InferenceError, match="broken"):
            await soon(read_all(stream))
    assert narrow.conversations.byte_size == before
    assert await talk.say("three", "drei") == [user("one"), assistant("eins"), user("three")]


async def test_the_longest_idle_conversations_are_evicted_for_others(
    serve: Serve, instance: ScriptedInstance
) -> None:
    narrow, other = Narrow(each=1000, total=1200), ScriptedInstance()
    narrow.add(serve(instance, config=CHAT))
    narrow.add(serve(other, config=replace(CHAT, name="other")))
    talk = Talk(narrow, instance)
    elsewhere = replace(turn("x" * 200, "b", start=True), model="other")
    await talk.say("x" * 200, "y", "a", start=True)
    with narrow.infer(elsewhere) as stream:
        (await other.begun()).finish("y")
        await soon(read_all(stream))
    await talk.say("x" * 200, "y", "c", start=True)
    await talk.say("x", "y", "a")
    await talk.say("x" * 200, "y" * 100, "d", start=True)
    gone = replace(turn("x", "b"), model="other")
    assert "made room" in refusal(narrow, gone)[1]
    for kept in "acd":
        assert len(await talk.say("x", "y", kept)) >= 3
    assert narrow.conversations.byte_size <= 1200


async def test_a_turn_never_evicts_its_own_history(
    serve: Serve, instance: ScriptedInstance
) -> None:
    narrow = Narrow(each=1000, total=400)
    narrow.add(serve(instance, config=CHAT))
    talk = Talk(narrow, instance)
    await talk.say("x" * 200, "y", start=True)
    code, message = refusal(narrow, turn("x" * 200))
    assert code is Code.UNAVAILABLE
    assert "all conversations together have" in message
    assert "the most they may have is 400" in message
    assert len(await talk.say("x", "y")) == 3
    assert await talk.say("x" * 300, "y", start=True) == [user("x" * 300)]


async def test_turns_under_way_do_not_make_room(serve: Serve, instance: ScriptedInstance) -> None:
    narrow = Narrow(each=1000, total=400)
    narrow.add(serve(instance, config=CHAT))
    with narrow.infer(turn("x" * 200, "a", start=True)) as stream:
        execution = await instance.begun()
        assert refusal(narrow, turn("x" * 200, "b", start=True))[0] is Code.UNAVAILABLE
        execution.finish("y")
        await soon(read_all(stream))
    talk = Talk(narrow, instance)
    assert await talk.say("x" * 200, "y", "b", start=True) == [user("x" * 200)]
    assert "made room" in refusal(narrow, turn("x", "a"))[1]


async def test_memory_is_released_however_a_conversation_ends(
    serve: Serve, instance: ScriptedInstance
) -> None:
    narrow = Narrow(each=10_000, total=10_000)
    model = serve(instance, config=chat(conversation_max=2))
    narrow.add(model)
    talk = Talk(narrow, instance)
    await talk.say("x" * 50, "y", "a", start=True, end=True)
    assert narrow.conversations.byte_size == 0
    await talk.say("x" * 50, "y", "a", start=True)
    one = narrow.conversations.byte_size
    await talk.say("x" * 50, "y", "a", start=True)
    assert narrow.conversations.byte_size == one
    for name in "bcd":
        await talk.say("x" * 50, "y", name, start=True)
        assert narrow.conversations.byte_size == 2 * one
    with narrow.infer(turn("x", "d")), narrow.infer(turn("y" * 50, "d", start=True)):
        await instance.begun()
        assert narrow.conversations.byte_size > 2 * one
    await settle()
    assert narrow.conversations.byte_size < 2 * one + 100
    await soon(model.close())
    assert narrow.conversations.byte_size == 0


async def test_the_longest_idle_conversation_makes_room_for_a_new_one(
    serve: Serve, instance: ScriptedInstance
) -> None:
    dataplane = dataplane_of(serve(instance, config=chat(conversation_max=2)))
    talk = Talk(dataplane, instance)
    for conversation in ("a", "b"):
        await talk.say("x", "y", conversation, start=True)
    await talk.say("x", "y", "a")
    await talk.say("x", "y", "c", start=True)
    assert "made room" in refusal(dataplane, turn("x", "b"))[1]
    assert len(await talk.say("x", "y", "a")) == 5


async def test_with_all_conversations_under_way_a_new_one_is_refused(
    serve: Serve, instance: ScriptedInstance
) -> None:
    dataplane = dataplane_of(serve(instance, config=chat(conversation_max=1)))
    with dataplane.infer(turn("x", "a", start=True)) as stream:
        execution = await instance.begun()
        code, message = refusal(dataplane, turn("x", "b", start=True))
        assert code is Code.UNAVAILABLE
        assert "'conversation_max'" in message
        dataplane.infer(turn("x", "a")).cancel()
        execution.finish("y")
        await soon(read_all(stream))
    assert await Talk(dataplane, instance).say("x", "y", "b", start=True) == [user("x")]
