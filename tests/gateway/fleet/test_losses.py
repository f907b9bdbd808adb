"""Replicas that are lost: repeated requests, and continued texts."""

import logging
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.config import ModelConfig, ModelInput, ModelOutput
from gateway.config.data_type import DataType
from gateway.errors import Code, InferenceError, RefusedError
from gateway.fleet import connection
from gateway.fleet.choice import ReplicaState
from gateway.messages import InferRequest, InferResponse, Usage
from gateway.openai_contract import REQUEST, RESPONSE
from gateway.processes.inference_calls import InferenceKind
from gateway.processes.inference_messages import write_response
from gateway.tensor import text_tensor
from tests.builders import soon, text_response, texts
from tests.gateway.fleet.fake_replica import FakeReplica, listening, offered, until
from tests.gateway.fleet.losing import (
    LLM,
    STOPPED,
    generation,
    lose_after,
    read,
    taken,
)
from tests.gateway.fleet.routing import NO_SUMS, Routed, routing, sums


@pytest.fixture(autouse=True)
def _short_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "FIRST_PAUSE_SECS", 0.01)


@pytest.fixture
def hosted() -> ModelConfig:
    return LLM


async def test_a_text_is_continued_at_another_replica(
    routed: Routed, replicas: list[FakeReplica], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "sluice.fleet")
    with routed.dataplane.infer(generation()) as stream:
        lost = await lose_after(stream, "b", *replicas)
        other, call = await taken(*replicas)
        assert other is not lost
        rest = other.requests[call]
        assert (rest.inputs[0].elements(), rest.parameters) == ((b"ab",), {"max_tokens": 7})
        other.respond(call, text_response("c"), text_response("d", tokens=1, final=True))
        found = await read(stream, 2)
    assert texts(found) == ["c", "d"]
    assert found[1].parameters == {"continued": 1}
    assert "request continued" in caplog.messages


async def test_a_text_is_continued_as_often_as_its_model_allows(
    tmp_path: Path, replicas: list[FakeReplica]
) -> None:
    async with listening() as third:
        replicas.append(third)
        for each in replicas:
            each.offer(offered(replace(LLM, parameters={"continue_tries": "2"})))
        async with routing(tmp_path, *replicas) as routed:
            with routed.dataplane.infer(generation()) as stream:
                lost = {await lose_after(stream, text, *replicas) for text in "bc"}
                other, call = await taken(*replicas)
                assert other not in lost
                rest = other.requests[call]
                assert sums(routed) == {**NO_SUMS, "requests": 3, "continued": 2}
                assert (rest.inputs[0].elements(), rest.parameters) == (
                    (b"abc",),
                    {"max_tokens": 5},
                )
                other.respond(call, text_response("d", tokens=1))
                await read(stream, 1)
                other.lose()
                expected = "after 5 tokens were sent; not continued: it has been continued 2 times"
                with pytest.raises(InferenceError, match=expected) as caught:
                    await soon(stream.batch())
                assert caught.value.code is Code.UNAVAILABLE


@pytest.mark.parametrize(
    "error",
    [
        InferenceError(Code.INVALID_ARG, "the prompt is too long"),
        RefusedError(Code.UNAVAILABLE, "Server exiting"),
        STOPPED,
    ],
    ids=["mistake", "exiting", "failure"],
)
async def test_an_error_of_a_continuation_is_that_of_the_lost_replica_with_the_reason(
    routed: Routed, replicas: list[FakeReplica], error: InferenceError
) -> None:
    with routed.dataplane.infer(generation()) as stream:
        await lose_after(stream, "b", *replicas)
        other, call = await taken(*replicas)
        other.fail(call, error)
        expected = (
            "was lost after 2 tokens were sent; its continuation at another one failed: "
            f"{error.message}"
        )
        with pytest.raises(InferenceError, match=expected) as caught:
            await soon(stream.batch())
        assert caught.value.code is Code.UNAVAILABLE


async def test_an_error_of_a_begun_text_is_its_own(
    routed: Routed, replicas: list[FakeReplica]
) -> None:
    with routed.dataplane.infer(generation()) as stream:
        found, call = await taken(*replicas)
        found.respond(call, text_response("b", tokens=2))
        await read(stream, 1)
        found.fail(call, STOPPED)
        with pytest.raises(InferenceError, match=r"^the engine has stopped$"):
            await soon(stream.batch())


async def test_a_text_that_lost_its_continuation_ends_with_its_tokens(
    tmp_path: Path, replicas: list[FakeReplica]
) -> None:
    async with AsyncExitStack() as owner:
        replicas += [await owner.enter_async_context(listening()) for _ in range(2)]
        for each in replicas:
            each.offer(offered(replace(LLM, parameters={"continue_tries": "3"})))
        routed = await owner.enter_async_context(routing(tmp_path, *replicas))
        with routed.dataplane.infer(generation()) as stream:
            await lose_after(stream, "b", *replicas)
            for _ in range(2):
                (await taken(*replicas))[0].lose()
            expected = "after 2 tokens were sent; not continued: .* 2 replicas or .* were lost"
            with pytest.raises(InferenceError, match=expected) as caught:
                await soon(stream.batch())
            assert caught.value.code is Code.UNAVAILABLE


