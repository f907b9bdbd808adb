"""Instances that die at replicas which stay connected: they are losses for their requests."""

import asyncio
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.config import ModelConfig
from gateway.errors import InferenceError, RefusedError, RetryLater, died, no_instance
from gateway.fleet import connection
from gateway.fleet.choice import ANY_REQUEST
from gateway.messages import InferRequest
from gateway.settings import FleetSettings, ModelSettings
from gateway.stream import ResponseStream
from tests.builders import soon, text_request, text_response, texts
from tests.conformance.models import identity
from tests.gateway.fleet.fake_replica import FakeReplica, listening, offered, until
from tests.gateway.fleet.in_one_loop import SETTINGS, running
from tests.gateway.fleet.large_ends import connecting, listening_port
from tests.gateway.fleet.losing import KEY, LLM, generation, read, taken
from tests.gateway.fleet.routing import NO_SUMS, Routed, routing, sums
from tests.serving import write_model

STREAMS = 30
"""Less than two seconds of work for a replica: none of them moves in a slow test."""
TEXT = identity("BYTES", "1", delay_us=300_000)
TEXT = TEXT.replace("INPUT", "text_input").replace("OUTPUT", "text_output")


@pytest.fixture
def hosted() -> ModelConfig:
    return LLM


def dead(instance: int = 7) -> InferenceError:
    """The error of a request whose instance has died."""
    return died("model 'text' failed: its engine has ended", instance)


def unable() -> InferenceError:
    """The refusal of a replica whose model has no instance."""
    refusal = RefusedError(dead().code, "model 'text' is unavailable: it is being restarted")
    refusal.lacks_instance = True
    return refusal


async def failure(stream: ResponseStream) -> str:
    """The error of a stream."""
    with pytest.raises(InferenceError) as caught:
        await soon(stream.batch())
    return caught.value.message


async def only_first(routed: Routed, replicas: list[FakeReplica]) -> FakeReplica:
    """The first replica, after the second has dropped the model."""
    replicas[1].offer()
    await until(lambda: not routed.router.connections[1].models)
    return replicas[0]


async def test_a_request_without_a_response_is_repeated_once_at_another_replica(
    routed: Routed, replicas: list[FakeReplica]
) -> None:
    with routed.dataplane.infer(generation()) as stream:
        first, call = await taken(*replicas)
        first.fail(call, dead())
        other, call = await taken(*replicas)
        assert other is not first
        other.answer(call, "hello")
        assert texts(await read(stream, 1)) == ["hello"]
    assert sums(routed) == {**NO_SUMS, "requests": 2, "retries": 1}
    assert all(each.serves(KEY) for each in routed.router.connections)


async def test_a_text_is_continued_at_another_replica(
    routed: Routed, replicas: list[FakeReplica]
) -> None:
    with routed.dataplane.infer(generation()) as stream:
        first, call = await taken(*replicas)
        first.respond(call, text_response("b", tokens=2))
        first.fail(call, dead())
        other, call = await taken(*replicas)
        assert other is not first
        assert other.requests[call].inputs[0].elements() == (b"ab",)
        other.respond(call, text_response("c", tokens=1, final=True))
        found = await read(stream, 2)
    assert texts(found) == ["b", "c"]
    assert found[-1].parameters == {"continued": 1}


async def test_a_text_that_is_not_continued_ends_with_the_death_and_the_reason(
    routed: Routed, replicas: list[FakeReplica]
) -> None:
    with routed.dataplane.infer(generation(seed=1)) as stream:
        first, call = await taken(*replicas)
        first.respond(call, text_response("b", tokens=2))
        await read(stream, 1)
        first.fail(call, dead())
        found = await failure(stream)
    assert found.startswith(f"{dead().message} (at replica ")
    assert found.endswith(", after 2 tokens were sent; not continued: the request has 'seed')")


async def test_a_continuation_that_fails_names_the_death_before_it(
    routed: Routed, replicas: list[FakeReplica]
) -> None:
    with routed.dataplane.infer(generation()) as stream:
        first, call = await taken(*replicas)
        first.respond(call, text_response("b", tokens=2))
        first.fail(call, dead())
        other, call = await taken(*replicas)
        other.fail(call, unable())
        await read(stream, 1)
        found = await failure(stream)
    assert found.startswith(f"{dead().message} (at replica ")
    assert "its continuation at another one failed: model 'text' is unavailable" in found


