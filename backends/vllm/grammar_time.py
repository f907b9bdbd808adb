"""How long may the engine compute what an answer must look like, and how many of these at once?

A short pattern in a schema can take minutes. vLLM gives up on an expression after some seconds, but
not on a schema, and on small machines computes one after the other: the next request with a schema
would wait. What is given up goes on computing, since nothing can end it; so there is a bound.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from vllm.v1.structured_output import StructuredOutputManager

from gateway.cpus import processors

SECS = 60.0
AT_ONCE = max(4, (processors() + 1) // 2)
"""On large machines as many as vLLM has threads for; on small ones it would have fewer."""

T = TypeVar("T")


class TimeLimit:
    """Computes in threads, so many at once, and waits for each so long; used by any thread."""

    def __init__(self, secs: float, at_once: int) -> None:
        self._secs = secs
        self._room = threading.Semaphore(at_once)

    def compute(self, work: Callable[[], T]) -> T:
        """What the work returns or raises; TimeoutError if that, or its turn, takes too long."""
        if not self._room.acquire(timeout=self._secs):
            raise TimeoutError("others have been computed for too long, and still are")
        found: Future[T] = Future()
        threading.Thread(target=self._run, args=(work, found), daemon=True).start()
        try:
            return found.result(self._secs)
        except TimeoutError:
            raise TimeoutError(f"it takes longer than {self._secs:g} s to compute") from None

    def _run(self, work: Callable[[], T], found: Future[T]) -> None:
        try:
            found.set_result(work())
        except Exception as error:  # noqa: BLE001 - told to whoever waits
            found.set_exception(error)
        finally:
            self._room.release()


def limit_grammars() -> None:
    """Have vLLM's engine keep to the limits, in this process.

    vLLM calls it in each of its processes, where it is an entry point of the group
    `vllm.general_plugins`. A request whose grammar takes too long ends as one whose grammar
    cannot be computed.
    """
    manager: Any = StructuredOutputManager
    manager.__init__, manager._create_grammar = _set_up, _create  # noqa: SLF001


_own_set_up: Any = StructuredOutputManager.__init__
_own_create: Any = StructuredOutputManager._create_grammar  # noqa: SLF001
_limit = TimeLimit(SECS, AT_ONCE)


def _set_up(self: Any, *arguments: Any, **options: Any) -> None:
    _own_set_up(self, *arguments, **options)
    if hasattr(self, "executor"):
        self.executor.shutdown(wait=False)
        self.executor = ThreadPoolExecutor(AT_ONCE)


def _create(self: Any, request: Any) -> Any:
    return _limit.compute(lambda: _own_create(self, request))
