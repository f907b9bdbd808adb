"""Conversations: messages for the model, order of turns, limits, expiry."""

import gc
import json
import weakref
from dataclasses import replace

import pytest

from gateway.config.scheduling import SequenceBatching
from gateway.conversations.conversation import MAX_WAITING
from gateway.conversations.conversations import NS_PER_SECOND, Conversations
from gateway.dataplane import DataPlane
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest, RequestedOutput, SequenceTag
from gateway.running_requests import RequestName
from gateway.stream import ResponseStream
from gateway.tensor import Datatype, Tensor
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
    Door,
    Narrow,
    Talk,
    assistant,
    chat,
    dataplane_of,
    interrupted,
    raw_turn,
    told,
    turn,
    user,
)

BROKEN = InferenceError(Code.INTERNAL, "broken")


@pytest.fixture
async def instance() -> ScriptedInstance:
    return ScriptedInstance()


@pytest.fixture
async def dataplane(serve: Serve, instance: ScriptedInstance) -> DataPlane:
    return dataplane_of(serve(instance, config=CHAT))


@pytest.fixture
async def talk(dataplane: DataPlane, instance: ScriptedInstance) -> Talk:
    return Talk(dataplane, instance)


def refusal(door: Door, request: InferRequest) -> tuple[Code, str]:
    with pytest.raises(InferenceError) as caught:
        door.infer(request)
    return caught.value.code, caught.value.message


async def read_all_bytes(stream: ResponseStream) -> None:
    """Read to the end what need not be whole characters."""
    while await stream.batch():
        pass


# Messages for the model.


async def test_each_turn_gets_all_earlier_messages(talk: Talk) -> None:
    assert await talk.say("one", "eins", start=True) == [user("one")]
    assert await talk.say("two", "zwei") == [user("one"), assistant("eins"), user("two")]
    assert await talk.say("three", "drei") == [
        *(user("one"), assistant("eins"), user("two"), assistant("zwei"), user("three")),
    ]


async def test_an_answer_is_all_that_its_responses_said(
    talk: Talk, dataplane: DataPlane, instance: ScriptedInstance
) -> None:
    with dataplane.infer(turn("one", start=True)) as stream:
        execution = await instance.begun()
        for text in ("ei", "n", "s \N{PILE OF POO}\n"):
            execution.answer(text_response(text))
        execution.end()
        await soon(read_all(stream))
    assert (await talk.say("two", "zwei"))[1] == assistant("eins \N{PILE OF POO}\n")


async def test_a_turn_may_have_several_messages_and_keeps_the_clients_own_json(
    talk: Talk, dataplane: DataPlane, instance: ScriptedInstance
) -> None:
    given = (
        ' [{"role":"system","content":"be 1.0 brief"},\n {"content":"h\\u00e9","role":"user"} ] '
    )
    with dataplane.infer(raw_turn(given, SequenceTag(1, start=True))) as stream:
        execution = await instance.begun()
        (messages,) = execution.requests[0].inputs
        assert messages.elements() == (b"[%b]" % given.strip()[1:-1].strip().encode(),)
        execution.finish("ok")
        await soon(read_all(stream))
    assert (await talk.say("two", "zwei"))[:2] == json.loads(given)


async def test_the_model_gets_an_ordinary_request_with_all_else_as_it_came(
    dataplane: DataPlane, instance: ScriptedInstance
) -> None:
    request = turn("one", start=True, request_id="a", parameters={"temperature": 0}, priority=3)
    with dataplane.infer(request):
        (found,) = (await instance.begun()).requests
    assert found == replace(request, sequence=None, inputs=found.inputs)


async def test_of_several_sequences_the_first_is_the_answer(
    talk: Talk, dataplane: DataPlane, instance: ScriptedInstance
) -> None:
    two = Tensor("text_output", Datatype.BYTES, (2,), b"\4\0\0\0eins\2\0\0\0un")
    with dataplane.infer(turn("one", start=True)) as stream:
        execution = await instance.begun()
        execution.answer(replace(text_response("", final=True), outputs=(two,)))
        execution.end()
        await soon(read_all(stream))
    assert (await talk.say("two", "zwei"))[1] == assistant("eins")


async def test_a_character_that_comes_in_two_responses_is_remembered_whole(
    talk: Talk, dataplane: DataPlane
) -> None:
    halves = "né".encode()
    with dataplane.infer(turn("one", start=True)) as stream:
        execution = await talk.instance.begun()
        for half in (halves[:2], halves[2:]):
            tensor = Tensor("text_output", Datatype.BYTES, (1,), (half,))
            execution.answer(replace(text_response(""), outputs=(tensor,)))
        execution.finish("!")
        await soon(read_all_bytes(stream))
    assert (await talk.say("two", "zwei"))[1] == assistant("né!")


async def test_conversations_do_not_know_each_other(talk: Talk) -> None:
    for conversation in (7, "7", "x"):
        assert await talk.say("one", "eins", conversation, start=True) == [user("one")]
    for conversation in (7, "7", "x"):
        assert len(await talk.say("two", "zwei", conversation)) == 3


