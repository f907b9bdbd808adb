"""A router's connection to a replica that is silent, announces nonsense, or goes."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import pytest

from gateway.errors import InferenceError
from gateway.fleet import connection
from gateway.fleet.choice import (
    ANY_REQUEST,
    FAR_SECS,
    NODE_SECS,
    ZONE_SECS,
    Demand,
    Location,
    ReplicaState,
)
from gateway.fleet.connection import ReplicaConnection
from gateway.fleet.handshake import FleetKind, FleetRole, HandshakeError, Identity
from gateway.fleet.offers import Key, first_load, write_load, write_prefixes
from gateway.fleet.prefixes import KeyChanges, KeyIndex
from gateway.fleet.prompts import PrefixIndexes
from gateway.processes.inference_calls import InferenceKind
from gateway.processes.inference_messages import write_response
from tests.builders import TEXT, soon, text_request, text_response
from tests.conftest import tasks_left
from tests.gateway.fleet.fake_replica import FakeReplica, listening, offered, until
from tests.gateway.fleet.large_ends import listening_port

KEY: Key = ("text", 1)
OFFER = offered(TEXT)
SILENT_SECS, GONE_SECS = 0.1, 0.5
"""A pause of this process itself has to be shorter than their difference."""


@pytest.fixture(autouse=True)
def _short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, secs in (
        ("PING_SECS", 0.01),
        ("SILENT_SECS", SILENT_SECS),
        ("GONE_SECS", GONE_SECS),
        ("FIRST_PAUSE_SECS", 0.01),
    ):
        monkeypatch.setattr(connection, name, secs)


@pytest.fixture(autouse=True)
async def _no_task_is_left() -> AsyncIterator[None]:
    yield
    assert tasks_left() == []


@pytest.fixture
async def replica() -> AsyncIterator[FakeReplica]:
    async with listening() as found:
        found.offer(OFFER)
        yield found


@asynccontextmanager
async def connecting(
    port: int, host: str = "127.0.0.1", indexes: PrefixIndexes | None = None, zone: str = ""
) -> AsyncIterator[ReplicaConnection]:
    """A connection to a port for the length of the block."""
    identity = Identity("sluice", FleetRole.ROUTER, zone=zone)
    if indexes is None:
        indexes = PrefixIndexes(partial(KeyIndex, most_of_replica=len(TOO_MANY) - 1))
    found = ReplicaConnection(host, port, identity, lambda: None, indexes)
    task = asyncio.create_task(found.run())
    try:
        yield found
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@pytest.fixture
async def router(replica: FakeReplica) -> AsyncIterator[ReplicaConnection]:
    async with connecting(replica.port) as found:
        await until(lambda: found.serves(KEY))
        yield found


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The logged warnings about replicas, with their reasons."""
    caplog.set_level(logging.WARNING, "sluice.fleet")
    return lambda: [f"{each.message}: {vars(each)['reason']}" for each in caplog.records]


async def test_a_replica_that_answers_pings_stays(
    monkeypatch: pytest.MonkeyPatch, replica: FakeReplica, router: ReplicaConnection
) -> None:
    # A pause of this process itself has to be shorter.
    monkeypatch.setattr(connection, "SILENT_SECS", 2 * GONE_SECS)
    monkeypatch.setattr(connection, "GONE_SECS", 2 * GONE_SECS)
    await asyncio.sleep(2 * GONE_SECS + 0.05)
    assert router.serves(KEY)
    assert len(replica.links) == 1


async def test_the_distance_to_a_replica_is_that_of_its_machine_and_zone(
    replica: FakeReplica,
) -> None:
    machine = replica.location.node
    found = []
    for place in (
        Location(machine),
        Location("other", "east"),
        Location("other", "west"),
        Location(),
    ):
        replica.location = place
        async with connecting(replica.port, zone="east") as router:
            await until(lambda router=router: router.serves(KEY))
            found.append(router.loads[KEY].distance_secs)
    assert found == [NODE_SECS, ZONE_SECS, FAR_SECS, FAR_SECS]


async def test_a_silent_replica_gets_nothing_new_and_then_is_lost(
    replica: FakeReplica, router: ReplicaConnection
) -> None:
    replica.silent = True
    await until(lambda: not router.serves(KEY))
    assert router.state is ReplicaState.READY
    await until(lambda: router.state is None)
    assert router.trouble == f"it has sent nothing for {GONE_SECS:g} s"


async def test_a_silent_replica_that_answers_again_gets_requests_again(
    replica: FakeReplica, router: ReplicaConnection
) -> None:
    replica.silent = True
    await until(lambda: not router.serves(KEY))
    replica.silent = False
    await until(lambda: router.serves(KEY))
    assert len(replica.links) == 1


async def test_a_lost_replica_is_connected_again(
    replica: FakeReplica, router: ReplicaConnection, lines: Callable[[], list[str]]
) -> None:
    replica.links[-1].abort()
    await until(lambda: router.state is None)
    await until(lambda: router.serves(KEY))
    assert lines() == ["replica lost: it has disconnected"]


LOAD = first_load(OFFER)
TOO_MANY = [n.to_bytes(8, "big") for n in range(5)]


