"""Options of `sluice key`."""

import argparse
import math
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from gateway.durations import read_seconds
from gateway.policy.keys import Role


def add_flags(command: argparse.ArgumentParser) -> None:
    """Add the actions and their options."""
    actions = command.add_subparsers(
        title="actions", required=True, metavar="ACTION", dest="action"
    )
    new = actions.add_parser("new", help="add a key; it is printed once")
    _add_file(new)
    new.add_argument("--tenant", required=True, metavar="NAME", help="the owner of the key")
    new.add_argument(
        "--role",
        type=roles,
        action="extend",
        metavar="ROLE[,ROLE...]",
        help=f"of {', '.join(Role)} (default: {Role.INFER})",
    )
    new.add_argument(
        "--expires",
        type=expiry,
        default=math.inf,
        metavar="TIME",
        help="90d, 12h, 30m, 4w, or a time as 2027-01-31T00:00:00Z (default: never)",
    )
    new.add_argument(
        "--models",
        type=lambda text: text.split(","),
        action="extend",
        default=[],
        metavar="GLOB[,GLOB...]",
        help="the models that exist for the key, as llama or minilm*, with the role infer alone "
        "(default: all)",
    )
    new.add_argument("--note", default="-", metavar="TEXT", help="a remark for the list")
    listing = actions.add_parser(
        "list", help="list the keys, without their secrets, and certificates"
    )
    _add_file(listing)
    revoke = actions.add_parser("revoke", help="remove a key; its requests in flight end")
    _add_file(revoke)
    revoke.add_argument("id", metavar="ID", help="the second part of the key: sk-sluice-ID-...")


def roles(text: str) -> Sequence[Role]:
    """The roles of an option."""
    try:
        return tuple(Role(each) for each in text.split(","))
    except ValueError:
        expected = ", ".join(Role)
        raise argparse.ArgumentTypeError(f"'{text}': expected some of {expected}") from None


def expiry(text: str) -> float:
    """The end of a duration that begins now, or a time; in seconds of the Unix epoch."""
    if secs := read_seconds(text):
        return math.ceil(time.time() + secs)
    try:
        end = datetime.fromisoformat(text)
    except ValueError:
        end = datetime.min
    if end.tzinfo is None:
        raise argparse.ArgumentTypeError(
            f"'{text}' is no time: expected 90d, 12h, 30m, 4w, or a time as 2027-01-31T00:00:00Z"
        )
    return end.timestamp()


def _add_file(action: argparse.ArgumentParser) -> None:
    action.add_argument(
        "--file",
        required=True,
        type=Path,
        metavar="FILE",
        help="the file of `sluice serve --api-keys`",
    )