async def test_models_do_not_share_conversations(serve: Serve) -> None:
    instances = [ScriptedInstance() for _ in range(2)]
    models = [
        serve(instance, config=replace(CHAT, name=name))
        for name, instance in zip("ab", instances, strict=True)
    ]
    dataplane = dataplane_of(*models)
    with dataplane.infer(replace(turn("one", start=True), model="a")) as stream:
        (await instances[0].begun()).finish("eins")
        await soon(read_all(stream))
    assert refusal(dataplane, replace(turn("two"), model="b"))[0] is Code.INVALID_ARG


# Beginning and ending.


async def test_a_start_replaces_the_conversation(talk: Talk) -> None:
    await talk.say("one", "eins", start=True)
    assert await talk.say("two", "zwei", start=True) == [user("two")]
    assert await talk.say("three", "drei") == [user("two"), assistant("zwei"), user("three")]


async def test_an_end_forgets_afterwards(talk: Talk, dataplane: DataPlane) -> None:
    await talk.say("one", "eins", start=True)
    assert len(await talk.say("two", "zwei", end=True)) == 3
    assert refusal(dataplane, turn("three"))[0] is Code.INVALID_ARG


async def test_an_unknown_conversation_is_refused_with_the_reasons(
    dataplane: DataPlane, instance: ScriptedInstance
) -> None:
    code, message = refusal(dataplane, turn("one", "x"))
    assert code is Code.INVALID_ARG
    for part in (
        "conversation 'x' of model 'chat'",
        "not begun",
        "ended",
        "600 s",
        "sequence_start",
    ):
        assert part in message
    await settle()
    assert (instance.executions, dataplane.in_flight) == ([], 0)


async def test_behind_an_end_only_a_start_can_wait(
    dataplane: DataPlane, instance: ScriptedInstance
) -> None:
    streams = [dataplane.infer(turn("one", start=True)), dataplane.infer(turn("two", end=True))]
    assert refusal(dataplane, turn("three"))[0] is Code.INVALID_ARG
    streams.append(dataplane.infer(turn("three", start=True)))
    streams.append(dataplane.infer(turn("four")))
    found = []
    for answer in ("eins", "zwei", "drei", "vier"):
        execution = await instance.begun()
        found.append([each["content"] for each in told(execution)])
        execution.finish(answer)
    for stream in streams:
        await soon(read_all(stream))
    assert found == [["one"], ["one", "eins", "two"], ["three"], ["three", "drei", "four"]]


# The order of turns.


async def test_turns_wait_in_order_and_conversations_go_on_side_by_side(
    dataplane: DataPlane, instance: ScriptedInstance
) -> None:
    streams = [
        dataplane.infer(turn("a1", "a", start=True)),
        dataplane.infer(turn("a2", "a")),
        dataplane.infer(turn("b1", "b", start=True)),
        dataplane.infer(turn("a3", "a")),
    ]
    a1, b1 = await instance.begun(), await instance.begun()
    await settle()
    assert [told(each)[-1]["content"] for each in instance.executions] == ["a1", "b1"]
    assert dataplane.in_flight == 4
    b1.finish("B1")
    assert await soon(read_all(streams[2])) == ["B1"]
    a1.answer(text_response("A"))
    a1.finish("1")
    a2 = await instance.begun()
    assert told(a2) == [user("a1"), assistant("A1"), user("a2")]
    await settle()
    assert len(instance.executions) == 3
    a2.finish("A2")
    a3 = await instance.begun()
    assert [each["content"] for each in told(a3)] == ["a1", "A1", "a2", "A2", "a3"]
    a3.finish("A3")
    for stream, answers in zip(streams, (["A", "1"], ["A2"], ["B1"], ["A3"]), strict=True):
        if stream is not streams[2]:
            assert await soon(read_all(stream)) == answers


async def test_a_turn_may_be_asked_before_its_predecessor_has_been_read(
    dataplane: DataPlane, instance: ScriptedInstance
) -> None:
    first = dataplane.infer(turn("one", start=True))
    second = dataplane.infer(turn("two"))
    (await instance.begun()).finish("eins")
    (await instance.begun()).finish("zwei")
    assert await soon(read_all(second)) == ["zwei"]
    assert await soon(read_all(first)) == ["eins"]


@pytest.mark.parametrize("waits", [False, True])
async def test_two_turns_with_one_id_are_refused_until_the_first_has_ended(
    dataplane: DataPlane, instance: ScriptedInstance, waits: bool
) -> None:
    streams = [dataplane.infer(turn("one", start=True, request_id="first"))]
    if waits:
        streams.append(dataplane.infer(turn("two", request_id="second")))
    code, message = refusal(dataplane, turn("x", request_id="second" if waits else "first"))
    assert code is Code.ALREADY_EXISTS
    assert "has not ended" in message
    for stream in streams:
        (await instance.begun()).finish("done")
        await soon(read_all(stream))
    with dataplane.infer(turn("three", request_id="first")) as stream:
        (await instance.begun()).finish("done")
        assert await soon(read_all(stream)) == ["done"]