NONSENSE = {
    "no offers": (FleetKind.OFFERS, b""),
    "no MessagePack": (FleetKind.OFFERS, b"\xc1"),
    "another state": (FleetKind.OFFERS, b"\x92\xa4GONE\x90"),
    "no offer": (FleetKind.OFFERS, b"\x92\xa5READY\x91\x91\x01"),
    "no load": (FleetKind.LOAD, b""),
    "half a load": (FleetKind.LOAD, write_load(KEY, LOAD)[:-1]),
    "negative load": (
        FleetKind.LOAD,
        msgspec.msgpack.encode([*KEY, 0, 0, 0, -1, 0.0, 0.05, 0.0, 5]),
    ),
    "foreign call": (FleetKind.LOAD, write_load(KEY, replace(LOAD, seen=7))),
    "no prefixes": (FleetKind.PREFIXES, b""),
    "half a key": (FleetKind.PREFIXES, msgspec.msgpack.encode([*KEY, b"1234567", b"", False])),
    "foreign key": (FleetKind.PREFIXES, write_prefixes(KEY, KeyChanges(lost=[b"12345678"]))),
    "too many keys": (FleetKind.PREFIXES, write_prefixes(KEY, KeyChanges(TOO_MANY))),
}
"""Announcements of a replica that cannot be used."""


@pytest.mark.parametrize(("kind", "payload"), NONSENSE.values(), ids=NONSENSE)
async def test_nonsense_drops_the_connection_and_it_is_made_again(
    replica: FakeReplica,
    router: ReplicaConnection,
    lines: Callable[[], list[str]],
    kind: int,
    payload: bytes,
) -> None:
    replica.send(kind, payload)
    await until(lambda: len(replica.links) == 2)
    await until(lambda: router.serves(KEY))
    (line,) = lines()
    assert line.startswith("replica lost: its announcements cannot be used: ")


async def test_the_same_nonsense_of_each_connection_is_logged_once(
    replica: FakeReplica, router: ReplicaConnection, lines: Callable[[], list[str]]
) -> None:
    for count in (2, 3, 4):
        replica.send(FleetKind.OFFERS, b"")
        await until(lambda count=count: len(replica.links) == count)
    assert len(lines()) == 1


async def test_a_load_of_an_unknown_model_is_ignored(
    replica: FakeReplica, router: ReplicaConnection, caplog: pytest.LogCaptureFixture
) -> None:
    replica.send(FleetKind.LOAD, write_load(("other", 1), LOAD))
    replica.send(FleetKind.LOAD, write_load(KEY, replace(LOAD, queued=3)))
    await until(lambda: router.loads[KEY].load.queued == 3)
    assert len(replica.links) == 1
    assert "frame not handled" not in caplog.text


def unheard() -> None:
    """News of a call that nothing reads."""


async def test_a_load_counts_the_calls_that_it_has_seen(
    replica: FakeReplica, router: ReplicaConnection
) -> None:
    calls = [router.call(KEY, text_request(), unheard, ANY_REQUEST) for _ in range(2)]
    assert router.loads[KEY].ahead == 2
    await until(lambda: len(replica.calls) == 2)
    load = replace(LOAD, seen=replica.calls[0], queued=1)
    replica.send(FleetKind.LOAD, write_load(KEY, load))
    await until(lambda: router.loads[KEY].load.queued == 1)
    assert router.loads[KEY].ahead == 2
    for each in calls:
        each.leave()
    assert (router.loads[KEY].ahead, router.loads[KEY].open_calls) == (0, set())


@pytest.mark.parametrize("has_end", [True, False], ids=["earlier release", "this release"])
async def test_a_final_response_ends_a_call_with_and_without_an_end(
    replica: FakeReplica, router: ReplicaConnection, has_end: bool
) -> None:
    call = router.call(KEY, text_request(), unheard, ANY_REQUEST)
    await until(lambda: len(replica.calls) == 1)
    payload = write_response(text_response("a", final=True))
    replica.links[-1].send(InferenceKind.DATA, replica.calls[0], payload)
    if has_end:
        replica.links[-1].send(InferenceKind.END, replica.calls[0])
    replica.send(FleetKind.LOAD, write_load(KEY, replace(LOAD, queued=3)))
    await until(lambda: router.loads[KEY].load.queued == 3)
    assert (call.take(), call.is_over) == (text_response("a", final=True), True)
    call.leave()
    assert router.loads[KEY].open_calls == set()
    router.call(KEY, text_request(), unheard, ANY_REQUEST)
    await until(lambda: len(replica.calls) == 2)
    assert replica.gone == []


async def test_a_response_ends_the_waiting_of_its_prompt(
    replica: FakeReplica, router: ReplicaConnection
) -> None:
    loaded = replace(LOAD, waiting_tokens=500, prefill_rate=1e4)
    replica.send(FleetKind.LOAD, write_load(KEY, loaded))
    await until(lambda: router.loads[KEY].ahead == 500)
    router.call(KEY, text_request(), unheard, Demand(tokens=1000))
    await until(lambda: len(replica.calls) == 1)
    replica.send(
        FleetKind.LOAD, write_load(KEY, replace(loaded, seen=replica.calls[0], waiting_tokens=1500))
    )
    await until(lambda: router.loads[KEY].load.waiting_tokens == 1500)
    assert router.loads[KEY].ahead == 1500
    replica.respond(replica.calls[0], text_response("a"), text_response("b"))
    await until(lambda: router.loads[KEY].ahead == 500)
    assert router.loads[KEY].open_calls == set(replica.calls)


