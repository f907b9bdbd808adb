"""The contents of a server: processes, descriptors, tasks, temporary files, memory.

`python -m loadtests.soak.census FILE serve ...` is `sluice` with a dump: SIGUSR1 writes every task
of the event loop, with the lines where it waits, to FILE, and the stack of every thread to
FILE.threads.
"""

import asyncio
import faulthandler
import gc
import inspect
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.cli import main

WORKER = b"backends/python/worker"
FRONTEND = b"gateway.processes"
POOLED = {"/memfd": 64}
"""Descriptors that a server keeps for reuse: a worker's pool has at most 64 segments."""

FOLLOWING = {"cr": "cr_await", "ag": "ag_await", "gi": "gi_yieldfrom"}
"""How coroutines and generators say what they wait for, by the prefix of their attributes."""


@dataclass(frozen=True, slots=True)
class Census:
    """Each count by kind; `memory_bytes` is of the server's own process."""

    processes: Mapping[str, int]
    descriptors: Mapping[str, int]
    tasks: Mapping[str, int]
    files: Mapping[str, int]
    memory_bytes: int

    def grown(self, before: "Census") -> Sequence[str]:
        """What there is more of than before, in words."""
        found = []
        for noun in ("processes", "descriptors", "tasks", "files"):
            now, then = getattr(self, noun), getattr(before, noun)
            found += [
                f"{noun}: {count} of {kind}, {then.get(kind, 0)} before"
                for kind, count in now.items()
                if count > max(then.get(kind, 0), POOLED.get(kind, 0))
            ]
        return found

    def lost(self, before: "Census") -> Sequence[str]:
        """The processes that were not restarted, in words."""
        return [
            f"processes: {self.processes.get(kind, 0)} of {kind}, {count} before"
            for kind, count in before.processes.items()
            if count > self.processes.get(kind, 0)
        ]


def take(pid: int, temporary: Path, tasks: Sequence[str]) -> Census:
    """The census of a server; `tasks` are the lines of its dump."""
    return Census(
        processes=Counter(_kind(each) for each in descendants(pid)),
        descriptors=_descriptors(pid),
        tasks=Counter(line.partition(" < ")[0] for line in tasks),
        files=Counter(files(temporary)),
        memory_bytes=memory(pid),
    )


def frontends(pid: int) -> Sequence[int]:
    """The frontend processes of a server."""
    return [each for each in descendants(pid) if FRONTEND in _read(each, "cmdline")]


def files(folder: Path) -> Sequence[str]:
    """The names of all files and folders within a folder."""
    return [name for _, folders, names in os.walk(folder) for name in (*folders, *names)]


def workers(pid: int, model: str) -> Sequence[int]:
    """The worker processes of a Python model; each has the name of its model."""
    return [each for each in descendants(pid) if _read(each, "comm").strip() == model.encode()]


def descendants(pid: int) -> Iterator[int]:
    """The processes that a process has started, and those that these have."""
    for task in _list(f"/proc/{pid}/task"):
        for child in map(int, _read(pid, f"task/{task}/children").split()):
            yield child
            yield from descendants(child)


def _kind(pid: int) -> str:
    command = _read(pid, "cmdline")
    if WORKER in command:
        return f"worker {_read(pid, 'comm').decode().strip()}"
    if FRONTEND in command:
        return "frontend"
    return command.replace(b"\0", b" ").decode(errors="replace")[:60] or "ended"


def _descriptors(pid: int) -> Mapping[str, int]:
    found: Counter[str] = Counter()
    for each in _list(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(f"/proc/{pid}/fd/{each}")
        except OSError:
            continue
        found[target.partition(":")[0]] += 1
    return found


def memory(pid: int) -> int:
    """The bytes of a process that are in RAM."""
    pages = _read(pid, "statm").split()
    return int(pages[1]) * os.sysconf("SC_PAGE_SIZE") if pages else 0


def _list(path: str) -> Sequence[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def install(path: Path) -> None:
    """Answer SIGUSR1 with a dump; the file appears whole."""
    threads = path.with_name(f"{path.name}.threads").open("w")

    def dump(*_: object) -> None:
        partial = path.with_name(f"{path.name}.partial")
        partial.write_text(_tasks())
        partial.rename(path)

    signal.signal(signal.SIGUSR1, dump)
    faulthandler.register(signal.SIGUSR1, threads, all_threads=True, chain=True)


def _tasks() -> str:
    found = (_task(task) for task in asyncio.all_tasks())
    return "\n".join(sorted(found)) + "\n"


def _task(task: asyncio.Task[Any]) -> str:
    coroutine = task.get_coro()
    name = getattr(coroutine, "__qualname__", type(coroutine).__name__)
    return " < ".join((name, *_waits(coroutine)))


def _waits(awaited: Any) -> Iterator[str]:
    """The lines in which a coroutine, and all that it awaits, stand still."""
    while awaited is not None:
        kind = next((each for each in FOLLOWING if hasattr(awaited, f"{each}_frame")), "")
        if not kind:
            # The step of an async generator does not name it, but refers to it.
            referents = gc.get_referents(awaited) if inspect.isawaitable(awaited) else ()
            awaited = next((each for each in referents if inspect.isasyncgen(each)), None)
            continue
        if (frame := getattr(awaited, f"{kind}_frame")) is not None:
            yield f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"
        awaited = getattr(awaited, FOLLOWING[kind])


if __name__ == "__main__":
    install(Path(sys.argv[1]))
    main(sys.argv[2:])