@pytest.mark.parametrize("error", [dead(), unable()], ids=["executed", "refused"])
async def test_a_request_that_may_have_had_effects_is_repeated_only_if_it_was_not_executed(
    tmp_path: Path, replicas: list[FakeReplica], error: InferenceError
) -> None:
    for each in replicas:
        each.offer(offered(replace(LLM, backend="python")))
    async with routing(tmp_path, *replicas) as routed:
        with routed.dataplane.infer(generation()) as stream:
            first, call = await taken(*replicas)
            first.fail(call, error)
            if not error.lacks_instance:
                assert await failure(stream) == dead().message
                return
            other, call = await taken(*replicas)
            other.answer(call, "hello")
            assert texts(await read(stream, 1)) == ["hello"]
    assert not any(each.calls for each in replicas)


@pytest.mark.parametrize("died_at_last", [False, True], ids=["answered", "died"])
async def test_a_request_that_replicas_have_no_instance_for_is_sent_to_all_in_turn(
    tmp_path: Path, replicas: list[FakeReplica], *, died_at_last: bool
) -> None:
    async with listening() as third, listening() as fourth:
        each_one = [*replicas, third, fourth]
        for each in each_one:
            each.offer(offered(LLM))
        async with routing(tmp_path, *each_one) as routed:
            with routed.dataplane.infer(generation()) as stream:
                asked = []
                for error in (unable(), unable(), dead() if died_at_last else unable()):
                    found, call = await taken(*each_one)
                    found.fail(call, error)
                    asked.append(found)
                found, call = await taken(*each_one)
                found.answer(call, "hello")
                assert texts(await read(stream, 1)) == ["hello"]
            assert len({*asked, found}) == 4
            assert sums(routed)["retries"] == 3


async def test_a_request_is_repeated_once_though_a_third_replica_had_no_instance(
    tmp_path: Path, replicas: list[FakeReplica]
) -> None:
    async with listening() as third, listening() as fourth:
        each_one = [*replicas, third, fourth]
        for each in each_one:
            each.offer(offered(LLM))
        async with routing(tmp_path, *each_one) as routed:
            with routed.dataplane.infer(generation()) as stream:
                for error in (dead(), unable()):
                    found, call = await taken(*each_one)
                    found.fail(call, error)
                last, call = await taken(*each_one)
                with routed.dataplane.infer(generation()) as equal:
                    found, clearing = await taken(*each_one)
                    found.answer(clearing, "no suspect")
                    await read(equal, 1)
                last.fail(call, dead())
                assert await failure(stream) == dead().message


@pytest.mark.parametrize("error", [dead(), unable()], ids=["executed", "refused"])
async def test_without_another_replica_a_request_has_the_error_of_its_own(
    routed: Routed, replicas: list[FakeReplica], error: InferenceError
) -> None:
    first = await only_first(routed, replicas)
    with routed.dataplane.infer(generation()) as stream:
        _, call = await taken(first)
        first.fail(call, error)
        assert await failure(stream) == error.message


async def test_one_death_under_many_streams_quarantines_none_and_pauses_no_replica(
    routed: Routed, replicas: list[FakeReplica]
) -> None:
    with ExitStack() as owner:
        streams = [
            owner.enter_context(routed.dataplane.infer(generation(str(number % 5))))
            for number in range(STREAMS)
        ]
        await until(lambda: sum(len(each.calls) for each in replicas) == STREAMS)
        first, other = replicas
        died_there = len(first.calls)
        for call in first.calls:
            first.fail(call, dead())
        await until(lambda: len(other.calls) == STREAMS)
        for call in other.calls:
            other.answer(call, "hello")
        assert [texts(await read(each, 1)) for each in streams] == [["hello"]] * STREAMS
    assert died_there > 3
    assert sums(routed)["quarantined"] == 0
    assert routed.router.connections[0].loads[KEY].left_out_until < 0