async def test_a_lost_replica_ends_its_calls(
    replica: FakeReplica, router: ReplicaConnection
) -> None:
    news: list[bool] = []
    call = router.call(KEY, text_request(), lambda: news.append(True), ANY_REQUEST)
    replica.links[-1].abort()
    await until(lambda: call.is_lost)
    assert news == [True]
    with pytest.raises(InferenceError, match="its replica has stopped"):
        call.take()


@pytest.mark.parametrize("state", [ReplicaState.STARTING, ReplicaState.DRAINING])
async def test_a_replica_that_is_not_ready_gets_nothing_new(
    replica: FakeReplica, router: ReplicaConnection, state: ReplicaState
) -> None:
    replica.offer(OFFER, state=state)
    await until(lambda: not router.serves(KEY))
    assert router.state is state


async def test_a_model_that_is_not_ready_at_a_replica_gets_nothing_new(
    replica: FakeReplica, router: ReplicaConnection
) -> None:
    replica.offer(offered(TEXT, trouble="it restarts"))
    await until(lambda: not router.serves(KEY))


async def test_a_starting_replica_is_attempted_when_it_is_ready(replica: FakeReplica) -> None:
    replica.offer(OFFER, state=ReplicaState.STARTING)
    async with connecting(replica.port) as router:
        await until(lambda: router.state is ReplicaState.STARTING)
        assert not router.attempted.is_set()
        replica.offer(OFFER)
        await soon(router.attempted.wait())


async def test_a_replica_is_attempted_when_its_second_connection_is_made(
    replica: FakeReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, held = replica.send, list[bytes]()

    def hold(kind: int, payload: bytes) -> None:
        if kind == FleetKind.BULK:
            held.append(payload)
        else:
            send(kind, payload)

    monkeypatch.setattr(replica, "send", hold)
    async with connecting(replica.port) as router:
        await until(lambda: bool(held) and router.state is ReplicaState.READY)
        await asyncio.sleep(0.05)
        assert not router.serves(KEY)
        assert not router.attempted.is_set()
        send(FleetKind.BULK, held[0])
        await soon(router.attempted.wait())
        assert router.serves(KEY)


async def test_both_connections_are_to_the_same_address(
    replica: FakeReplica, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, hosts = asyncio.get_running_loop(), list[str]()
    create_connection = loop.create_connection

    def note(protocol: Any, host: str, *more: Any, **fields: Any) -> Any:
        hosts.append(host)
        return create_connection(protocol, host, *more, **fields)

    monkeypatch.setattr(loop, "create_connection", note)
    async with connecting(replica.port, "localhost") as router:
        await until(lambda: router.serves(KEY))
    assert hosts == ["localhost", "127.0.0.1"]


async def test_the_refusal_of_the_second_connection_is_logged(
    lines: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(nonce: str) -> None:
        raise HandshakeError("it is another replica")

    async with listening_port() as found:
        monkeypatch.setattr(found.port, "link", refuse)
        async with connecting(found.port.ports["fleet"]) as router:
            await soon(router.attempted.wait())
            await until(lambda: router.state is None)
    of_router = {each for each in lines() if each.startswith("replica ")}
    assert of_router == {"replica not reached: refused by the other end: it is another replica"}


async def test_a_replica_with_two_addresses_has_one_connection(
    replica: FakeReplica, lines: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A pause of this process itself does not end the first connection.
    monkeypatch.setattr(connection, "SILENT_SECS", 10.0)
    monkeypatch.setattr(connection, "GONE_SECS", 10.0)
    indexes = PrefixIndexes(KeyIndex)
    async with AsyncExitStack() as second_owner:
        async with connecting(replica.port, indexes=indexes) as first:
            await until(lambda: first.serves(KEY))
            replica.send(FleetKind.PREFIXES, write_prefixes(KEY, KeyChanges([b"12345678"])))
            second = await second_owner.enter_async_context(
                connecting(replica.port, "localhost", indexes)
            )
            await soon(second.attempted.wait())
            await asyncio.sleep(0.1)
            reason = f"replica {first.id} is connected at another address"
            assert lines() == [f"replica not reached: {reason}"]
            assert first.serves(KEY)
            assert not second.serves(KEY)
            assert len(indexes[KEY]) == len(replica.links) == 1
        await until(lambda: second.serves(KEY))
        assert len(indexes[KEY]) == 0


async def test_a_replica_that_cannot_be_reached_is_logged_once(
    lines: Callable[[], list[str]],
) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        async with connecting(closed.getsockname()[1]) as router:
            await soon(router.attempted.wait())
            await asyncio.sleep(0.1)
    (line,) = lines()
    assert line.startswith("replica not reached: Connect call failed")
