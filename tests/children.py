"""The processes that have a server's connections (`--frontends`), by what the system tells."""

from collections.abc import Sequence
from pathlib import Path


def frontends_of(server: int) -> Sequence[int]:
    """Those of the server with that process id."""
    return [pid for pid in children_of(server) if b"gateway.processes" in command(pid)]


def children_of(process: int) -> Sequence[int]:
    """The processes that the main thread of a process has started."""
    listed = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    return [int(pid) for pid in listed]


def command(pid: int) -> bytes:
    """The command line of a process; empty once it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return b""
