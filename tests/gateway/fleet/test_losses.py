"""Replicas that are lost or fail while they execute requests."""

import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.config import ModelInput, ModelOutput
from gateway.config.data_type import DataType
from gateway.errors import Code, InferenceError, RefusedError
from gateway.fleet import connection, pauses
from gateway.fleet.choice import ReplicaState
from gateway.messages import InferRequest, InferResponse, Usage
from gateway.observability.statistics import QUEUE_TIMEOUT
from gateway.openai_contract import REQUEST, RESPONSE
from gateway.processes.inference_calls import InferenceKind
from gateway.processes.inference_messages import write_response
from gateway.stream import ResponseStream
from gateway.tensor import text_tensor
from tests.builders import DECOUPLED, TEXT, soon, text_request, text_response, texts
from tests.gateway.fleet.fake_replica import FakeReplica, listening, offered, until
from tests.gateway.fleet.routing import Routed, calls, routing

KEY = ("text", 1)
LLM = replace(TEXT, backend="vllm", model_transaction_policy=DECOUPLED)
STOPPED = InferenceError(Code.UNAVAILABLE, "the engine has stopped")


@pytest.fixture(autouse=True)
def _short_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "FIRST_PAUSE_SECS", 0.01)


@pytest.fixture
async def replicas() -> AsyncIterator[list[FakeReplica]]:
    """Two replicas of a model that continues texts."""
    async with AsyncExitStack() as owner:
        found = [await owner.enter_async_context(listening()) for _ in range(2)]
        for each in found:
            each.offer(offered(LLM))
        yield found


@pytest.fixture
async def routed(tmp_path: Path, replicas: list[FakeReplica]) -> AsyncIterator[Routed]:
    async with routing(tmp_path, *replicas) as found:
        yield found


def generation(text: str = "a", **parameters: int) -> InferRequest:
    return text_request(text, parameters={"max_tokens": 9} | parameters)


async def taken(*replicas: FakeReplica) -> tuple[FakeReplica, int]:
    """The only replica with a request, and its number there."""
    (found,) = await calls(*replicas)
    return found, found.calls.pop()


async def read(stream: ResponseStream, count: int) -> list[InferResponse]:
    """The next responses of a stream."""
    found: list[InferResponse] = []
    while len(found) < count:
        found += await soon(stream.batch())
    return found


async def lose_after(stream: ResponseStream, text: str, *replicas: FakeReplica) -> FakeReplica:
    """Lose the replica of a request after a text of two tokens; the replica."""
    found, call = await taken(*replicas)
    found.respond(call, text_response(text, tokens=2))
    assert texts(await read(stream, 1)) == [text]
    found.lose()
    return found


async def back(routed: Routed) -> None:
    """Wait until all replicas are connected."""
    await until(lambda: all(each.serves(KEY) for each in routed.router.connections))


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
            expected = "after 2 tokens were sent; not continued: .* 2 replicas were lost"
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


