"""The living processes that a server has started. All of them write to its log."""

import os
from pathlib import Path

from tests.serving import Serving, wait_until

ENGINE = "EngineCore"
WORKER = "Worker"
OTHERS = ("resource_tracker", "gateway.processes", "tests.fork_server")
"""Processes that end with their parent: Python's, our frontends, and those that fork others."""


class Processes:
    """The gateway's processes, told from others by the pipe that is their standard error.

    A title would not do, for a new process has none yet; nor would the parent, for it may have
    gone.
    """

    def __init__(self, server: Serving) -> None:
        self._gateways = [each.process.pid for each in server.hosts or (server,)]
        self._pipes = [os.readlink(f"/proc/{pid}/fd/2") for pid in self._gateways]

    def engines(self) -> list[int]:
        """Every process of an engine, from the moment it has been started."""
        found = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
        return [pid for pid in found if self._is_of_engine(pid)]

    def titled(self, word: str) -> list[int]:
        """The processes of an engine whose title has this word."""
        return [pid for pid in self.engines() if word in title(pid)]

    def wait_none(self, within: float) -> None:
        """Wait until no engine has a process."""
        wait_until(lambda: not self.engines(), "every process of the engines has ended", within)

    def _is_of_engine(self, pid: int) -> bool:
        mine = pid not in self._gateways and _writes_to(pid) in self._pipes
        return mine and not any(word in title(pid) for word in OTHERS)


def _writes_to(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/fd/2")
    except OSError:  # it has ended, or is not ours
        return ""


def title(pid: int) -> str:
    """The command of a process; "" if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""
