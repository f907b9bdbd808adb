"""The server under soak writes about itself: its tasks, its tables, the stacks of its threads.

`python -m loadtests.soak.inside FILE serve ...` is `sluice` with a dump: SIGUSR1 writes every task
of the event loop, with the lines in which it waits, to FILE, the lengths of its tables to
FILE.tables, and the stack of every thread to FILE.threads. SIGUSR2 collects garbage.
"""

import asyncio
import gc
import inspect
import json
import signal
import sys
import threading
import traceback
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

from gateway.cli import main

FOLLOWING = {"cr": "cr_await", "ag": "ag_await", "gi": "gi_yieldfrom"}
"""The attribute with the awaited object, by the prefix of the attributes of its kind."""

OURS = ("gateway", "backends")
"""The packages whose objects, and whose tables, are counted."""
TABLES = (
    *(dict, list, set, deque, bytearray),
    *(WeakKeyDictionary, WeakSet, WeakValueDictionary),
)
SEEN = 3
"""Objects of a class whose attributes are looked at: it takes long, and the others are alike."""


def install(path: Path) -> None:
    """Write a dump at SIGUSR1; the file appears whole, after that of the tables."""
    gc.freeze = lambda: None  # type: ignore[assignment] # frozen objects are in no list

    def dump(*_: object) -> None:
        path.with_name(f"{path.name}.tables").write_text(json.dumps(tables()))
        path.with_name(f"{path.name}.threads").write_text(_stacks())
        partial = path.with_name(f"{path.name}.partial")
        partial.write_text(_tasks())
        partial.rename(path)

    signal.signal(signal.SIGUSR1, dump)
    signal.signal(signal.SIGUSR2, lambda *_: gc.collect())


def tables() -> Mapping[str, int]:
    """The objects of each class, and the lengths of their tables and of those of modules.

    Tables of one name are added: `RequestsInFlight` has the requests of all models.
    """
    found: Counter[str] = Counter()
    classes, of_modules = _ours(len(sys.modules))
    by_class: dict[type, list[Any]] = {}
    for each in [each for each in gc.get_objects() if type(each) in classes]:
        by_class.setdefault(type(each), []).append(each)
    for kind, objects in by_class.items():
        name = kind.__qualname__
        found[f"{name} objects"] += len(objects)
        if issubclass(kind, TABLES):
            found[name] += sum(map(len, objects))
        for attribute in {key for each in objects[:SEEN] for key in _tables_of(each)}:
            values = (getattr(each, attribute, None) for each in objects)
            lengths = (len(value) for value in values if isinstance(value, TABLES))
            found[f"{name}.{attribute}"] += sum(lengths)
    for name, table in of_modules:
        found[name] += len(table)
    return found


@cache
def _ours(modules: int) -> tuple[frozenset[type], Sequence[tuple[str, Any]]]:
    """The classes and the tables of our modules; it takes long, and `modules` are imported once."""
    found = [each for name, each in sys.modules.items() if name.partition(".")[0] in OURS]
    named = [
        (f"{module.__name__}.{name}", each)
        for module in found
        for name, each in vars(module).items()
        if not name.startswith("__")
    ]
    classes = (each for _, each in named if isinstance(each, type))
    of_ours = (each for each in classes if each.__module__.partition(".")[0] in OURS)
    return frozenset(of_ours), [(name, each) for name, each in named if isinstance(each, TABLES)]


@cache
def _slots(kind: type) -> Sequence[str]:
    return [name for each in kind.__mro__ for name in vars(each).get("__slots__", ())]


def _tables_of(each: object) -> Iterator[str]:
    """The names of the attributes that are tables."""
    for name in (*getattr(each, "__dict__", ()), *_slots(type(each))):
        if isinstance(getattr(each, name, None), TABLES):
            yield name


def _stacks() -> str:
    """The stack of each thread.

    That of `faulthandler` reads frames of other threads while they run, and may crash.
    """
    names = {each.ident: each.name for each in threading.enumerate()}
    found = [
        f"{names.get(thread, thread)}\n{''.join(traceback.format_stack(frame))}"
        for thread, frame in sys._current_frames().items()  # noqa: SLF001 - the only way
    ]
    return "\n".join(found)


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
