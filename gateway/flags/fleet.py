"""Options of a fleet: those of a router, and those of a replica."""

import argparse
import re
from collections.abc import Mapping, Set
from dataclasses import replace
from pathlib import Path

import msgspec

from gateway.errors import Code, InferenceError
from gateway.flags.ray_fleet import replica_options
from gateway.flags.tls import add_files, mutual_settings
from gateway.flags.values import address, port, seconds
from gateway.policy.caller import is_this_machine
from gateway.settings import UNIX, FleetSettings

STATIC, DNS, RAY = "static:", "dns:", "ray"
HOST_NAME = re.compile(r"(?=.{1,254}$)[\w-]{1,63}(\.[\w-]{1,63})*\.?", re.ASCII)
ZONE = re.compile(r"[\w.-]{0,63}", re.ASCII)
IPV6 = re.compile(r"\[[0-9A-Fa-f:.]+\]")
EVERY = "0.0.0.0"
"""All IPv4 addresses of this machine."""
LEAST_SECRET_BYTES = 32


def left_out(text: str) -> Mapping[str, Set[int]]:
    """The versions of models in JSON such as {"m": [2]}."""
    try:
        return msgspec.json.decode(text, type=dict[str, set[int]])
    except msgspec.DecodeError:
        raise argparse.ArgumentTypeError('expected JSON such as {"m": [2]}') from None


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the options of a router, which a replica has too."""
    group, defaults = parser.add_argument_group("fleet"), FleetSettings()
    group.add_argument(
        "--fleet",
        metavar="static:HOST:PORT[,HOST:PORT...], dns:NAME:PORT or ray",
        help="send requests to the replicas at these addresses, at every address of a name in DNS, "
        "or in the Ray cluster of this machine, which hosts the repository (default: none)",
    )
    group.add_argument(
        "--fleet-name",
        default=defaults.name,
        metavar="NAME",
        help="name of the fleet; others are refused (default: %(default)s)",
    )
    group.add_argument(
        "--fleet-secret-file",
        type=Path,
        metavar="FILE",
        help=f"file of at least {LEAST_SECRET_BYTES} bytes, equal on all machines of the fleet; "
        "without it and without certificates replicas listen for this machine only (default: none)",
    )
    group.add_argument(
        "--fleet-address",
        metavar="HOST",
        help=f"address of --fleet-port (default: {defaults.address}, or {EVERY} with --fleet ray "
        "and a secret or certificates)",
    )
    group.add_argument(
        "--fleet-port",
        type=port,
        metavar="PORT",
        help="port for routers: of a replica, or of a router whose resumable streams and "
        "idempotency keys are to work at the others; 0 picks a free one (default: 8003 for a "
        "replica, 0 with --fleet ray, else none)",
    )
    group.add_argument(
        "--fleet-zone",
        default=defaults.zone,
        type=_zone,
        metavar="ZONE",
        help="zone of this machine: of replicas with equal waits one in the zone is preferred, "
        "and one on the machine to both (default: unknown)",
    )
    add_files(group, "fleet")
    parser.set_defaults(left_out=None)


def add_replica_flags(parser: argparse.ArgumentParser) -> None:
    """Add the model of a replica; its other options are those of a router."""
    parser.add_argument("model", metavar="MODEL", help="the model that it hosts")
    parser.add_argument(
        "--left-out",
        type=left_out,
        metavar="JSON",
        help='versions that it does not load, such as {"m": [2]}; with the option, also with {}, '
        "the replica has no rollouts of its own (default: none)",
    )
    parser.set_defaults(fleet_port=8003, allow_http=False, allow_grpc=False, allow_metrics=False)


def add_command_flags(parser: argparse.ArgumentParser) -> None:
    """Add the action of `sluice fleet` and its options."""
    defaults = FleetSettings()
    parser.add_argument("action", choices=("status", "down"), help="show it, or end it")
    parser.add_argument(
        "--fleet-name",
        default=defaults.name,
        metavar="NAME",
        help="name of the fleet (default: %(default)s)",
    )
    parser.add_argument(
        "--drain-secs",
        type=seconds,
        default=40.0,
        metavar="SECS",
        help="time limit of the drain of its replicas with `down` (seconds, default: %(default)g)",
    )


def fleet_settings(flags: argparse.Namespace) -> FleetSettings | None:
    """Settings from the parsed options, None outside of fleets; INVALID_ARG for wrong values."""
    is_replica = "model" in flags
    tls = mutual_settings(flags, "fleet")
    if not is_replica and flags.fleet is None:
        if (flags.fleet_secret_file, flags.fleet_port, tls) != (None, None, None):
            raise _invalid(
                "port, secret and certificates of a fleet have no effect without --fleet"
            )
        if flags.fleet_zone:
            raise _invalid("--fleet-zone has no effect without --fleet")
        return None
    if is_replica and flags.fleet is not None:
        raise _invalid("--fleet is an option of `sluice serve`: a replica sends no requests on")
    secret = b"" if flags.fleet_secret_file is None else _secret(flags.fleet_secret_file)
    found = FleetSettings(name=flags.fleet_name, secret=secret, tls=tls, zone=flags.fleet_zone)
    found = _with_port(found, flags)
    if is_replica:
        return found
    if flags.fleet == RAY:
        return replace(found, ray=replica_options(flags))
    return _with_replicas(found, flags.fleet)


def _zone(text: str) -> str:
    if not ZONE.fullmatch(text):
        raise argparse.ArgumentTypeError(
            f"'{text}', expected at most 63 letters, digits, '-', '_' and '.'"
        )
    return text


def _with_port(settings: FleetSettings, flags: argparse.Namespace) -> FleetSettings:
    """The settings with the port for routers, if there is one."""
    is_proven = bool(settings.secret or settings.tls)
    is_on_ray = flags.fleet == RAY
    number = 0 if flags.fleet_port is None and is_on_ray else flags.fleet_port
    if number is None:
        return settings
    usual = EVERY if is_on_ray and is_proven else settings.address
    host = address("--fleet-address", flags.fleet_address or usual)
    if not (is_proven or is_this_machine(host)):
        raise _invalid(
            f"--fleet-address {host} needs --fleet-secret-file or --fleet-server-cert: each "
            "process that reaches the port could send requests"
        )
    return replace(settings, address=host, port=number)


def _with_replicas(settings: FleetSettings, text: str) -> FleetSettings:
    if text.startswith(DNS):
        return replace(settings, dns=_name(text.removeprefix(DNS)))
    if text.startswith(STATIC):
        found = dict.fromkeys(map(_place, text.removeprefix(STATIC).split(",")))
        return replace(settings, replicas=tuple(found))
    raise _invalid(
        f"--fleet is '{text}', expected such as {STATIC}host1:8003,host2:8003 or {DNS}name:8003, "
        f"or {RAY}"
    )


def _place(text: str) -> tuple[str, int]:
    host, number = _split(text.strip())
    if not (host and number) or host.startswith(UNIX):
        raise _invalid(f"--fleet names the replica '{text}', expected HOST:PORT")
    return address("--fleet", host), number


def _name(text: str) -> tuple[str, int]:
    host, number = _split(text)
    if not (HOST_NAME.fullmatch(host) or IPV6.fullmatch(host)) or not number:
        raise _invalid(
            f"--fleet has '{text}' after {DNS}, expected one NAME:PORT such as "
            "replicas.default.svc:8003, with IPv6 addresses in brackets"
        )
    return address("--fleet", host), number


def _split(text: str) -> tuple[str, int]:
    """The host and the port of `HOST:PORT`; port 0 if it is wrong or missing."""
    host, _, number = text.rpartition(":")
    try:
        return host, port(number)
    except argparse.ArgumentTypeError:
        return host, 0


def _secret(path: Path) -> bytes:
    try:
        found = path.read_bytes().strip()
    except OSError as error:
        raise _invalid(f"--fleet-secret-file '{path}' cannot be read: {error.strerror}") from None
    if len(found) < LEAST_SECRET_BYTES:
        raise _invalid(
            f"--fleet-secret-file '{path}' has {len(found)} bytes, expected at least "
            f"{LEAST_SECRET_BYTES}: openssl rand -hex 32"
        )
    return found


def _invalid(text: str) -> InferenceError:
    return InferenceError(Code.INVALID_ARG, text)
