"""The handshake of a fleet: what agrees, and what is refused with which reason."""

from collections.abc import Callable

import msgspec
import pytest

from gateway.fleet.handshake import FleetKind, FleetRole, Handshake, HandshakeError, Identity
from gateway.processes.channel import NO_CALL, Frame

SECRET, OTHER = b"s" * 32, b"o" * 32


def end(role: FleetRole, fleet: str = "sluice", secret: bytes = SECRET) -> Handshake:
    return Handshake(Identity(fleet, role, secret))


def hello(payload: bytes) -> Frame:
    return Frame(FleetKind.HELLO, NO_CALL, payload)


def proof(payload: bytes | None) -> Frame:
    assert payload is not None
    return Frame(FleetKind.PROOF, NO_CALL, payload)


def agree(router: Handshake, replica: Handshake) -> None:
    """The frames in the order of the wire."""
    of_replica = replica.take(hello(router.hello()))
    of_router = router.take(hello(replica.hello()))
    router.take(proof(of_replica))
    replica.take(proof(of_router))


@pytest.mark.parametrize("secret", [b"", SECRET])
def test_a_router_and_a_replica_of_one_fleet_agree(secret: bytes) -> None:
    router, replica = end(FleetRole.ROUTER, secret=secret), end(FleetRole.REPLICA, secret=secret)
    agree(router, replica)
    assert router.peer is not None
    assert router.peer.role == FleetRole.REPLICA
    assert replica.peer is not None
    assert replica.peer.role == FleetRole.ROUTER


@pytest.mark.parametrize("name", ["final_ends", "settles"])
def test_only_a_router_of_this_release_says_how_its_calls_end(name: str) -> None:
    found = []
    for change in (changed(), without(name)):
        router, replica = end(FleetRole.ROUTER), end(FleetRole.REPLICA)
        of_replica = replica.take(hello(change(router.hello())))
        of_router = router.take(hello(replica.hello()))
        router.take(proof(of_replica))
        replica.take(proof(of_router))
        assert replica.peer is not None
        found.append(getattr(replica.peer, name))
    assert found == [True, False]


@pytest.mark.parametrize(
    ("router", "replica", "reason"),
    [
        (end(FleetRole.ROUTER, "a"), end(FleetRole.REPLICA, "b"), "found fleet 'a', expected 'b'"),
        (end(FleetRole.REPLICA), end(FleetRole.REPLICA), "found a replica, expected a router"),
        (end(FleetRole.ROUTER, secret=b""), end(FleetRole.REPLICA), "this end has a secret"),
        (end(FleetRole.ROUTER), end(FleetRole.REPLICA, secret=b""), "other end has a secret"),
        (
            end(FleetRole.ROUTER, secret=OTHER),
            end(FleetRole.REPLICA),
            "the secrets of the two ends differ",
        ),
    ],
)
def test_ends_that_differ_refuse_each_other(
    router: Handshake, replica: Handshake, reason: str
) -> None:
    with pytest.raises(HandshakeError, match=reason):
        agree(router, replica)
    assert router.peer is None
    assert replica.peer is None


def changed(**fields: object) -> Callable[[bytes], bytes]:
    """The same HELLO with other fields."""

    def change(payload: bytes) -> bytes:
        return msgspec.json.encode({**msgspec.json.decode(payload), **fields})

    return change


def without(name: str) -> Callable[[bytes], bytes]:
    """The same HELLO of a release that does not know a field."""

    def change(payload: bytes) -> bytes:
        fields = msgspec.json.decode(payload)
        del fields[name]
        return msgspec.json.encode(fields)

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (changed(protocol=2), "found protocol 2, expected 1"),
        (changed(protocol="1"), "HELLO cannot be read"),
        (changed(id="12345"), "HELLO cannot be read"),
        (changed(id="a" * 33), "HELLO cannot be read"),
        (changed(port=-1), "HELLO cannot be read"),
        (changed(port=65_536), "HELLO cannot be read"),
        (lambda _: b"GET / HTTP/1.1", "HELLO cannot be read"),
        (lambda _: b"", "HELLO cannot be read"),
        (lambda payload: payload[:-5], "HELLO cannot be read"),
    ],
    ids=[
        "protocol",
        "type",
        "short id",
        "long id",
        "negative port",
        "large port",
        "http",
        "empty",
        "cut",
    ],
)
def test_a_hello_that_is_none_is_refused(change: Callable[[bytes], bytes], reason: str) -> None:
    with pytest.raises(HandshakeError, match=reason):
        end(FleetRole.REPLICA).take(hello(change(end(FleetRole.ROUTER).hello())))


def test_fields_of_a_later_release_are_ignored() -> None:
    payload = changed(zone="a")(end(FleetRole.ROUTER).hello())
    assert end(FleetRole.REPLICA).take(hello(payload))


@pytest.mark.parametrize("kind", [FleetKind.PROOF, FleetKind.OFFERS, FleetKind.DATA])
def test_a_frame_before_hello_is_refused(kind: int) -> None:
    with pytest.raises(HandshakeError, match="expected HELLO"):
        end(FleetRole.REPLICA).take(Frame(kind, NO_CALL, b""))


def test_the_proof_of_the_other_end_is_not_accepted_as_its_own() -> None:
    router, replica = end(FleetRole.ROUTER), end(FleetRole.REPLICA)
    of_replica = replica.take(hello(router.hello()))
    with pytest.raises(HandshakeError, match="secrets"):
        replica.take(proof(of_replica))


def test_a_proof_of_an_earlier_connection_is_refused() -> None:
    router, replica = end(FleetRole.ROUTER), end(FleetRole.REPLICA)
    replica.take(hello(router.hello()))
    earlier = router.take(hello(replica.hello()))
    later = end(FleetRole.REPLICA)
    later.take(hello(router.hello()))
    with pytest.raises(HandshakeError, match="secrets"):
        later.take(proof(earlier))


def test_a_proof_for_another_link_is_refused() -> None:
    router = Handshake(Identity("sluice", FleetRole.ROUTER, SECRET), link="a")
    replica = end(FleetRole.REPLICA)
    replica.take(hello(changed(link="b")(router.hello())))
    with pytest.raises(HandshakeError, match="secrets"):
        replica.take(proof(router.take(hello(replica.hello()))))
    assert replica.link == "b"
    assert replica.peer is None


def test_the_reason_of_a_refusal_is_shown_without_control_characters() -> None:
    refusal = Frame(FleetKind.REFUSAL, NO_CALL, b"no\x1b[31m\xff")
    with pytest.raises(HandshakeError, match=r"refused by the other end: no\?\[31m\?"):
        end(FleetRole.ROUTER).take(refusal)


def test_a_secret_is_in_no_frame() -> None:
    router, replica = end(FleetRole.ROUTER), end(FleetRole.REPLICA)
    frames = [router.hello(), replica.hello(), replica.take(hello(router.hello())) or b""]
    assert not any(SECRET[:8] in each for each in frames)
