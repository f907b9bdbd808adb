"""`sluice` with a dump of its tasks and threads: `python -m loadtests.soak.dumping FILE serve ...`.

SIGUSR1 writes every task of the event loop, with the lines where it waits, to FILE, and the stack
of every thread to FILE.threads.
"""

import asyncio
import faulthandler
import gc
import inspect
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gateway.cli import main

FOLLOWING = {"cr": "cr_await", "ag": "ag_await", "gi": "gi_yieldfrom"}
"""How coroutines and generators say what they wait for, by the prefix of their attributes."""


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