async def test_turns_without_ids_and_with_those_of_other_conversations_are_no_twins(
    dataplane: DataPlane,
) -> None:
    streams = [
        dataplane.infer(turn("x", "a", start=True)),
        dataplane.infer(turn("x", "a")),
        dataplane.infer(turn("x", "a", request_id="1")),
        dataplane.infer(turn("x", "b", start=True, request_id="1")),
    ]
    for stream in streams:
        stream.cancel()


# Turns that do not end well.


async def test_a_cancelled_turn_keeps_its_answer_so_far(
    talk: Talk, dataplane: DataPlane, instance: ScriptedInstance
) -> None:
    with dataplane.infer(turn("one", start=True, request_id="a")) as stream:
        execution = await instance.begun()
        await interrupted(stream, execution, "ei")
        dataplane.cancel(RequestName("chat", "", "a"))
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
        dataplane.cancel(RequestName("chat", "", "b"))
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
    dataplane.cancel(RequestName("chat", "", "a"))
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


# Limits.


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


async def test_so_many_turns_wait_and_no_more(
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


# What is no turn.


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ("", "is not valid JSON"),
        ("{", "is not valid JSON"),
        ('{"role":"user"}', "a list is expected"),
        ("[]", "at least one message"),
        ('["hello"]', "each an object"),
        ("null", "a list is expected"),
    ],
)
async def test_invalid_messages_are_refused_and_change_nothing(
    dataplane: DataPlane, messages: str, text: str
) -> None:
    code, message = refusal(dataplane, raw_turn(messages, SequenceTag(1, start=True)))
    assert code is Code.INVALID_ARG
    assert text in message
    assert refusal(dataplane, turn("x"))[1].startswith("conversation 1 of model 'chat' is not open")


async def test_messages_of_another_datatype_or_shape_are_the_models_to_refuse(
    dataplane: DataPlane,
) -> None:
    tag = SequenceTag(1, start=True)
    number = Tensor("messages", Datatype.INT32, (1,), bytes(4))
    assert "data-type" in refusal(dataplane, raw_turn("", tag, inputs=(number,)))[1]
    two = Tensor("messages", Datatype.BYTES, (2,), (b"[{}]", b"[{}]"))
    assert "has 2 elements" in refusal(dataplane, raw_turn("", tag, inputs=(two,)))[1]
    cut = Tensor("messages", Datatype.BYTES, (1,), b"\x09\0\0\0[")
    assert refusal(dataplane, raw_turn("", tag, inputs=(cut,)))[0] is Code.INVALID_ARG


async def test_a_turn_whose_answer_would_not_be_the_models_own_text_is_refused(
    dataplane: DataPlane,
) -> None:
    (messages,) = turn("x").inputs
    echo = Tensor("exclude_input_in_output", Datatype.BOOL, (1,), b"\0")
    request = raw_turn("", SequenceTag(1, start=True), inputs=(messages, echo))
    assert "would repeat the conversation" in refusal(dataplane, request)[1]
    request = turn("x", start=True, outputs=(RequestedOutput("finish_reason"),))
    assert "'text_output'" in refusal(dataplane, request)[1]


@pytest.mark.parametrize("tag", [None, SequenceTag(0), SequenceTag("")])
async def test_without_a_correlation_id_nothing_is_remembered(
    dataplane: DataPlane, instance: ScriptedInstance, tag: SequenceTag | None
) -> None:
    for _ in range(2):
        with dataplane.infer(raw_turn(json.dumps([user("x")]), tag)) as stream:
            execution = await instance.begun()
            (messages,) = execution.requests[0].inputs
            assert json.loads(messages.elements()[0]) == [user("x")]
            execution.finish("y")
            await soon(read_all(stream))


async def test_with_a_limit_of_0_the_model_gets_the_id(
    serve: Serve, instance: ScriptedInstance
) -> None:
    dataplane = dataplane_of(serve(instance, config=chat(conversation_max=0)))
    with dataplane.infer(turn("x", 7)):
        (request,) = (await instance.begun()).requests
    assert request == turn("x", 7)


async def test_with_a_sequence_batcher_a_correlation_id_is_a_sequence(
    serve: Serve, instance: ScriptedInstance
) -> None:
    batching = SequenceBatching(max_sequence_idle_microseconds=3_600_000_000)
    config = replace(CHAT, sequence_batching=batching)
    dataplane = dataplane_of(serve(instance, config=config))
    with dataplane.infer(turn("x", 7, start=True, end=True)):
        (request,) = (await instance.begun()).requests
    assert request.sequence == SequenceTag(7, start=True, end=True)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("conversation_max_turns", "0"),
        ("conversation_max_tokens", "-1"),
        ("conversation_idle_secs", "0"),
        ("conversation_idle_secs", "soon"),
        ("conversation_max", "1.5"),
    ],
)
async def test_a_limit_that_is_no_number_fails_the_load(
    serve: Serve, instance: ScriptedInstance, key: str, value: str
) -> None:
    with pytest.raises(InferenceError, match=f"parameter '{key}' is '{value}'"):
        serve(instance, config=chat(**{key: value}))


# What is forgotten.


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
