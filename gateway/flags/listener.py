"""The flags that every wire has: whether it is served, and where."""

import argparse

from gateway.flags.values import port, truth


def add_listener(
    group: "argparse._ArgumentGroup", wire: str, address: str, default_port: int
) -> None:
    """Add them; `address` and `default_port` are the defaults."""
    add_truth(group, f"--allow-{wire}", True, "serve it")
    group.add_argument(
        f"--{wire}-address",
        default=address,
        metavar="ADDR",
        help="address to listen on (default: %(default)s)",
    )
    group.add_argument(
        f"--{wire}-port",
        type=port,
        default=default_port,
        metavar="PORT",
        help="0 picks a free one (default: %(default)s)",
    )


def add_truth(group: "argparse._ArgumentGroup", flag: str, default: bool, text: str) -> None:
    """Add a flag that is true or false."""
    group.add_argument(
        flag,
        type=truth,
        default=default,
        metavar="true|false",
        help=f"{text} (default: {str(default).lower()})",
    )
