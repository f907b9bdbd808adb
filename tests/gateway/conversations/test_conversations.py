"""Expiry of conversations."""

import gc
import weakref

import pytest

from gateway.conversations.conversations import Conversations
from gateway.dataplane import DataPlane
from gateway.errors import Code, InferenceError
from gateway.models.limits import NS_PER_SECOND
from tests.builders import (
    ScriptedInstance,
    read_all,
    settle,
    soon,
)
from tests.conftest import Serve
from tests.gateway.conversations.chats import (
    CHAT,
    Talk,
    chat,
    dataplane_of,
    refusal,
    told,
    turn,
)


class Clock:
    """A time that a test sets."""

    def __init__(self) -> None:
        self.now_ns = 1_000_000 * NS_PER_SECOND

    def __call__(self) -> int:
        return self.now_ns

    def pass_by(self, secs: float) -> None:
        """Let time pass."""
        self.now_ns += int(secs * NS_PER_SECOND)


async def test_an_idle_conversation_expires_and_one_that_has_a_turn_does_not(
    serve: Serve, instance: ScriptedInstance
) -> None:
    clock, model = Clock(), serve(instance, config=chat(conversation_idle_secs=10))
    conversations = Conversations(clock)

    async def say(text: str, *, start: bool = False, takes: float = 0) -> int:
        request = turn(text, start=start)
        with model.submit(request, None, conversations.turn(request, model)) as stream:
            execution = await instance.begun()
            clock.pass_by(takes)
            execution.finish("y")
            await soon(read_all(stream))
        return len(told(execution))

    assert await say("x", start=True, takes=100) == 1
    clock.pass_by(9.9)
    assert await say("x", takes=100) == 3
    clock.pass_by(9.9)
    assert await say("x") == 5
    assert conversations.count(model) == 1
    clock.pass_by(10)
    with pytest.raises(InferenceError, match="was idle for 10 s"):
        conversations.turn(turn("x"), model)
    assert conversations.count(model) == 0


async def test_an_idle_conversation_expires_without_a_request(
    serve: Serve, instance: ScriptedInstance
) -> None:
    model = serve(instance, config=chat(conversation_idle_secs=1))
    conversations = Conversations()
    request = turn("x", start=True)
    with model.submit(request, None, conversations.turn(request, model)) as stream:
        (await instance.begun()).finish("y")
        await soon(read_all(stream))
    assert conversations.count(model) == 1
    await soon(_until_none(conversations, model))


async def _until_none(conversations: Conversations, model: object) -> None:
    while conversations.count(model):  # type: ignore[arg-type]
        await settle()


async def test_with_its_model_all_is_forgotten_and_nothing_stays_in_memory(
    serve: Serve, instance: ScriptedInstance
) -> None:
    model = serve(instance, config=CHAT)
    conversations = Conversations()
    kept = []
    for number in range(20):
        request = turn("x", number + 1, start=True)
        found = conversations.turn(request, model)
        assert found is not None
        kept += [weakref.ref(found.history)]
        with model.submit(request, None, found) as stream:
            (await instance.begun()).finish("y")
            await soon(read_all(stream))
    del found, stream
    gc.collect()
    assert conversations.count(model) == 20
    await soon(model.close())
    await settle()
    gc.collect()
    assert conversations.count(model) == 0
    assert [each for each in kept if each() is not None] == []


async def test_a_turn_that_is_over_is_not_kept(talk: Talk, dataplane: DataPlane) -> None:
    streams = []
    for number in range(10):
        with dataplane.infer(turn("x", start=number == 0)) as stream:
            (await talk.instance.begun()).finish("y")
            await soon(read_all(stream))
        streams.append(weakref.ref(stream))
    del stream
    await settle()
    gc.collect()
    assert [each for each in streams if each() is not None] == []


async def test_a_stream_that_is_kept_does_not_keep_its_messages(
    serve: Serve, instance: ScriptedInstance
) -> None:
    model, conversations = serve(instance, config=CHAT), Conversations()
    request = turn("x" * 1000, start=True, end=True)
    found = conversations.turn(request, model)
    assert found is not None
    with model.submit(request, None, found) as stream:
        (await instance.begun()).finish("y" * 1000)
        await soon(read_all(stream))
    assert found.messages == b""
    assert found.history.followed_by(b"") == b"[]"
    assert conversations.byte_size == 0


async def test_a_server_that_exits_takes_no_turn_and_ends_those_that_wait(
    dataplane: DataPlane, instance: ScriptedInstance
) -> None:
    streams = [dataplane.infer(turn("one", start=True)), dataplane.infer(turn("two"))]
    execution = await instance.begun()
    dataplane.refuse_requests()
    assert refusal(dataplane, turn("three")) == (Code.UNAVAILABLE, "Server exiting")
    execution.finish("eins")
    (await instance.begun()).finish("zwei")
    assert await soon(read_all(streams[1])) == ["zwei"]
    assert dataplane.in_flight == 0


async def test_a_closed_model_ends_turns_under_way_and_those_that_wait(
    serve: Serve, instance: ScriptedInstance
) -> None:
    model = serve(instance, config=CHAT)
    dataplane = dataplane_of(model)
    streams = [dataplane.infer(turn("one", start=True)), dataplane.infer(turn("two"))]
    await instance.begun()
    await soon(model.close())
    for stream in streams:
        with pytest.raises(InferenceError, match="is being closed"):
            await soon(read_all(stream))
    await settle()
    assert len(instance.executions) == 1
