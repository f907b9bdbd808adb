"""On which CPUs do the server and the client run?"""

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager

Cpus = frozenset[int]
"""Empty: wherever the system likes."""


def parse_cpus(text: str) -> Cpus:
    """CPUs as `taskset -c` writes them: `0,2-3`."""
    found: set[int] = set()
    try:
        for part in text.split(","):
            first, _, last = part.partition("-")
            found.update(range(int(first), int(last or first) + 1))
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is no list of CPUs such as 0,2-3") from None
    if missing := found - os.sched_getaffinity(0):
        raise argparse.ArgumentTypeError(f"this machine does not lend CPU {min(missing)}")
    return frozenset(found)


@contextmanager
def pinned(cpus: Cpus) -> Iterator[None]:
    """What starts inside runs on these CPUs; afterwards the caller is where it was."""
    before = os.sched_getaffinity(0)
    try:
        if cpus:
            os.sched_setaffinity(0, cpus)
        yield
    finally:
        os.sched_setaffinity(0, before)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags `--server-cpus` and `--client-cpus`."""
    for who in ("server", "client"):
        parser.add_argument(
            f"--{who}-cpus",
            type=parse_cpus,
            default=Cpus(),
            metavar="LIST",
            help=f"run every {who} on these CPUs, such as 0,2-3 (default: all)",
        )
