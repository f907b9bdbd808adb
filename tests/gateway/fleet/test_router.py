"""The models of a router: where they come from, how they change, and how they go."""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from gateway.errors import Code, InferenceError, RefusedError
from gateway.fleet import connection
from gateway.fleet.choice import ReplicaState
from gateway.messages import SequenceTag
from gateway.models.loaded_models import ProgressWatch
from tests.builders import TEXT, add_model, soon, text_request
from tests.gateway.fleet.fake_replica import FakeReplica, offered, until
from tests.gateway.fleet.routing import Routed, answered, calls, routing, text

CHANGED = replace(TEXT, parameters={"replay": "true"})


@pytest.fixture(autouse=True)
def _short_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "FIRST_PAUSE_SECS", 0.01)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[str], int]:
    """The number of logged lines of a text."""
    caplog.set_level(logging.INFO, "sluice.fleet")
    return lambda text: sum(each.message == text for each in caplog.records)


async def test_a_model_of_replicas_is_served(routed: Routed, replicas: list[FakeReplica]) -> None:
    assert routed.config == TEXT
    assert await answered(routed, *replicas) in replicas
    model = routed.dataplane.model("text")
    await model.check_ready()
    assert 0 <= time.time() - model.loaded_at < 60


async def test_a_replica_with_another_configuration_is_refused_and_logged_once(
    routed: Routed,
    replicas: list[FakeReplica],
    lines: Callable[[str], int],
) -> None:
    kept, other = replicas
    refused = "offer refused"
    other.offer(offered(CHANGED))
    await until(lambda: lines(refused) == 1)
    for count in (2, 3):
        other.links[-1].abort()
        await until(lambda count=count: len(other.links) == count)
        other.offer(offered(CHANGED))
    for _ in range(5):
        assert await answered(routed, *replicas) is kept
    assert routed.config == TEXT
    assert lines(refused) == 1


async def test_a_model_of_the_routers_own_repository_is_preferred(
    tmp_path: Path, replicas: list[FakeReplica]
) -> None:
    add_model(tmp_path, "text", 'backend: "nothing"')
    replicas[0].offer(offered(TEXT), offered(replace(TEXT, name="other")))
    async with routing(tmp_path, *replicas) as routed:
        assert routed.dataplane.model("other").config.name == "other"
        with pytest.raises(InferenceError, match="no available versions"):
            routed.dataplane.model("text")


async def test_a_changed_configuration_of_all_replicas_replaces_the_model(
    routed: Routed, replicas: list[FakeReplica]
) -> None:
    before = routed.dataplane.model("text")
    with routed.dataplane.infer(text_request()) as stream:
        (found,) = await calls(*replicas)
        call = found.calls.pop()
        replicas[0].offer(offered(CHANGED))
        replicas[1].offer(offered(CHANGED))
        await until(lambda: routed.config == CHANGED)
        assert before.retired
        assert len(before.requests) == 1
        found.answer(call, "of the old one")
        assert text(await soon(stream.only())) == b"of the old one"
    await until(lambda: not before.requests)
    assert len(routed.dataplane.ready_versions("text")) == 1


async def test_both_replicas_serve_a_replaced_model(
    routed: Routed, replicas: list[FakeReplica]
) -> None:
    for each in replicas:
        each.offer(offered(CHANGED))
    await until(lambda: routed.config == CHANGED)
    found = {await answered(routed, *replicas) for _ in range(30)}
    assert found == set(replicas)


async def test_changed_labels_replace_the_model(
    routed: Routed, replicas: list[FakeReplica]
) -> None:
    for each in replicas:
        each.offer(msgspec.structs.replace(offered(TEXT), labels={"text_output": ("a",)}))
    await until(lambda: routed.dataplane.model("text").labels == {"text_output": ("a",)})


async def test_a_request_that_takes_long_at_its_replica_is_not_stopped_by_the_router(
    routed: Routed, replicas: list[FakeReplica]
) -> None:
    model = routed.dataplane.model("text")
    with routed.dataplane.infer(text_request()) as stream:
        (found,) = await calls(*replicas)
        ProgressWatch(stall_secs=1).look([model], time.perf_counter_ns() + 10**12)
        found.answer(found.calls.pop(), "late")
        assert text(await soon(stream.only())) == b"late"
    assert model.statistics.stalls == 0


EXITING = RefusedError(Code.UNAVAILABLE, "Server exiting")
STOPPED = InferenceError(Code.UNAVAILABLE, "the server stopped this execution")


async def test_a_request_that_a_draining_replica_refuses_is_sent_to_another(
    routed: Routed, replicas: list[FakeReplica]
) -> None:
    with routed.dataplane.infer(text_request()) as stream:
        (draining,) = await calls(*replicas)
        draining.offer(offered(TEXT), state=ReplicaState.DRAINING)
        draining.fail(draining.calls.pop(), EXITING)
        (other,) = await calls(*replicas)
        assert other is not draining
        other.answer(other.calls.pop(), "hello")
        assert text(await soon(stream.only())) == b"hello"