async def test_a_text_that_a_draining_replica_ends_is_continued(
    routed: Routed, replicas: list[FakeReplica]
) -> None:
    with routed.dataplane.infer(generation()) as stream:
        draining, call = await taken(*replicas)
        draining.respond(call, text_response("b", tokens=2))
        await read(stream, 1)
        draining.offer(*draining.offers.models, state=ReplicaState.DRAINING)
        draining.fail(call, STOPPED)
        other, rest = await taken(*replicas)
        assert other is not draining
        other.respond(rest, text_response("c", tokens=1, final=True))
        assert texts(await read(stream, 1)) == ["c"]


async def test_a_request_that_cannot_be_continued_ends_with_the_reason(
    routed: Routed, replicas: list[FakeReplica]
) -> None:
    with routed.dataplane.infer(generation(seed=7)) as stream:
        await lose_after(stream, "b", *replicas)
        with pytest.raises(InferenceError) as caught:
            await soon(stream.batch())
    assert caught.value.code is Code.UNAVAILABLE
    expected = "was lost after 2 tokens were sent; not continued: the request has 'seed'"
    assert expected in caught.value.message
    assert not any(each.calls for each in replicas)


async def test_a_text_without_another_replica_ends_with_the_reason(
    routed: Routed, replicas: list[FakeReplica]
) -> None:
    replicas[1].offer()
    await until(lambda: not routed.router.connections[1].models)
    with routed.dataplane.infer(generation()) as stream:
        await lose_after(stream, "b", *replicas)
        with pytest.raises(InferenceError, match=r"not continued: .* has no replica that takes"):
            await soon(stream.batch())


@pytest.mark.parametrize(
    "config",
    [
        replace(LLM, parameters={"continue_tries": "0"}),
        replace(LLM, backend="identity"),
        replace(LLM, backend="python", parameters={"continue_tries": "1"}),
    ],
    ids=["never", "no-engine", "effects"],
)
async def test_a_model_that_continues_no_texts_ends_a_stream_after_the_loss(
    tmp_path: Path, replicas: list[FakeReplica], config: object
) -> None:
    for each in replicas:
        each.offer(offered(config))  # type: ignore[arg-type]
    async with routing(tmp_path, *replicas) as routed:
        with routed.dataplane.infer(generation()) as stream:
            await lose_after(stream, "b", *replicas)
            with pytest.raises(InferenceError, match="was lost after its first response"):
                await soon(stream.batch())


@pytest.mark.parametrize("replay", ["true", ""])
async def test_a_request_without_a_response_is_repeated_unless_it_may_have_had_effects(
    tmp_path: Path, replicas: list[FakeReplica], replay: str
) -> None:
    for each in replicas:
        each.offer(offered(replace(LLM, backend="python", parameters={"replay": replay})))
    async with routing(tmp_path, *replicas) as routed:
        with routed.dataplane.infer(generation()) as stream:
            (await taken(*replicas))[0].lose()
            if replay:
                other, call = await taken(*replicas)
                other.answer(call, "hello")
                assert texts(await read(stream, 1)) == ["hello"]
                return
            expected = "was lost while it executed the request; it may have had effects"
            with pytest.raises(InferenceError, match=expected):
                await soon(stream.batch())
    assert not any(each.calls for each in replicas)


@pytest.mark.parametrize("drains", [False, True], ids=["lost", "draining"])
async def test_a_text_that_was_sent_as_a_whole_needs_no_other_replica(
    tmp_path: Path, replicas: list[FakeReplica], drains: bool
) -> None:
    given = ModelInput(name=REQUEST, data_type=DataType.TYPE_STRING, dims=(1,))
    answer = ModelOutput(name=RESPONSE, data_type=DataType.TYPE_STRING, dims=(1,))
    config = replace(LLM, input=(given,), output=(answer,))
    for each in replicas:
        each.offer(offered(config))
    request = InferRequest(model="text", inputs=(text_tensor(REQUEST, ['{"messages": [{}]}']),))
    last = '{"id": "a", "created": 1, "choices": [{"text": "b", "finish_reason": "stop"}]}'
    async with routing(tmp_path, *replicas) as routed:
        with routed.dataplane.infer(request) as stream:
            found, call = await taken(*replicas)
            usage = Usage(completion_tokens=1)
            found.respond(
                call, InferResponse(outputs=(text_tensor(RESPONSE, [last]),), usage=usage)
            )
            await read(stream, 1)
            if drains:
                found.offer(*found.offers.models, state=ReplicaState.DRAINING)
                found.fail(call, STOPPED)
            else:
                found.lose()
            assert await soon(stream.batch()) == []
    assert not any(each.calls for each in replicas)


async def test_a_silent_replica_is_lost_and_its_late_text_is_dropped(
    tmp_path: Path, replicas: list[FakeReplica], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "PING_SECS", 0.01)
    monkeypatch.setattr(connection, "GONE_SECS", 0.3)
    async with routing(tmp_path, *replicas) as routed:
        with routed.dataplane.infer(generation()) as stream:
            silent, call = await taken(*replicas)
            silent.respond(call, text_response("b", tokens=1))
            await read(stream, 1)
            silent.silent, link = True, silent.links[-1]
            (other,) = [each for each in replicas if each is not silent]
            await until(lambda: bool(other.calls))
            link.send(InferenceKind.DATA, call, write_response(text_response("late")))
            other.respond(other.calls.pop(), text_response("c", tokens=1, final=True))
            assert texts(await read(stream, 1)) == ["c"]
