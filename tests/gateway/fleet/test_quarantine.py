"""Suspects that the routers of a fleet share through their replicas."""

import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError, died
from gateway.fleet import connection
from gateway.fleet.handshake import FleetKind
from gateway.fleet.quarantine import ModelSuspects, SharedSuspects
from gateway.messages import InferRequest
from gateway.policy.caller import Caller
from gateway.processes.channel import NO_CALL, Channel
from gateway.stream import ResponseStream
from gateway.suspects import KEPT_SECS, MOST, Suspects
from tests.builders import soon, text_request
from tests.gateway.fleet.fake_replica import FakeReplica, until
from tests.gateway.fleet.large_ends import Replica, connecting, listening_port
from tests.gateway.fleet.losing import LLM, back
from tests.gateway.fleet.routing import Routed, routing

KEY, LOAD = b"k" * 16, b"load"


class End(SharedSuspects):
    """One end of connections whose frames a test passes on; `now` is its time."""

    def __init__(self, *, relays: bool = False, now: float = 0.0) -> None:
        super().__init__(relays=relays)
        self.now = now
        self.known = Suspects(lambda: self.now)
        self.sent = 0

    def connect(self, other: "End") -> None:
        """Connect both ends."""
        here, there = _Wire(self), _Wire(other)
        here.far, there.far = there, here
        self.join(here.channel)
        other.join(there.channel)


class _Wire:
    """The channel of one end, whose frames the other end hears at once, or after `turn`."""

    def __init__(self, end: End) -> None:
        self.end = end
        self.far: _Wire | None = None
        self.channel: Any = self
        self.due: list[Callable[[], None]] | None = None

    def before_write(self, send: Callable[[], None]) -> None:
        if self.due is None:
            send()
        else:
            self.due.append(send)

    def turn(self) -> None:
        """End a turn of the event loop."""
        due, self.due = self.due or [], []
        for each in due:
            each()

    def send(self, kind: int, call: int, payload: bytes) -> None:
        assert (kind, call) == (FleetKind.SUSPECTS, NO_CALL)
        assert self.far is not None
        self.end.sent += 1
        self.far.end.hear(self.far.channel, payload)


def marks(end: End) -> list[set[object]]:
    return [each.ended for each in end.known.found.values()]


def test_a_replica_passes_suspects_and_their_answers_on_to_all_other_routers() -> None:
    routers, replicas = [End() for _ in range(3)], [End(relays=True) for _ in range(2)]
    for router in routers:
        for replica in replicas:
            router.connect(replica)
    routers[0].add(text_request(), LOAD, "one")
    routers[1].add(text_request(), LOAD, "two")
    for each in (*routers, *replicas):
        assert marks(each) == [{"one", "two"}]
    assert [each.sent for each in routers] == [2, 2, 0]
    assert [each.sent for each in replicas] == [4, 4]
    routers[2].clear(text_request(), LOAD)
    assert not any(map(marks, (*routers, *replicas)))


def test_a_later_end_gets_all_suspects_from_both_sides() -> None:
    first, replica, later = End(), End(relays=True), End(relays=True)
    first.connect(replica)
    first.add(text_request(), LOAD, "one")
    other = End()
    other.connect(replica)
    assert marks(other) == [{"one"}]
    first.connect(later)
    assert marks(later) == [{"one"}]


def test_the_suspects_of_a_turn_are_one_frame_for_each_end() -> None:
    router, replicas = End(), [End(relays=True) for _ in range(2)]
    for each in replicas:
        router.connect(each)
    wires: list[Any] = list(router._channels)  # noqa: SLF001 - the channels that it has
    for turn in (1, 2):
        for wire in wires:
            wire.due = []
        for number in range(9):
            router.add(text_request(f"{turn} {number}"), LOAD, "one")
        router.clear(text_request(f"{turn} 0"), LOAD)
        for wire in wires:
            wire.turn()
        assert router.sent == turn * len(replicas)
        assert [len(each.known.found) for each in replicas] == [8 * turn] * 2


def test_an_end_that_joins_in_a_turn_gets_the_suspects_before_and_after() -> None:
    router, replica, later = End(), End(relays=True), End(relays=True)
    router.connect(replica)
    wires: list[Any] = list(router._channels)  # noqa: SLF001 - the channels that it has
    wires[0].due = []
    router.add(text_request("before"), LOAD, "one")
    router.connect(later)
    router.add(text_request("after"), LOAD, "one")
    wires[0].turn()
    for each in (replica, later):
        assert len(each.known.found) == 2


def test_an_old_suspect_of_a_replica_does_not_hide_a_new_loss() -> None:
    first, replica, other = End(), End(relays=True), End()
    for router in (first, other):
        router.connect(replica)
    first.add(text_request(), LOAD, "one")
    for each in (first, replica, other):
        each.now = KEPT_SECS
    first.add(text_request(), LOAD, "one")
    assert marks(other) == [{"one"}]
    assert other.known.find(text_request(), LOAD)
    assert not other.add(text_request(), LOAD, "one").is_refused


def test_suspects_are_kept_for_ten_minutes_on_all_clocks() -> None:
    first, replica, later = End(now=5000.0), End(relays=True, now=1.0), End(now=70.0)
    first.connect(replica)
    first.add(text_request(), LOAD, "one")
    replica.now += 0.75 * KEPT_SECS
    later.add(text_request("new"), LOAD, "two")
    later.connect(replica)
    later.now += 0.2 * KEPT_SECS
    assert later.known.find(text_request(), LOAD)
    later.now += 0.1 * KEPT_SECS
    assert later.known.find(text_request(), LOAD) is None
    assert later.known.find(text_request("new"), LOAD)


