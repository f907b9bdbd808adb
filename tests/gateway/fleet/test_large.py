"""Calls with large tensors between a router and the port of a replica."""

import gc
import weakref
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest

from gateway.cuda_driver import DeviceMemory
from gateway.errors import Code, InferenceError
from gateway.fleet import large
from gateway.fleet.bulk import BulkConnection, IncomingTensor
from gateway.fleet.connection import ReplicaConnection
from gateway.fleet.handshake import FleetKind
from gateway.fleet.large import Arrival
from gateway.messages import InferResponse, SequenceTag
from gateway.processes.channel import number
from gateway.processes.inference_messages import LargeData, write_response
from gateway.tensor import Datatype, Tensor
from tests.builders import TEXT
from tests.conftest import tasks_left
from tests.gateway.fleet.fake_replica import FakeReplica, listening, offered, until
from tests.gateway.fleet.large_ends import (
    KEY,
    LARGE,
    Call,
    Replica,
    completes,
    connecting,
    listening_port,
    numbers,
    request,
    texts,
)


@pytest.fixture(autouse=True)
async def _no_task_is_left() -> AsyncIterator[None]:
    yield
    assert tasks_left() == []


@pytest.fixture
async def replica() -> AsyncIterator[Replica]:
    async with listening_port() as found:
        yield found


@pytest.fixture
async def router(replica: Replica) -> AsyncIterator[ReplicaConnection]:
    async with connecting(replica.port.ports["fleet"]) as found:
        yield found


TENSORS = {
    "numbers": (numbers(),),
    "many strings": (texts(*[b"a" * (each % 7) for each in range(20_000)]),),
    "a long string": (texts(b"a" * LARGE),),
    "two and a small one": (numbers(name="a"), texts(b"small"), numbers(LARGE + 1, "b")),
}


@pytest.mark.parametrize("tensors", TENSORS.values(), ids=TENSORS)
async def test_large_tensors_arrive_as_they_are(
    replica: Replica, router: ReplicaConnection, tensors: tuple[Tensor, ...]
) -> None:
    call = Call(router, request(*tensors, parameters={"a": 1}))
    asked = await replica.request()
    replica.streams[0].put(InferResponse(outputs=tensors, final=True))
    (response,) = await call.rest()
    assert asked.parameters == {"a": 1}
    for found in (asked.inputs, response.outputs):
        assert [(each.name, each.shape, bytes(each.raw())) for each in found] == [
            (each.name, each.shape, bytes(each.raw())) for each in tensors
        ]
    await until(lambda: replica.answers == 0)


async def test_memory_is_free_at_the_end_of_a_call(
    replica: Replica, router: ReplicaConnection
) -> None:
    gc.collect()
    gc.disable()
    try:
        await completes(router, replica)
        await until(lambda: replica.answers == 0)
        replica.asked.clear()
        replica.streams.clear()
        kept = [each for each in gc.get_objects() if type(each) in (Arrival, IncomingTensor)]
        assert not kept
    finally:
        gc.enable()


async def test_responses_keep_their_order(replica: Replica, router: ReplicaConnection) -> None:
    call = Call(router, request())
    await replica.request()
    sizes = [LARGE, 1, LARGE + 1, 2, 3]
    for size in sizes:
        replica.streams[0].put(InferResponse(outputs=(numbers(size),)))
    replica.streams[0].end()
    assert [each.outputs[0].count for each in await call.rest()] == sizes


@pytest.mark.parametrize("tensor", [numbers(), texts(bytes(LARGE - 4))], ids=["numbers", "text"])
async def test_large_responses_that_are_not_read_hold_back_their_replica(
    replica: Replica,
    router: ReplicaConnection,
    monkeypatch: pytest.MonkeyPatch,
    tensor: Tensor,
) -> None:
    sent: list[int] = []
    send = BulkConnection.send

    def count(self: BulkConnection, call: int, data: memoryview) -> None:
        sent.append(len(data))
        send(self, call, data)

    monkeypatch.setattr(BulkConnection, "send", count)
    call = Call(router, request())
    await replica.request()
    for _ in range(6):
        replica.streams[0].put(InferResponse(outputs=(tensor,)))
    replica.streams[0].end()
    await completes(router, replica)
    assert sent.count(LARGE) == 2 + 2  # 1 MiB of the call, and the request that has passed
    assert len(await call.rest()) == 6


async def test_a_request_of_a_sequence_waits_for_a_large_one_before_it(
    replica: Replica, router: ReplicaConnection
) -> None:
    tags = [SequenceTag(7, start=True), SequenceTag(7), SequenceTag(8, start=True)]
    sizes = [8 << 20, 1, 2]
    calls = [
        Call(router, request(numbers(size), sequence=tag))
        for size, tag in zip(sizes, tags, strict=True)
    ]
    await replica.request(3)
    assert [each.inputs[0].count for each in replica.asked] == [2, 8 << 20, 1]
    for each in calls:
        each.call.leave()