async def test_the_first_response_of_a_continuation_ends_the_pauses_of_its_replica(
    routed: Routed, replicas: list[FakeReplica], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await failing(routed, replicas, STOPPED) is replicas[0]
    load = routed.router.connections[0].loads[KEY]
    with routed.dataplane.infer(generation("text")) as stream:
        assert await lose_after(stream, "b", replicas[1]) is replicas[1]
        _, call = await taken(replicas[0])
        assert load.refused_until > 0
        replicas[0].respond(call, text_response("c", tokens=1))
        await read(stream, 1)
        assert load.refused_until < 0


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


async def test_a_text_that_was_sent_as_a_whole_needs_no_other_replica(
    tmp_path: Path, replicas: list[FakeReplica]
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


async def lost_twice(routed: Routed, replicas: list[FakeReplica], request: InferRequest) -> str:
    """Lose the replica of a request, and the next one; the error."""
    with routed.dataplane.infer(request) as stream:
        for _ in range(2):
            found, _ = await taken(*replicas)
            found.lose()
        with pytest.raises(InferenceError) as caught:
            await soon(stream.batch())
    await back(routed)
    return caught.value.message


async def test_a_request_that_two_lost_replicas_executed_is_refused_for_ten_minutes(
    routed: Routed, replicas: list[FakeReplica], caplog: pytest.LogCaptureFixture
) -> None:
    refusal = await lost_twice(routed, replicas, generation("bad"))
    assert "2 replicas were lost while they executed one with the same inputs" in refusal
    assert "this router refuses it for 10 minutes" in refusal
    with routed.dataplane.infer(generation("bad")) as stream:
        with pytest.raises(InferenceError) as caught:
            await soon(stream.batch())
        assert (caught.value.code, caught.value.message) == (Code.INVALID_ARG, refusal)
    assert "request quarantined" in caplog.messages
    with routed.dataplane.infer(generation("good")) as stream:
        found, call = await taken(*replicas)
        found.answer(call, "hello")
        assert texts(await read(stream, 1)) == ["hello"]


async def test_requests_of_one_content_at_one_lost_replica_are_not_refused(
    routed: Routed, replicas: list[FakeReplica]
) -> None:
    replicas[1].offer()
    await until(lambda: not routed.router.connections[1].models)
    with routed.dataplane.infer(generation()) as one, routed.dataplane.infer(generation()) as two:
        await until(lambda: len(replicas[0].calls) == 2)
        replicas[0].lose()
        for each in (one, two):
            with pytest.raises(InferenceError, match="was lost while it executed the request"):
                await soon(each.batch())


async def test_an_answer_clears_a_request(routed: Routed, replicas: list[FakeReplica]) -> None:
    for _ in range(3):
        with routed.dataplane.infer(generation()) as stream:
            (await taken(*replicas))[0].lose()
            found, call = await taken(*replicas)
            found.answer(call, "hello")
            assert texts(await read(stream, 1)) == ["hello"]
        await back(routed)


async def failing(
    routed: Routed, replicas: list[FakeReplica], error: InferenceError
) -> FakeReplica | None:
    """Let the first replica fail until it is left out; the second answers. None: it is not."""
    first, _ = replicas
    failures = 0
    for number in range(40):
        with routed.dataplane.infer(generation(str(number))) as stream:
            found, call = await taken(*replicas)
            if found is first:
                found.fail(call, error)
                failures += 1
                with pytest.raises(InferenceError):
                    await soon(stream.batch())
            else:
                found.answer(call, "hello")
                await read(stream, 1)
    return first if failures == pauses.FAILURES else None


async def test_a_replica_is_left_out_after_three_failures_and_one_request_tries_it_later(
    routed: Routed, replicas: list[FakeReplica], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await failing(routed, replicas, STOPPED) is replicas[0]
    connected, _ = routed.router.connections
    monkeypatch.setattr(connected.loads[KEY], "refused_until", 0.0)
    with ExitStack() as owner:
        for number in range(9):
            owner.enter_context(routed.dataplane.infer(generation(f"later {number}")))
        await until(lambda: sum(len(each.calls) for each in replicas) == 9)
        assert len(replicas[0].calls) == 1
        replicas[0].answer(replicas[0].calls.pop(), "well again")
        await until(lambda: connected.loads[KEY].refused_until < 0)


@pytest.mark.parametrize(
    "error",
    [
        RefusedError(Code.UNAVAILABLE, "it has no room"),
        InferenceError(Code.UNAVAILABLE, QUEUE_TIMEOUT),
        InferenceError(Code.INVALID_ARG, "no such parameter"),
    ],
    ids=["no-room", "timeout", "mistake"],
)
async def test_an_error_of_load_or_of_a_request_is_no_failure_of_its_replica(
    routed: Routed, replicas: list[FakeReplica], error: InferenceError
) -> None:
    assert await failing(routed, replicas, error) is None


async def test_a_draining_replica_that_ends_its_requests_does_not_pause(
    routed: Routed, replicas: list[FakeReplica]
) -> None:
    first, second = replicas
    second.offer()
    await until(lambda: not routed.router.connections[1].models)
    with ExitStack() as owner:
        streams = [
            owner.enter_context(routed.dataplane.infer(generation(str(number), seed=1)))
            for number in range(3)
        ]
        await until(lambda: len(first.calls) == 3)
        first.offer(*first.offers.models, state=ReplicaState.DRAINING)
        for call in first.calls:
            first.fail(call, STOPPED)
        for each in streams:
            with pytest.raises(InferenceError, match="the engine has stopped"):
                await soon(each.batch())
    assert routed.router.connections[0].loads[KEY].refused_until < 0


async def test_an_error_of_a_refused_request_that_still_executes_is_its_own(
    tmp_path: Path, replicas: list[FakeReplica]
) -> None:
    async with listening() as third:
        replicas.append(third)
        third.offer(offered(LLM))
        async with routing(tmp_path, *replicas) as routed:
            with routed.dataplane.infer(generation("bad")) as stream:
                own, call = await taken(*replicas)
                others = [each for each in replicas if each is not own]
                assert "2 replicas were lost" in await lost_twice(routed, others, generation("bad"))
                own.fail(call, InferenceError(Code.INVALID_ARG, "no such parameter"))
                with pytest.raises(InferenceError, match="no such parameter"):
                    await soon(stream.batch())


async def test_a_replica_that_is_lost_three_times_is_left_out(
    routed: Routed, replicas: list[FakeReplica]
) -> None:
    first, second = replicas
    for _ in range(3):
        first.lose()
        await until(lambda: routed.router.connections[0].state is None)
        await back(routed)
    with ExitStack() as owner:
        for number in range(9):
            owner.enter_context(routed.dataplane.infer(generation(str(number))))
        await until(lambda: len(second.calls) == 9)


async def test_the_only_replica_is_tried_also_after_failures(
    routed: Routed, replicas: list[FakeReplica]
) -> None:
    first, second = replicas
    second.offer()
    await until(lambda: not routed.router.connections[1].models)
    for _ in range(9):
        with routed.dataplane.infer(generation()) as stream:
            await until(lambda: bool(first.calls))
            first.fail(first.calls.pop(), STOPPED)
            with pytest.raises(InferenceError, match="the engine has stopped"):
                await soon(stream.batch())
