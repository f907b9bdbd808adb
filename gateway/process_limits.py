"""Limits of this process: CPUs and memory by control groups, file descriptors, garbage."""

import asyncio
import gc
import logging
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")
MOUNT = Path("sys/fs/cgroup")

log = logging.getLogger("sluice.server")

RESERVED = 64
"""Size of the reserve; an eighth of the limit (`ulimit -n`) if that is less."""

LOG_SECS = 10.0
"""Minimum interval between log lines on dropped connections."""

COLLECTED_OBJECTS = 10_000
"""New objects, less deleted ones, that start a collection of the youngest; Python has 700."""


def collect_garbage_rarely() -> None:
    """Let this process collect garbage more rarely.

    With Python's threshold, collections took a fifth of the processor time of an import of vLLM and
    a twentieth of that of 256 streams, and stopped the event loop for up to 100 ms. Requests make
    few cycles of objects.
    """
    gc.set_threshold(COLLECTED_OBJECTS, *gc.get_threshold()[1:])


def processors() -> int:
    """The number of CPUs in the affinity of this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes(root: Path = ROOT) -> int | None:
    """The smallest memory limit of its control groups in bytes; None without a limit."""
    names = ("memory.max", "memory.limit_in_bytes")
    texts = (_text(folder / name) for folder in _folders(root, "memory") for name in names)
    return min((int(text) for text in texts if text.isdigit()), default=None)


def quota(root: Path = ROOT) -> float | None:
    """The smallest CPU quota of its control groups, in CPUs; None without a limit."""
    shares = (share for folder in _folders(root, "cpu") for share in _shares(folder))
    return min(shares, default=None)


def _shares(folder: Path) -> Iterator[float]:
    quota, _, period = _text(folder / "cpu.max").partition(" ")
    if not quota:
        quota = _text(folder / "cpu.cfs_quota_us")
        period = _text(folder / "cpu.cfs_period_us")
    if quota.isdigit() and period.isdigit():  # "max" and -1 are no limit
        yield int(quota) / int(period)


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """The control group of this process and its visible parents."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount = root / MOUNT
        elif controller in controllers.split(","):
            mount = root / MOUNT / controller
        else:
            continue
        inner = mount / path.lstrip("/")
        yield from (inner, *(each for each in inner.parents if each.is_relative_to(mount)))


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:  # the other version, or hidden from containers
        return ""


class DescriptorReserve:
    """Drops new connections of one port that would take a descriptor of the reserve.

    The system assigns the lowest free descriptor, so its number is the number of open ones.
    """

    def __init__(self) -> None:
        self._dropped = 0
        self._log_at = 0.0

    def drops(self, transport: asyncio.BaseTransport) -> bool:
        """Close a new connection that takes a descriptor of the reserve; whether it did."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        connection = transport.get_extra_info("socket")
        if connection is None or soft == resource.RLIM_INFINITY:
            return False
        if connection.fileno() < soft - min(RESERVED, soft // 8):
            return False
        transport.close()
        self._dropped += 1
        self._log(soft)
        return True

    def _log(self, limit: int) -> None:
        now = time.monotonic()
        if now >= self._log_at:
            log.warning("connections dropped", extra={"count": self._dropped, "ulimit_n": limit})
            self._dropped, self._log_at = 0, now + LOG_SECS
