"""The table of the routers of a fleet, and the router of a key."""

from collections import Counter
from collections.abc import Mapping

import msgspec
import pytest

from gateway.fleet.handshake import FleetKind, FleetRole, Handshake, Hello, Identity
from gateway.fleet.routers import Place, RouterTable, owner_of, read_table, write_table
from tests.gateway.fleet.fake_replica import FakeReplica, until
from tests.gateway.fleet.routing import Routed

A, B, C = "a" * 16, "b" * 16, "c" * 16
AT = {each: ("10.0.0.1", port) for port, each in enumerate((A, B, C), 8001)}


def hello(name: str, port: int) -> Hello:
    identity = Identity("sluice", FleetRole.ROUTER)
    identity.id, identity.port = name, port
    return msgspec.json.decode(Handshake(identity).hello(), type=Hello)


def test_a_router_of_the_replica_s_machine_is_at_the_host_of_the_replica() -> None:
    links = [(hello(A, 1), "127.0.0.1"), (hello(B, 2), "10.0.0.2"), (hello(C, 3), "::1")]
    table = read_table(write_table(links), "replica.svc")
    assert table == {A: ("replica.svc", 1), B: ("10.0.0.2", 2), C: ("replica.svc", 3)}


@pytest.mark.parametrize(
    "table",
    [
        [["a", "h", 1]],
        [[A, "", 1]],
        [[A, "h", 0]],
        [[A, "h", 65_536]],
        [[A, "h" * 256, 1]],
        [["a" * 65, "h", 1]],
        [[A, "h", 1]] * 1025,
        "a",
    ],
    ids=["id", "host", "port", "large port", "long host", "long id", "many", "text"],
)
def test_a_table_that_cannot_be_one_is_refused(table: object) -> None:
    with pytest.raises(msgspec.DecodeError):
        read_table(msgspec.msgpack.encode(table), "h")


async def test_a_replica_that_sends_another_table_is_dropped(
    routed: Routed, replicas: list[FakeReplica]
) -> None:
    replicas[0].send(FleetKind.ROUTERS, b"x")
    await until(
        lambda: any(
            "announcements cannot be used" in each.trouble for each in routed.router.connections
        )
    )
    assert replicas[1].links[0].is_lost is False


def test_the_routers_are_those_of_all_replicas() -> None:
    found: list[Mapping[str, list[Place]]] = []
    table = RouterTable(A, found.append)
    table.take("first", AT)
    assert found.pop() == {B: [AT[B]], C: [AT[C]]}
    table.take("second", {B: ("10.0.0.9", 9), C: AT[C]})
    assert found.pop() == {B: [AT[B], ("10.0.0.9", 9)], C: [AT[C]]}
    table.take("first", {})
    assert found.pop() == {B: [("10.0.0.9", 9)], C: [AT[C]]}
    table.take("first", {})
    assert not found
    table.take("second", {})
    assert found.pop() == {}


def test_keys_are_spread_over_the_routers_and_stay_when_another_one_leaves() -> None:
    keys = [("tenant", str(number)) for number in range(300)]
    owners = {key: owner_of(*key, (A, B, C)) for key in keys}
    assert min(Counter(owners.values()).values()) > 50
    assert all(owner_of(*key, (C, A)) == owner for key, owner in owners.items() if owner != B)
    assert owner_of("one", "key", "abcdefgh") != owner_of("other", "key", "abcdefgh")
