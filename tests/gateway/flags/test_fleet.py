"""The options of a fleet become settings, and wrong ones are refused."""

import argparse
from collections.abc import Mapping, Set
from pathlib import Path

import pytest

from gateway.errors import InferenceError
from gateway.flags import fleet, serve
from gateway.settings import FleetSettings, Settings

PEM = ("--fleet-server-cert=c", "--fleet-server-key=k", "--fleet-root-cert=r")


def parse(*arguments: str) -> FleetSettings | None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    serve.add_flags(parser)
    return serve.settings(parser.parse_args(["--model-repository=m", *arguments])).fleet


def settings_of_replica(*arguments: str) -> Settings:
    parser = argparse.ArgumentParser(exit_on_error=False)
    serve.add_flags(parser)
    fleet.add_replica_flags(parser)
    return serve.settings(parser.parse_args(["model", "--model-repository=m", *arguments]))


def parse_replica(*arguments: str) -> FleetSettings:
    found = settings_of_replica(*arguments)
    assert found.listeners == {}
    assert found.fleet is not None
    return found.fleet


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    file = tmp_path / "secret"
    file.write_text("s" * 32 + "\n")
    return file


def test_a_server_has_no_part_in_a_fleet_by_default() -> None:
    assert parse() is None


def test_a_router_has_the_places_of_its_replicas_once(secret: Path) -> None:
    found = parse("--fleet=static:a:1, [::1]:2,a:1", f"--fleet-secret-file={secret}", *PEM)
    assert found is not None
    assert found.replicas == (("a", 1), ("::1", 2))
    assert (found.port, found.secret, found.name) == (None, b"s" * 32, "sluice")
    assert found.tls is not None
    assert found.tls.mutual
    assert "s" * 32 not in repr(found)


def test_routers_and_replicas_may_have_a_zone() -> None:
    found = parse("--fleet=static:a:1", "--fleet-zone=eu-west-1a")
    assert found is not None
    assert (found.zone, parse_replica("--fleet-zone=").zone) == ("eu-west-1a", "")
    for wrong in ("a b", "z" * 64):
        with pytest.raises(argparse.ArgumentError, match="expected at most 63 letters"):
            parse("--fleet=static:a:1", f"--fleet-zone={wrong}")
    with pytest.raises(InferenceError, match="--fleet-zone has no effect without --fleet"):
        parse("--fleet-zone=a")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("r.default.svc.cluster.local.:8003", ("r.default.svc.cluster.local.", 8003)),
        ("[::1]:2", ("::1", 2)),
        ("10.0.0.1:3", ("10.0.0.1", 3)),
    ],
)
def test_a_router_has_a_name_whose_addresses_are_its_replicas(
    text: str, found: tuple[str, int]
) -> None:
    assert parse(f"--fleet=dns:{text}") == FleetSettings(dns=found)


def test_a_replica_listens_for_its_own_machine_by_default() -> None:
    assert parse_replica() == FleetSettings(address="127.0.0.1", port=8003)


def test_a_replica_listens_for_others_with_a_secret_or_certificates(secret: Path) -> None:
    for flags in ((f"--fleet-secret-file={secret}",), PEM):
        found = parse_replica("--fleet-address=0.0.0.0", "--fleet-port=0", *flags)
        assert (found.address, found.port) == ("0.0.0.0", 0)
    with pytest.raises(InferenceError, match=r"0\.0\.0\.0 needs --fleet-secret-file or"):
        parse_replica("--fleet-address=0.0.0.0")


def test_a_router_listens_for_others_with_a_port(secret: Path) -> None:
    found = parse("--fleet=static:a:1", "--fleet-port=8003")
    assert found == FleetSettings(replicas=(("a", 1),), port=8003)
    proven = f"--fleet-secret-file={secret}"
    found = parse("--fleet=dns:a:1", "--fleet-port=0", "--fleet-address=0.0.0.0", proven)
    assert found is not None
    assert (found.address, found.port) == ("0.0.0.0", 0)
    with pytest.raises(InferenceError, match=r"0\.0\.0\.0 needs --fleet-secret-file or"):
        parse("--fleet=static:a:1", "--fleet-port=0", "--fleet-address=0.0.0.0")


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (
            ("--fleet=host:1",),
            "--fleet is 'host:1', expected such as static:host1:8003.* or dns:name",
        ),
        (("--fleet=static:host",), "names the replica 'host', expected HOST:PORT"),
        (("--fleet=static:host:0",), "names the replica 'host:0', expected HOST:PORT"),
        (("--fleet=static:unix:/x:1",), "names the replica 'unix:/x:1', expected HOST:PORT"),
        (("--fleet=dns:",), "has '' after dns:, expected one NAME:PORT such as"),
        (("--fleet=dns:name",), "has 'name' after dns:, expected one NAME:PORT"),
        (("--fleet=dns:name:0",), "has 'name:0' after dns:"),
        (("--fleet=dns:name:http",), "has 'name:http' after dns:"),
        (("--fleet=dns:a b:1",), "has 'a b:1' after dns:"),
        (("--fleet=dns:a..b:1",), r"has 'a\.\.b:1' after dns:"),
        (("--fleet=dns:a:1,b:1",), "has 'a:1,b:1' after dns:"),
        (("--fleet=dns:::1:1",), "has '::1:1' after dns:.*IPv6 addresses in brackets"),
        (("--fleet-secret-file=x",), "have no effect without --fleet"),
        (PEM, "have no effect without --fleet"),
        (("--fleet-port=0",), "have no effect without --fleet"),
        (("--fleet=static:a:1", "--fleet-secret-file={short}"), "has 5 bytes, expected at least"),
        (("--fleet=static:a:1", "--fleet-secret-file=/none"), "cannot be read: No such file"),
        (("--fleet=static:a:1", PEM[0]), "--fleet-server-cert needs --fleet-server-key"),
    ],
)
def test_wrong_options_are_refused(tmp_path: Path, flags: tuple[str, ...], reason: str) -> None:
    short = tmp_path / "short"
    short.write_text("short")
    with pytest.raises(InferenceError, match=reason):
        parse(*(each.format(short=short) for each in flags))


def test_a_replica_is_no_router() -> None:
    with pytest.raises(InferenceError, match="--fleet is an option of `sluice serve`"):
        parse_replica("--fleet=static:a:1")


@pytest.mark.parametrize(
    ("flags", "left_out"),
    [((), None), (("--left-out={}",), {}), (('--left-out={"m": [2, 3]}',), {"m": {2, 3}})],
    ids=["without", "empty", "versions"],
)
def test_a_replica_whose_controller_decides_on_rollouts_keeps_no_state_of_them(
    flags: tuple[str, ...], left_out: Mapping[str, Set[int]] | None
) -> None:
    found = settings_of_replica(*flags)
    assert found.models.left_out == left_out
    assert (found.state_directory is None) == (left_out is not None)


def test_versions_that_are_left_out_are_json() -> None:
    with pytest.raises(argparse.ArgumentError, match=r'expected JSON such as \{"m": \[2\]\}'):
        settings_of_replica("--left-out=m:2")