async def test_a_request_that_a_draining_replica_stops_is_not_executed_again(
    routed: Routed, replicas: list[FakeReplica]
) -> None:
    with routed.dataplane.infer(text_request()) as stream:
        (draining,) = await calls(*replicas)
        draining.offer(offered(TEXT), state=ReplicaState.DRAINING)
        draining.fail(draining.calls.pop(), STOPPED)
        with pytest.raises(InferenceError, match="stopped this execution"):
            await soon(stream.only())
    assert not any(each.calls for each in replicas)


async def test_a_model_that_all_replicas_have_dropped_is_not_ready(
    routed: Routed, replicas: list[FakeReplica]
) -> None:
    model = routed.dataplane.model("text")
    replicas[0].offer()
    await until(lambda: not routed.router.connections[0].models)
    assert await answered(routed, *replicas) is replicas[1]
    await model.check_ready()
    replicas[1].offer()
    await until(lambda: not routed.router.connections[1].models)
    with pytest.raises(InferenceError, match="it does not host the model") as caught:
        await model.check_ready()
    assert caught.value.code is Code.UNAVAILABLE
    with routed.dataplane.infer(text_request()) as stream, pytest.raises(InferenceError) as refused:
        await soon(stream.only())
    assert refused.value.message == caught.value.message
    assert routed.dataplane.ready
    replicas[0].offer(offered(TEXT))
    await until(lambda: bool(routed.router.connections[0].models))
    assert await answered(routed, *replicas) is replicas[0]


async def test_an_offer_that_cannot_be_used_leaves_the_others_and_the_router_in_service(
    routed: Routed, replicas: list[FakeReplica], lines: Callable[[str], int]
) -> None:
    first, second = replicas
    bad = replace(TEXT, name="bad", parameters={"max_in_flight": "many"})
    renamed = msgspec.structs.replace(offered(TEXT), name="renamed")
    first.offer(offered(bad), renamed, offered(replace(TEXT, name="later")), offered(TEXT))
    await until(lambda: lines("offer refused") == 2)
    assert routed.dataplane.model("later").ready
    for name in ("bad", "renamed"):
        with pytest.raises(InferenceError, match="is not found"):
            routed.dataplane.model(name)
    second.links[-1].abort()
    await until(lambda: len(second.links) == 2)
    assert await answered(routed, first, second) in replicas
    assert lines("offer refused") == 2


async def test_a_version_that_no_replica_hosts_any_more_leaves_the_requests_to_the_others(
    routed: Routed, replicas: list[FakeReplica]
) -> None:
    for each in replicas:
        each.offer(offered(TEXT, 1), offered(TEXT, 2))
    await until(lambda: len(routed.dataplane.ready_versions("text")) == 2)
    assert routed.dataplane.model("text").version == "2"
    for each in replicas:
        each.offer(offered(TEXT, 1))
    await until(lambda: len(routed.dataplane.ready_versions("text")) == 1)
    assert routed.dataplane.model("text").version == "1"
    replicas[0].offer(offered(TEXT, 1), offered(TEXT, 2))
    await until(lambda: len(routed.dataplane.ready_versions("text")) == 2)


async def test_a_model_of_one_instance_less_keeps_its_calls_and_its_connection(
    routed: Routed, replicas: list[FakeReplica]
) -> None:
    first, _ = replicas
    (link, _) = routed.router.connections
    for _ in range(3):
        await answered(routed, *replicas)
    known = link.loads["text", 1]
    first.offer(msgspec.structs.replace(offered(TEXT), concurrency=4))
    await until(lambda: known.concurrency == 4)
    first.offer()
    await until(lambda: not link.models)
    first.offer(offered(TEXT))
    await until(lambda: bool(link.models))
    assert link.loads["text", 1] is known
    assert len(first.links) == 1


async def test_a_request_between_the_loss_and_its_notice_is_answered_by_another(
    routed: Routed, replicas: list[FakeReplica]
) -> None:
    first, second = replicas
    lost, _ = routed.router.connections
    assert lost._channel is not None  # noqa: SLF001 - a loss that no task has noticed
    lost._channel.connection_lost(None)  # noqa: SLF001
    assert not lost.serves(("text", 1))
    assert await answered(routed, first, second) is second


async def test_a_sequence_stays_at_its_replica_when_others_come_and_while_it_drains(
    tmp_path: Path, replicas: list[FakeReplica]
) -> None:
    first, second = replicas
    second.offer()
    async with routing(tmp_path, first, second) as routed:

        async def place(number: int, *, start: bool = False) -> FakeReplica:
            request = replace(text_request(), sequence=SequenceTag(number, start=start))
            with routed.dataplane.infer(request) as stream:
                (found,) = await calls(*replicas)
                found.answer(found.calls.pop(), "hello")
                await soon(stream.only())
            return found

        numbers = range(1, 9)
        assert {await place(number, start=True) for number in numbers} == {first}
        second.offer(offered(TEXT))
        await until(lambda: all(each.serves(("text", 1)) for each in routed.router.connections))
        assert {await place(number) for number in numbers} == {first}
        first.offer(offered(TEXT), state=ReplicaState.DRAINING)
        await until(lambda: not routed.router.connections[0].serves(("text", 1)))
        assert {await place(number) for number in numbers} == {first}
        assert {await place(number, start=True) for number in numbers} == {second}
