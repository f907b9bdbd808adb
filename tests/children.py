"""The processes that have a server's connections (`--frontends`), by what the system tells."""

from collections.abc import Sequence
from pathlib import Path


def frontends_of(server: int) -> Sequence[int]:
    """Those of the server with that process id."""
    listed = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    return [pid for pid in map(int, listed) if b"gateway.processes" in command(pid)]


def command(pid: int) -> bytes:
    """The command line of a process; empty once it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return b""