async def test_a_sequence_does_not_wait_for_a_request_that_has_left(
    replica: Replica, router: ReplicaConnection
) -> None:
    first = Call(router, request(numbers(32 << 20), sequence=SequenceTag(7, start=True)))
    second = Call(router, request(numbers(1), sequence=SequenceTag(7)))
    first.call.leave()
    assert (await replica.request()).inputs[0].count == 1
    second.call.leave()


def of_array(size: int) -> tuple[Tensor, "weakref.ref[Any]"]:
    """A tensor, and its memory."""
    array = np.zeros(size, np.uint8)
    return Tensor("n", Datatype.UINT8, (size,), array.data), weakref.ref(array)


def incoming(size: int) -> list[IncomingTensor]:
    """The tensors of that size that are being received."""
    found = [each for each in gc.get_objects() if type(each) is IncomingTensor]
    return [each for each in found if each.size == size]


async def test_a_client_that_leaves_ends_both_directions(
    replica: Replica, router: ReplicaConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    received: list[int] = []
    take = BulkConnection.buffer_updated

    def count(self: BulkConnection, size: int) -> None:
        received.append(size)
        take(self, size)

    monkeypatch.setattr(BulkConnection, "buffer_updated", count)
    asked, asked_memory = of_array(65 << 20)
    response, response_memory = of_array(64 << 20)
    asking, answered = Call(router, request(asked)), Call(router, request())
    await replica.request()
    replica.streams[0].put(InferResponse(outputs=(response,)))
    del asked, response
    await until(lambda: replica.answers == 2 and bool(incoming(64 << 20)))
    asking.call.leave()
    answered.call.leave()
    assert not any(each.memory for each in incoming(64 << 20))
    await until(lambda: replica.answers == 0)
    assert len(replica.asked) == 1
    assert replica.streams[0].cancelled
    await until(lambda: asked_memory() is None and response_memory() is None)
    assert sum(received) < 32 << 20
    await completes(router, replica)


async def test_the_timeout_of_a_request_includes_its_arrival(
    replica: Replica, router: ReplicaConnection
) -> None:
    call = Call(router, request(numbers(), timeout_us=10_000_000))
    asked = await replica.request()
    assert 0 < asked.timeout_us < 10_000_000
    assert asked.received_ns
    call.call.leave()


async def test_a_disconnecting_replica_waits_until_its_responses_have_arrived(
    replica: Replica, router: ReplicaConnection
) -> None:
    call = Call(router, request())
    await replica.request()
    replica.streams[0].put(InferResponse(outputs=(numbers(32 << 20),), final=True))
    for link in tuple(replica.port.links):
        link.finish(5)
    (response,) = await call.rest()
    assert response.outputs[0].count == 32 << 20
    await until(lambda: not replica.port.links)


async def test_a_lost_connection_of_large_tensors_loses_the_replica(
    replica: Replica, router: ReplicaConnection
) -> None:
    call = Call(router, request(numbers(32 << 20)))
    await until(lambda: replica.answers == 1)
    (link,) = replica.port.links
    link.bulk.abort()
    with pytest.raises(InferenceError, match="its replica has stopped"):
        await call.rest()
    assert call.call.is_lost
    await until(lambda: router.state is None)
    await until(lambda: router.serves(KEY))
    await completes(router, replica)


async def test_data_that_cannot_be_read_ends_its_call_only(
    replica: Replica, router: ReplicaConnection
) -> None:
    on_gpu = Tensor("n", Datatype.UINT8, (LARGE,), DeviceMemory(0, 0, LARGE, None))
    call = Call(router, request(on_gpu))
    with pytest.raises(InferenceError, match="have not arrived: found 1 of 1, complete 0"):
        await call.rest()
    await completes(router, replica)


def _no_tensor(replica: FakeReplica, call: int) -> None:
    large: list[LargeData] = []
    message = write_response(InferResponse(outputs=(numbers(),)), large)
    replica.links[-1].send(FleetKind.LARGE_DATA, call, number(len(large)) + message)


def _another_size(replica: FakeReplica, call: int) -> None:
    _no_tensor(replica, call)
    replica.bulk.send(call, memoryview(bytes(LARGE - 1)))


def _a_dropped_tensor(replica: FakeReplica, call: int) -> None:
    _no_tensor(replica, call)
    replica.bulk.send(call, memoryview(bytes(LARGE)))
    replica.bulk.drop(call)


def _no_response(replica: FakeReplica, call: int) -> None:
    replica.bulk.send(call, memoryview(bytes(LARGE)))


def _no_count(replica: FakeReplica, call: int) -> None:
    replica.links[-1].send(FleetKind.LARGE_DATA, call, b"")


@pytest.mark.parametrize(
    ("misbehave", "error"),
    [
        (_no_tensor, "have not arrived: found 0 of 1"),
        (_another_size, "malformed response .* has 599999 bytes, expected 600000"),
        (_a_dropped_tensor, "have not arrived: found 1 of 1, complete 0"),
        (_no_response, "internal error"),
        (_no_count, "internal error"),
    ],
)
async def test_a_malformed_large_response_ends_its_call_only(
    monkeypatch: pytest.MonkeyPatch, misbehave: Callable[[FakeReplica, int], None], error: str
) -> None:
    monkeypatch.setattr(large, "ANNOUNCED_SECS", 0.2)
    async with listening() as replica:
        replica.offer(offered(TEXT))
        async with connecting(replica.port) as router:
            bad, good = Call(router, request()), Call(router, request())
            await until(lambda: len(replica.calls) == 2)
            misbehave(replica, replica.calls[0])
            _no_tensor(replica, replica.calls[1])
            replica.bulk.send(replica.calls[1], memoryview(bytes(LARGE)))
            replica.links[-1].send(FleetKind.END, replica.calls[1])
            with pytest.raises(InferenceError, match=error):
                await bad.rest()
            assert len(await good.rest()) == 1
            bad.call.leave()
            assert len(replica.links) == 1


def _two_responses(replica: FakeReplica, call: int) -> None:
    """The second response begins before the tensors of the first one."""
    for _ in range(2):
        _no_tensor(replica, call)
    for _ in range(2):
        replica.bulk.send(call, memoryview(bytes(LARGE)))


def _too_many_bytes(replica: FakeReplica, call: int) -> None:
    replica.links[-1].send(FleetKind.LARGE_DATA, call, number(4))
    for _ in range(4):
        replica.bulk.send(call, memoryview(bytes(LARGE)))


@pytest.mark.parametrize("misbehave", [_two_responses, _too_many_bytes])
async def test_tensors_beyond_the_window_are_not_received_into_memory(
    monkeypatch: pytest.MonkeyPatch, misbehave: Callable[[FakeReplica, int], None]
) -> None:
    monkeypatch.setattr(large, "ANNOUNCED_SECS", 0.2)
    monkeypatch.setattr(large, "MOST_BYTES", 2 * LARGE)
    received: list[IncomingTensor] = []
    expect = BulkConnection.expect

    def note(self: BulkConnection, *announced: Any) -> IncomingTensor:
        received.append(expect(self, *announced))
        return received[-1]

    monkeypatch.setattr(BulkConnection, "expect", note)
    async with listening() as replica:
        replica.offer(offered(TEXT))
        async with connecting(replica.port) as router:
            call = Call(router, request())
            await until(lambda: bool(replica.calls))
            misbehave(replica, replica.calls[0])
            await until(lambda: bool(received) and all(each.is_over for each in received))
            with pytest.raises(InferenceError, match="have not arrived"):
                await call.rest()
            assert not any(each.memory for each in received)
            call.call.leave()


@pytest.mark.parametrize(
    ("most", "tensors", "reason"),
    [
        ({"MOST_BYTES": 2 * LARGE}, (numbers(), numbers()), "bytes, expected at most 1200000"),
        ({"MOST_BYTES": LARGE + 100}, (texts(b"a" * LARGE, *[b""] * 25),), "bytes, expected"),
        ({"MOST_TENSORS": 1}, (numbers(), numbers()), "2 large tensors, expected at most 1"),
    ],
    ids=["bytes", "strings", "tensors"],
)
async def test_a_message_with_too_many_bytes_is_refused_by_its_sender(
    replica: Replica,
    router: ReplicaConnection,
    monkeypatch: pytest.MonkeyPatch,
    most: dict[str, int],
    tensors: tuple[Tensor, ...],
    reason: str,
) -> None:
    for name, value in most.items():
        monkeypatch.setattr(large, name, value)
    with pytest.raises(InferenceError, match=reason) as refusal:
        Call(router, request(*tensors))
    assert refusal.value.code is Code.INVALID_ARG
    call = Call(router, request())
    await replica.request()
    replica.streams[0].put(InferResponse(outputs=tensors))
    with pytest.raises(InferenceError, match=reason) as refusal:
        await call.rest()
    assert refusal.value.code is Code.INVALID_ARG
    call.call.leave()


async def test_a_tensor_that_is_dropped_before_its_announcement_ends_its_message(
    replica: Replica, router: ReplicaConnection
) -> None:
    call = Call(router, request())
    await replica.request()
    (link,) = replica.port.links
    message = write_response(InferResponse(outputs=(numbers(),)), [])
    link.channel.send(FleetKind.LARGE_DATA, 1, number(1) + message)
    send, held = link.channel.send, list[Any]()
    link.channel.send = lambda *frame: held.append(frame)  # type: ignore[method-assign]
    link.bulk.send(1, memoryview(bytes(LARGE)))
    link.bulk.drop(1)
    await until(lambda: router._bulk is not None and router._bulk.is_waiting)  # noqa: SLF001
    for frame in held:
        send(*frame)
    with pytest.raises(InferenceError, match="found 1 of 1, complete 0"):
        await call.rest()
    call.call.leave()


async def test_without_its_connection_of_messages_that_of_large_tensors_ends() -> None:
    async with listening() as replica:
        replica.offer(offered(TEXT))
        async with connecting(replica.port):
            await until(lambda: replica.bulk.is_made)
            first = replica.bulk
            replica.links[-1].abort()
            await until(lambda: first.is_ended)