def test_the_number_of_suspects_and_of_their_processes_has_a_limit() -> None:
    router, replica = End(), End(relays=True)
    router.connect(replica)
    for number in range(2 * MOST):
        replica.hear(_channel(), _frame(key=number.to_bytes(16, "big")))
    for number in range(9):
        replica.hear(_channel(), _frame(process=str(number)))
    assert len(replica.known.found) == len(router.known.found) == MOST
    assert replica.known.found[KEY].ended == {"0", "1"}


def _channel() -> Any:
    """A channel of another router."""
    return object()


def _frame(**fields: Any) -> bytes:
    whole = {"key": KEY, "size": 1, "process": "one", "age_secs": 0} | fields
    return msgspec.msgpack.encode([list(whole.values())])


MALFORMED = {
    "short-key": _frame(key=b"k"),
    "long-process": _frame(process="p" * 65),
    "negative-size": _frame(size=-1),
    "negative-age": _frame(age_secs=-1),
    "old": _frame(age_secs=KEPT_SECS + 1),
    "not-a-number": _frame(age_secs=float("nan")),
    "no-array": b"\x80",
    "cut-short": _frame()[:-3],
}


@pytest.mark.parametrize("payload", MALFORMED.values(), ids=MALFORMED)
async def test_a_router_that_sends_a_malformed_suspect_is_dropped_and_others_are_not(
    payload: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "sluice.fleet")
    async with listening_port() as replica:
        port = replica.port.ports["fleet"]
        async with connecting(port) as router, connecting(port) as neighbour:
            channels = [_open_channel(router), _open_channel(neighbour)]
            channels[0].send(FleetKind.SUSPECTS, NO_CALL, payload)
            await soon(channels[0].lost())
            assert not channels[1].is_lost
            assert replica.port.suspects.known.found == {}
    assert "router dropped" in caplog.messages


def _open_channel(router: connection.ReplicaConnection) -> Channel:
    channel = router._channel  # noqa: SLF001 - no method of it sends nonsense
    assert channel is not None
    return channel


@pytest.fixture
def hosted() -> ModelConfig:
    return LLM


async def test_a_replica_that_sends_a_malformed_suspect_is_connected_anew(
    routed: Routed, replicas: list[FakeReplica], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "FIRST_PAUSE_SECS", 0.01)
    replicas[0].send(FleetKind.SUSPECTS, MALFORMED["cut-short"])
    await until(lambda: len(replicas[0].links) == 2)
    await back(routed)
    assert len(replicas[1].links) == 1


async def test_a_port_of_a_replica_passes_suspects_on_and_keeps_them_for_later_routers() -> None:
    async with listening_port() as replica:
        port = replica.port.ports["fleet"]
        async with connecting(port) as first, connecting(port) as second:
            first.suspects.add(text_request(), LOAD, "one")
            await until(lambda: bool(second.suspects.known.found))
            async with connecting(port) as later:
                await until(lambda: bool(later.suspects.known.found))
        assert replica.port.suspects.known.found.keys() == first.suspects.known.found.keys()
        await until(lambda: not replica.port.links)
        for each in (first.suspects, replica.port.suspects):
            assert not each._channels  # noqa: SLF001 - a lost one stays with those that it has


async def dying(routed: Routed, replicas: list[Replica], instance: int) -> str:
    """Let the instance of a bad request die, which its client leaves then; its error, if any."""
    asked = [len(each.asked) for each in replicas]
    with routed.dataplane.infer(text_request("bad")) as stream:
        await until(lambda: [len(each.asked) for each in replicas] != asked)
        found = next(e for e, n in zip(replicas, asked, strict=True) if len(e.asked) > n)
        found.streams[-1].fail(died("its engine has ended", instance))
        other = next(each for each in replicas if each is not found)
        await until(lambda: len(other.asked) > asked[replicas.index(other)] or stream.done)
        return "" if not stream.done else await refusal(stream)


async def refusal(stream: ResponseStream) -> str:
    with pytest.raises(InferenceError) as caught:
        await soon(stream.batch())
    assert caught.value.code is Code.INVALID_ARG
    return caught.value.message


async def test_a_request_that_was_lost_once_by_each_of_two_routers_is_refused_by_both(
    tmp_path: Path,
) -> None:
    async with AsyncExitStack() as owner:
        replicas = [await owner.enter_async_context(listening_port()) for _ in range(2)]
        places = [SimpleNamespace(port=each.port.ports["fleet"]) for each in replicas]
        first, second = [
            await owner.enter_async_context(routing(tmp_path, *places)) for _ in range(2)
        ]
        assert await dying(first, replicas, 1) == ""
        shared = [each.router._suspects.known.found for each in (first, second)]  # noqa: SLF001
        await until(lambda: len(shared[1]) == 1)
        assert "2 replicas or instances were lost" in await dying(second, replicas, 2)
        await until(lambda: all(each.is_refused for each in shared[0].values()))
        for each in (first, second):
            with each.dataplane.infer(text_request("bad")) as stream:
                assert "the routers of this fleet refuse it" in await refusal(stream)
        asked = sum(len(each.asked) for each in replicas)
        with first.dataplane.infer(text_request("good")):
            await until(lambda: sum(len(each.asked) for each in replicas) > asked)


def test_only_members_of_a_fleet_can_compare_fingerprints() -> None:
    def key_of(secret: bytes, tenant: str = "a") -> bytes:
        shared = SharedSuspects(relays=False)
        model = ModelSuspects(shared, ("text", 1), b"digest", "sluice", secret)
        model.add(InferRequest(model="text", caller=Caller(tenant=tenant)), "one")
        (found,) = shared.known.found
        return found

    assert key_of(b"s" * 32) == key_of(b"s" * 32)
    assert len({key_of(b"s" * 32), key_of(b"o" * 32), key_of(b""), key_of(b"s" * 32, "b")}) == 4
