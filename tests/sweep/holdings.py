"""The things a process holds that a request may leave behind: the sweep compares them."""

import asyncio
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from backends.python.worker.sluice_worker.protocol import IDLE_COUNT

SHARED = ("/dev/shm/", "/memfd:")
POOLED = ("asyncio", "ThreadPoolExecutor")
"""Threads of these pools stay for the next use."""
SERVER_POOLED = ("loads_", "requests_", "rollouts_", "state-reads_", "state-writes_")
"""Threads of these pools stay until the server has ended."""
SEGMENTS = IDLE_COUNT
"""Idle segments between the gateway and a worker that stay for the next use: the limit of a pool.

A sweep of large requests grew one from 18 to 30 at once and no further; a leak exceeds the limit.
"""


@dataclass(frozen=True, slots=True)
class Holdings:
    """By kind, and by name how many; those of one kind and name are alike."""

    counts: Mapping[str, Counter[str]]

    @classmethod
    def now(cls) -> "Holdings":
        """Those of this process, less the task that asks."""
        return cls({kind: Counter(find()) for kind, find in KINDS.items()})

    def exceeded(self, *, of_pools: bool = False) -> Iterator[str]:
        """Each kind of which more is held now, with the difference.

        Threads of the server's own pools count if they are asked for, `of_pools`.
        """
        for kind, find in KINDS.items():
            now = Counter(find())
            more = {
                name: count
                for name, count in (now - self.counts[kind]).items()
                if (of_pools or not name.startswith(SERVER_POOLED))
                and (not name.startswith("/memfd:") or now[name] > SEGMENTS)
            }
            if more:
                yield f"{kind}: {more}"


def children() -> Iterable[int]:
    """The processes that this one has started and not yet reaped."""
    found: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        try:
            found += map(int, (task / "children").read_text().split())
        except FileNotFoundError:  # the thread has ended since
            continue
    return found


def workers() -> Iterable[int]:
    """Those of them that run a Python model."""
    return [child for child in children() if "python/worker" in _command(child)]


def _tasks() -> Iterable[str]:
    me = asyncio.current_task()
    return (_task(task) for task in asyncio.all_tasks() if task is not me)


def _task(task: "asyncio.Task[object]") -> str:
    coroutine = task.get_coro()
    return getattr(coroutine, "__qualname__", repr(coroutine))


def _threads() -> Iterable[str]:
    return (each.name for each in threading.enumerate() if not each.name.startswith(POOLED))


def _processes() -> Iterable[str]:
    return map(_command, children())


def _command(process: int) -> str:
    try:
        command = Path(f"/proc/{process}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return "ended"
    return " ".join(part for part in command.decode().split("\0") if not part.isdecimal())


def _mappings() -> Iterable[str]:
    """Each mapping of shared memory; files of other processes in /dev/shm are not ours."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.partition("/")
        if (path[1] + path[2]).startswith(SHARED):
            yield path[1] + path[2]


def _descriptors() -> Iterable[str]:
    """Each open descriptor by its kind: a socket, a pipe, or the path of a file."""
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:  # the listing's own
            continue
        yield target.partition(":[")[0]


def _folders() -> Iterable[str]:
    return os.listdir(tempfile.gettempdir())


KINDS: Mapping[str, Callable[[], Iterable[str]]] = {
    "tasks": _tasks,
    "threads": _threads,
    "folders": _folders,
    "processes": _processes,
    "descriptors": _descriptors,
    "shared memory": _mappings,
}
"""Finds the things of each kind that this process holds now; the slowest come last."""