@pytest.mark.parametrize("second", [7, 8], ids=["same", "another"])
async def test_only_a_second_death_quarantines_a_request(
    routed: Routed, replicas: list[FakeReplica], second: int
) -> None:
    first = await only_first(routed, replicas)
    for number in (7, second):
        with routed.dataplane.infer(generation("bad")) as stream:
            _, call = await taken(first)
            first.fail(call, dead(number))
            found = await failure(stream)
    assert ("2 replicas or instances were lost" in found) is (second == 8)


async def test_a_replica_whose_instances_die_again_and_again_is_left_out(
    routed: Routed, replicas: list[FakeReplica]
) -> None:
    first = await only_first(routed, replicas)
    for number in (7, 8, 9):
        assert routed.router.connections[0].loads[KEY].left_out_until < 0
        with routed.dataplane.infer(generation(str(number))) as stream:
            _, call = await taken(first)
            first.fail(call, dead(number))
            await failure(stream)
    assert routed.router.connections[0].loads[KEY].left_out_until > 0


async def test_a_replica_that_has_no_instance_for_requests_has_not_failed(
    routed: Routed, replicas: list[FakeReplica]
) -> None:
    first = await only_first(routed, replicas)
    for _ in range(3):
        with routed.dataplane.infer(generation()) as stream:
            _, call = await taken(first)
            first.fail(call, no_instance("model 'text' failed: given up"))
            await failure(stream)
    assert routed.router.connections[0].loads[KEY].left_out_until < 0


async def test_a_replica_says_that_its_model_has_no_instance(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> ResponseStream:
        raise no_instance("model 'text' is unavailable: it is being restarted")

    async with listening_port() as replica:
        monkeypatch.setattr(replica.port._dataplane, "infer", refuse)  # noqa: SLF001
        async with connecting(replica.port.ports["fleet"]) as router:
            request = InferRequest(model="text", version="1", inputs=text_request().inputs)
            news = asyncio.Event()
            call = router.call(KEY, request, news.set, ANY_REQUEST)
            await soon(news.wait())
            with pytest.raises(RefusedError) as caught:
                call.take()
            call.leave()
    assert caught.value.lacks_instance


async def test_the_reason_and_the_times_of_a_refusal_reach_the_router(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> ResponseStream:
        raise RetryLater("no room in memory", 12.5)

    async with listening_port() as replica:
        monkeypatch.setattr(replica.port._dataplane, "infer", refuse)  # noqa: SLF001
        async with connecting(replica.port.ports["fleet"]) as router:
            request = InferRequest(model="text", version="1", inputs=text_request().inputs)
            news = asyncio.Event()
            call = router.call(KEY, request, news.set, ANY_REQUEST)
            await soon(news.wait())
            with pytest.raises(RetryLater) as caught:
                call.take()
            call.leave()
    assert caught.value.advice.retry_after_secs == 12.5


async def test_requests_at_an_instance_that_is_ended_are_answered_by_another_replica(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "FIRST_PAUSE_SECS", 0.01)
    write_model(tmp_path / "models", "text", TEXT)
    (tmp_path / "nothing").mkdir()
    hosting = replace(
        SETTINGS,
        models=ModelSettings(repositories=(tmp_path / "models",)),
        fleet=FleetSettings(port=0),
    )
    async with AsyncExitStack() as owner:
        hosts = [await owner.enter_async_context(running(hosting)) for _ in range(2)]
        places = tuple(("127.0.0.1", ports["fleet"]) for _, ports in hosts)
        routing_to = replace(
            SETTINGS,
            models=ModelSettings(repositories=(tmp_path / "nothing",)),
            fleet=FleetSettings(replicas=places),
        )
        router, _ = await owner.enter_async_context(running(routing_to))
        streams = [
            owner.enter_context(router.dataplane.infer(text_request(str(number))))
            for number in range(6)
        ]
        model = hosts[0][0].dataplane.model("text")
        await until(lambda: any(each.progress_ns for each in model.scheduler.executions))
        (instance,) = model.instances
        executing = sum(bool(each.progress_ns) for each in model.scheduler.executions)
        model.instances.restart(instance, "the test ends it")
        found = [texts(await soon(each.batch())) for each in streams]
        assert found == [[str(number)] for number in range(6)]
        assert router.dataplane.fleet is not None
        (retries,) = [
            each.samples[0].value
            for each in router.dataplane.fleet.families()
            if each.name == "gateway_fleet_retries_total"
        ]
        assert retries == executing
