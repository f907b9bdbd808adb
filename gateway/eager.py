"""Coroutines that begin at once, and need a task only from their first wait on, if there is one.

Python 3.12 has the like as `asyncio.eager_task_factory`; 3.11, which is served too, has not.
"""

import asyncio
from collections.abc import Callable, Coroutine, Generator
from typing import Any

Create = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]


def begin(coroutine: Coroutine[Any, Any, None], create: Create) -> "asyncio.Task[None] | None":
    """Run a coroutine up to its first wait; `create` makes the task for what is left, if any is.

    Up to there the current task is the caller's: nothing in it may ask which that is, as timeouts
    and task groups do. What it raises before its first wait is raised here.
    """
    try:
        awaited = coroutine.send(None)
    except StopIteration:
        return None
    return create(_Rest(coroutine, awaited))


class _Rest(Coroutine[Any, Any, None]):
    """What is left of a coroutine that waits already."""

    __slots__ = ("_awaited", "_coroutine", "_told")

    def __init__(self, coroutine: Coroutine[Any, Any, None], awaited: Any) -> None:
        self._coroutine = coroutine
        self._awaited = awaited
        self._told = False

    def send(self, value: None) -> Any:
        if self._told:
            return self._coroutine.send(value)
        self._told = True
        awaited, self._awaited = self._awaited, None
        return awaited

    def throw(self, *error: Any) -> Any:
        self._told, self._awaited = True, None
        return self._coroutine.throw(*error)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, None]:
        raise TypeError("what is left of a coroutine is run by a task")
