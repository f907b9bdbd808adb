"""Options of exposure: admin ports, which alone answer changes of the server, and `--public`."""

import argparse
from dataclasses import replace
from typing import NamedTuple

from gateway.errors import Code, InferenceError
from gateway.flags.values import address, port
from gateway.policy.public import left_open
from gateway.settings import UNIX, Settings
from gateway.unix_socket import OWNER_ONLY

LOOPBACK = "127.0.0.1"
ADMIN, GRPC_ADMIN = "admin", "grpc-admin"


class _Place(NamedTuple):
    """The address and the port of a listener; a Unix socket has port 0."""

    address: str
    port: int


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the options to the parser."""
    group = parser.add_argument_group("exposure")
    for name, wire in ((ADMIN, "HTTP"), (GRPC_ADMIN, "gRPC")):
        group.add_argument(
            f"--{name}-port",
            type=port,
            metavar="PORT",
            help=f"a further port of {wire}; with an admin port of HTTP or gRPC, changes of the "
            "server are answered at admin ports only; 0 picks a free one (default: none)",
        )
        group.add_argument(
            f"--{name}-address",
            default=LOOPBACK,
            metavar="ADDR",
            help="its address, or unix:PATH instead of a port (default: %(default)s)",
        )
    group.add_argument(
        "--public",
        action="store_true",
        help="start only if nothing is open to strangers, and list what is; without the page at /, "
        "/docs and gRPC reflection, and with changes of the server at admin ports only",
    )
    group.add_argument(
        "--behind-proxy",
        action="store_true",
        help="with --public: a proxy has the TLS of the wires that have none here",
    )


def require_closed(flags: argparse.Namespace) -> None:
    """With `--public`: raise INVALID_ARG with a line for each part that is open to strangers."""
    found = left_open(vars(flags)) if flags.public else ()
    if found:
        lines = "\n".join(f"  {rule.part}: {rule.fix}" for rule in found)
        raise InferenceError(
            Code.INVALID_ARG,
            f"--public: the server does not start, since these parts are open:\n{lines}",
        )


def exposed(settings: Settings, flags: argparse.Namespace) -> Settings:
    """The settings with the admin ports, and with the parts shut that `--public` shuts."""
    http_at, grpc_at = _place(flags, ADMIN), _place(flags, GRPC_ADMIN)
    public = flags.public
    changes = not (public or http_at or grpc_at)
    http = replace(settings.http, changes=changes, documentation=not public)
    grpc = replace(settings.grpc, changes=changes, reflection=not public)
    admin = replace(http, enabled=True, changes=True)
    grpc_admin = replace(grpc, enabled=True, changes=True, reuse_port=False, socket_mode=OWNER_ONLY)
    return replace(
        settings,
        public=public,
        http=http,
        grpc=grpc,
        admin=replace(admin, **http_at._asdict()) if http_at else None,
        grpc_admin=replace(grpc_admin, **grpc_at._asdict()) if grpc_at else None,
    )


def _place(flags: argparse.Namespace, name: str) -> _Place | None:
    """The place of an admin port; None without one, INVALID_ARG for a half of one."""
    given = vars(flags)
    option = f"--{name}-address"
    number: int | None = given[f"{name}-port".replace("-", "_")]
    found = address(option, given[f"{name}-address".replace("-", "_")])
    is_unix = found.startswith(UNIX)
    if is_unix and number is not None:
        raise InferenceError(
            Code.INVALID_ARG, f"{option} '{found}' has no port, found --{name}-port={number}"
        )
    if number is None and not is_unix:
        if found == LOOPBACK:
            return None
        raise InferenceError(
            Code.INVALID_ARG, f"{option} '{found}' needs --{name}-port; none is given"
        )
    return _Place(found, number or 0)
