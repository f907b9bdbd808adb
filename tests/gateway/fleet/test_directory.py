"""A router follows the addresses of a name: new ones, those that go, and a resolver that fails."""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path

import pytest

from gateway.fleet import connection, directory, router
from gateway.fleet.directory import Addresses, by_name, resolved
from gateway.fleet.handshake import FleetKind
from gateway.fleet.routers import write_table
from tests.builders import TEXT, soon
from tests.gateway.fleet.fake_replica import FakeReplica, listening, offered, until
from tests.gateway.fleet.routing import Routed, answered, routing
from tests.gateway.fleet.test_routers import A, hello

AGE = "gateway_fleet_directory_age_seconds"


class Names:
    """A resolver whose `answer` is a list of replicas, an error, or None for silence."""

    def __init__(self, *replicas: FakeReplica) -> None:
        self.answer: tuple[FakeReplica, ...] | Exception | None = replicas
        self.asked = 0

    async def __call__(self, host: str, port: int) -> Addresses:
        assert (host, port) == ("replicas", 8003)
        self.asked += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        if self.answer is None:
            await asyncio.Future()
            raise AssertionError
        return tuple(("127.0.0.1", each.port) for each in self.answer)

    async def answers(self, count: int) -> None:
        """Wait until the router has this many further answers."""
        enough = self.asked + count + 1
        await until(lambda: self.asked >= enough)


@pytest.fixture(autouse=True)
def _short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "FIRST_PAUSE_SECS", 0.01)
    monkeypatch.setattr(directory, "PAUSE_SECS", 0.005)
    monkeypatch.setattr(directory, "ANSWER_SECS", 0.02)


@pytest.fixture
async def replica() -> AsyncIterator[FakeReplica]:
    async with listening() as found:
        found.offer(offered(TEXT))
        yield found


@pytest.fixture
async def names(replica: FakeReplica) -> Names:
    return Names(replica)


@pytest.fixture
async def routed(tmp_path: Path, names: Names) -> AsyncIterator[Routed]:
    async with routing(tmp_path, resolver=names) as found:
        yield found


