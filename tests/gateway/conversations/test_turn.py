"""Requests that are no turns."""

import json
from dataclasses import replace

import pytest

from gateway.config.scheduling import SequenceBatching
from gateway.dataplane import DataPlane
from gateway.errors import Code, InferenceError
from gateway.messages import RequestedOutput, SequenceTag
from gateway.tensor import Datatype, Tensor
from tests.builders import (
    ScriptedInstance,
    read_all,
    soon,
)
from tests.conftest import Serve
from tests.gateway.conversations.chats import (
    CHAT,
    chat,
    dataplane_of,
    raw_turn,
    refusal,
    turn,
    user,
)


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
        ("conversation_copies", "no"),
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
