"""One conversation: messages, order of turns, failed and cancelled turns."""

import json
from dataclasses import replace

import pytest

from gateway.dataplane import DataPlane
from gateway.errors import Code
from gateway.messages import SequenceTag
from gateway.observability.span_trace import SpanTrace
from gateway.observability.spans import spans_of
from gateway.tensor import Datatype, Tensor
from tests.builders import (
    KeptTraces,
    ScriptedInstance,
    read_all,
    settle,
    soon,
    text_response,
)
from tests.collector import read_spans, values
from tests.conftest import Serve
from tests.gateway.conversations.chats import (
    CHAT,
    Talk,
    assistant,
    dataplane_of,
    raw_turn,
    read_all_bytes,
    refusal,
    told,
    turn,
    user,
)

CONVERSATION_ID = "gen_ai.conversation.id"

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


async def test_turns_wait_in_order_and_conversations_run_side_by_side(
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


# Traces.


@pytest.mark.parametrize(
    ("tag", "found"),
    [
        (SequenceTag("chat-1", start=True), {CONVERSATION_ID: "chat-1"}),
        (SequenceTag(7, start=True), {CONVERSATION_ID: "7"}),
        (None, {}),
    ],
)
async def test_the_span_of_a_turn_has_the_id_of_its_conversation(
    dataplane: DataPlane,
    instance: ScriptedInstance,
    tag: SequenceTag | None,
    found: dict[str, str],
) -> None:
    trace = KeptTraces().tracer(rate=1).begin("chat")
    assert isinstance(trace, SpanTrace)
    with dataplane.infer(raw_turn(json.dumps([user("x")]), tag), trace=trace) as stream:
        (await instance.begun()).finish("y")
        await soon(read_all(stream))
    spans = {each.name: each for each in read_spans(spans_of(trace))}
    attributes = values(spans["chat"])
    assert {n: v for n, v in attributes.items() if n == CONVERSATION_ID} == found
