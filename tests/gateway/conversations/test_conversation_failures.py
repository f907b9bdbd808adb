"""Turns that are cancelled or fail."""

import pytest

from gateway.dataplane import DataPlane
from gateway.errors import Code, InferenceError
from gateway.request_name import RequestName
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
    Talk,
    assistant,
    chat,
    dataplane_of,
    interrupted,
    refusal,
    told,
    turn,
    user,
)

BROKEN = InferenceError(Code.INTERNAL, "broken")


# Turns that do not end well.


async def test_a_cancelled_turn_keeps_its_answer_so_far(
    talk: Talk, dataplane: DataPlane, instance: ScriptedInstance
) -> None:
    with dataplane.infer(turn("one", start=True, request_id="a")) as stream:
        execution = await instance.begun()
        await interrupted(stream, execution, "ei")
        dataplane.running.cancel(RequestName("chat", "", "a"))
        assert await soon(read_all(stream)) == [""]
    await soon(execution.stopped.wait())
    assert await talk.say("two", "zwei") == [user("one"), assistant("ei"), user("two")]


async def test_a_turn_of_a_disconnected_client_keeps_its_answer_so_far(
    talk: Talk, dataplane: DataPlane, instance: ScriptedInstance
) -> None:
    with dataplane.infer(turn("one", start=True)) as stream:
        execution = await instance.begun()
        await interrupted(stream, execution, "ei")
    await soon(execution.stopped.wait())
    assert await talk.say("two", "zwei") == [user("one"), assistant("ei"), user("two")]


async def test_a_turn_that_is_cancelled_before_it_says_anything_was_asked(
    talk: Talk, dataplane: DataPlane, instance: ScriptedInstance
) -> None:
    with dataplane.infer(turn("one", start=True)):
        await instance.begun()
    assert await talk.say("two", "zwei") == [user("one"), assistant(""), user("two")]


@pytest.mark.parametrize("by_id", [False, True])
async def test_a_turn_that_is_cancelled_while_it_waits_was_never_asked(
    talk: Talk, dataplane: DataPlane, instance: ScriptedInstance, by_id: bool
) -> None:
    first = dataplane.infer(turn("one", start=True))
    waiting = dataplane.infer(turn("two", request_id="b"))
    execution = await instance.begun()
    if by_id:
        dataplane.running.cancel(RequestName("chat", "", "b"))
    else:
        waiting.cancel()
    assert dataplane.in_flight == 1
    execution.finish("eins")
    await soon(read_all(first))
    assert await talk.say("three", "drei") == [user("one"), assistant("eins"), user("three")]


async def test_interrupting_lets_the_next_turn_begin(
    dataplane: DataPlane, instance: ScriptedInstance
) -> None:
    first = dataplane.infer(turn("one", start=True, request_id="a"))
    second = dataplane.infer(turn("two", request_id="b"))
    await interrupted(first, await instance.begun(), "ei")
    dataplane.running.cancel(RequestName("chat", "", "a"))
    execution = await instance.begun()
    assert told(execution) == [user("one"), assistant("ei"), user("two")]
    execution.finish("zwei")
    assert await soon(read_all(second)) == ["zwei"]


async def test_when_a_stream_breaks_none_of_the_turns_that_wait_on_it_begins(
    talk: Talk, dataplane: DataPlane, instance: ScriptedInstance
) -> None:
    streams = [dataplane.infer(turn("one", start=True))]
    streams += [dataplane.infer(turn(f"waits {number}")) for number in range(3)]
    await interrupted(streams[0], await instance.begun(), "ei")
    for stream in streams:
        stream.cancel()
    await settle()
    assert len(instance.executions) == 1
    assert await talk.say("two", "zwei") == [user("one"), assistant("ei"), user("two")]


@pytest.mark.parametrize("said", [[], ["ei"]])
async def test_a_failed_turn_takes_its_messages_back(
    talk: Talk, dataplane: DataPlane, instance: ScriptedInstance, said: list[str]
) -> None:
    await talk.say("one", "eins", start=True)
    with dataplane.infer(turn("two")) as stream:
        execution = await instance.begun()
        for text in said:
            execution.answer(text_response(text))
        execution.answer(BROKEN)
        execution.end()
        with pytest.raises(InferenceError, match="broken"):
            await soon(read_all(stream))
    assert await talk.say("three", "drei") == [user("one"), assistant("eins"), user("three")]


async def test_a_failed_turn_does_not_affect_the_next_one(
    dataplane: DataPlane, instance: ScriptedInstance
) -> None:
    streams = [dataplane.infer(turn("one", start=True)), dataplane.infer(turn("two"))]
    (await instance.begun()).crash(BROKEN)
    execution = await instance.begun()
    assert told(execution) == [user("two")]
    execution.finish("zwei")
    assert await soon(read_all(streams[1])) == ["zwei"]


async def test_a_start_that_is_refused_leaves_the_conversation_as_it_was(
    serve: Serve, instance: ScriptedInstance
) -> None:
    dataplane = dataplane_of(serve(instance, config=chat(max_in_flight=1)))
    talk = Talk(dataplane, instance)
    await talk.say("one", "eins", start=True)
    with dataplane.infer(turn("x", "other", start=True)):
        assert refusal(dataplane, turn("two", start=True))[0] is Code.UNAVAILABLE
    assert len(await talk.say("two", "zwei")) == 3


async def test_a_start_that_is_cancelled_while_it_waits_changes_nothing(
    talk: Talk, dataplane: DataPlane, instance: ScriptedInstance
) -> None:
    first = dataplane.infer(turn("one", start=True))
    start = dataplane.infer(turn("anew", start=True))
    execution = await instance.begun()
    start.cancel()
    execution.finish("eins")
    await soon(read_all(first))
    assert await talk.say("two", "zwei") == [user("one"), assistant("eins"), user("two")]


async def test_an_instance_that_dies_fails_the_turns_and_the_conversation_lives(
    serve: Serve, instance: ScriptedInstance
) -> None:
    other = ScriptedInstance()
    loads = iter([other])

    async def load() -> ScriptedInstance:
        return next(loads)

    dataplane = dataplane_of(serve(instance, config=CHAT, load=load))
    await Talk(dataplane, instance).say("one", "eins", start=True)
    stream = dataplane.infer(turn("two"))
    await instance.begun()
    instance.die("gone")
    with pytest.raises(InferenceError) as caught:
        await soon(read_all(stream))
    assert caught.value.code is Code.UNAVAILABLE
    model = dataplane.model("chat")
    while not model.ready:
        await settle()
    found = await Talk(dataplane, other).say("three", "drei")
    assert found == [user("one"), assistant("eins"), user("three")]