@pytest.fixture
def reasons(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The reasons of failed look-ups, as they are logged."""
    text = "replicas not looked up"
    caplog.set_level(logging.INFO, "sluice.fleet")
    return lambda: [vars(each)["reason"] for each in caplog.records if each.message == text]


async def test_a_new_address_of_the_name_becomes_a_replica(
    routed: Routed, replica: FakeReplica, names: Names
) -> None:
    assert await answered(routed, replica) is replica
    async with listening() as other:
        other.offer(offered(TEXT))
        names.answer = (replica, other)
        await until(lambda: len(routed.router.connections) == 2)
        await until(lambda: all(each.serves(("text", 1)) for each in routed.router.connections))
        assert {await answered(routed, replica, other) for _ in range(30)} == {replica, other}
        assert (len(replica.links), len(other.links)) == (1, 1)


async def test_a_connected_replica_stays_without_its_address_until_it_is_lost(
    routed: Routed, replica: FakeReplica, names: Names
) -> None:
    async with listening() as other:
        names.answer = (other,)
        await names.answers(3)
        assert await answered(routed, replica) is replica
    replica.links[-1].abort()
    await until(lambda: len(routed.router.connections) == 1)
    assert routed.router.connections[0].address.endswith(f":{other.port}")


async def test_the_routers_of_a_lost_replica_are_known_until_its_address_is_dropped(
    routed: Routed, replica: FakeReplica, names: Names
) -> None:
    def known() -> list[str]:
        return [each["id"] for each in routed.router.relays.describe()]

    replica.send(FleetKind.ROUTERS, write_table([(hello(A, 8001), "10.0.0.1")]))
    await until(lambda: known() == [A])
    replica.links[-1].abort()
    await until(lambda: len(replica.links) == 2)
    assert known() == [A]
    async with listening() as other:
        names.answer = (other,)
        await names.answers(3)
        replica.links[-1].abort()
        await until(lambda: not known())


async def test_a_lost_replica_stays_while_one_answer_is_without_its_address(
    tmp_path: Path, replica: FakeReplica
) -> None:
    here, lost = ("127.0.0.1", replica.port), ("127.0.0.1", 1)
    asked = 0

    async def alternating(host: str, port: int) -> Addresses:
        nonlocal asked
        asked += 1
        return (here, lost) if asked % 2 else (here,)

    async with routing(tmp_path, resolver=alternating) as routed:
        before = routed.router.connections
        assert len(before) == 2
        await until(lambda: asked >= 8)
        assert routed.router.connections == before


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "Name or service"),
        (UnicodeError("label too long"), "label too long"),
        ((), "the name has no addresses"),
        (None, "the resolver has not answered for 0.02 s"),
    ],
    ids=["error", "name", "empty", "silent"],
)
async def test_a_resolver_without_an_answer_changes_nothing_and_is_logged_once(
    routed: Routed,
    replica: FakeReplica,
    names: Names,
    reasons: Callable[[], list[str]],
    answer: tuple[()] | Exception | None,
    reason: str,
) -> None:
    names.answer = answer
    await until(lambda: bool(reasons()))
    if answer is not None:
        await names.answers(3)
    replica.links[-1].abort()
    await until(lambda: len(replica.links) == 2)
    await until(lambda: routed.router.connections[0].serves(("text", 1)))
    assert await answered(routed, replica) is replica
    (found,) = reasons()
    assert found.startswith(reason)


async def test_each_failure_is_logged_once_until_there_is_an_answer(
    routed: Routed, replica: FakeReplica, names: Names, reasons: Callable[[], list[str]]
) -> None:
    for number, answer in enumerate(((), OSError("down"))):
        names.answer = answer
        await until(lambda number=number: len(reasons()) == number + 1)
    for answer in ((), OSError("down"), ()):
        names.answer = answer
        await names.answers(1)
    assert len(reasons()) == 2
    names.answer = (replica,)
    await names.answers(1)
    names.answer = ()
    await until(lambda: len(reasons()) == 3)


async def test_the_age_of_the_addresses_grows_until_the_resolver_has_some(
    routed: Routed, replica: FakeReplica, names: Names
) -> None:
    def age_secs() -> float:
        (found,) = [each for each in routed.router.families() if each.name == AGE]
        return found.samples[0].value

    names.answer = ()
    await names.answers(2)
    before = age_secs()
    await until(lambda: age_secs() > before + 0.02)
    grown = age_secs()
    names.answer = (replica,)
    await until(lambda: age_secs() < grown)


async def test_a_question_without_an_answer_is_asked_once_and_its_late_answer_counts() -> None:
    answer: asyncio.Future[Addresses] = asyncio.get_running_loop().create_future()
    asked = 0

    async def resolver(host: str, port: int) -> Addresses:
        nonlocal asked
        asked += 1
        return await answer

    async with aclosing(by_name("name", 1, resolver)) as answers:
        first = asyncio.ensure_future(anext(answers))
        await asyncio.wait((first,), timeout=0.1)
        assert (asked, first.done()) == (1, False)
        answer.set_result((("late", 1),))
        assert await soon(first) == (("late", 1),)


async def test_a_router_starts_while_its_resolver_is_silent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(router, "FIRST_ANSWER_SECS", 0.05)
    names = Names()
    names.answer = None
    async with routing(tmp_path, resolver=names) as routed:
        assert routed.dataplane.ready
        assert routed.router.connections == []


async def test_the_resolver_of_the_system_has_each_address_once() -> None:
    assert await soon(resolved("127.0.0.1", 8003)) == (("127.0.0.1", 8003),)
    found = await soon(resolved("localhost", 8003))
    assert ("127.0.0.1", 8003) in found
    assert len(set(found)) == len(found)
