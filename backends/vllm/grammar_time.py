"""Limits on the time that grammars take, in the event loop and in the engine.

A short pattern in a schema can take the engine minutes. vLLM has a timeout for expressions, but
none for schemas, and on small machines compiles one grammar at a time: the next request with a
schema would wait. A compilation that times out cannot be stopped, so their number is limited.
"""

import re
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import orjson
from vllm.exceptions import VLLMValidationError
from vllm.v1.structured_output import StructuredOutputManager

from gateway.process_limits import processors

SECS = 60.0
AT_ONCE = max(4, (processors() + 1) // 2)
"""The number of vLLM's threads on large machines; on small ones vLLM has fewer."""

T = TypeVar("T")

MAX_REPETITIONS = 1 << 20
"""The largest sum of the squares of all repetitions in a schema's patterns, and of its numbers of
properties. vLLM reads them on the event loop in a time that grows with it: here up to 0.3 s."""

MAX_LENGTHS = 32
"""The most different lengths that a schema gives to texts. The engine computes for a second or
more for each, concurrently with a few other schemas."""

QUANTIFIER = re.compile(r"\{(\d+)?(?:,(\d+)?)?\}")
PROPERTIES = re.compile(r'"(?:min|max)Properties"\s*:\s*(\d+)')
LENGTH = re.compile(r'"(?:min|max)Length"\s*:\s*(\d+)')
MOST_DIGITS = 6
"""The digits of a number that are read; a longer number exceeds the limits anyway."""


class TimeLimit:
    """Computes in at most `at_once` threads, with a timeout of `secs`; thread-safe."""

    def __init__(self, secs: float, at_once: int) -> None:
        self._secs = secs
        self._room = threading.Semaphore(at_once)

    def compute(self, work: Callable[[], T]) -> T:
        """Return or raise the result of `work`; TimeoutError if it, or its turn, takes too long."""
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
        except Exception as error:  # noqa: BLE001 - raised by `compute`
            found.set_exception(error)
        finally:
            self._room.release()


def limit_grammars() -> None:
    """Apply the limits to vLLM's engine in this process.

    vLLM calls this in each of its processes: it is an entry point of the group
    `vllm.general_plugins`. A request whose grammar times out fails like one whose grammar cannot
    be compiled.
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


def check_schema(schema: Any) -> None:
    """Refuse a schema, or a value with schemas, that takes too long; a text is read as JSON."""
    written = orjson.dumps(_read(schema)).decode()
    repeated = [_number(each) for pair in QUANTIFIER.findall(written) for each in pair]
    counted = [_number(each) for each in PROPERTIES.findall(written)]
    cost = sum(number**2 for number in (*repeated, *counted))
    if cost > MAX_REPETITIONS:
        _refuse(
            "the squares of the repetitions in its patterns, and of its numbers of properties, "
            f"make {cost} in all, expected at most {MAX_REPETITIONS}"
        )
    lengths = len(set(LENGTH.findall(written)))
    if lengths > MAX_LENGTHS:
        _refuse(f"it gives texts {lengths} different lengths, expected at most {MAX_LENGTHS}")


def check_constraint(constraint: Any) -> None:
    """Check the schemas in vLLM's `StructuredOutputsParams`; None has no schema."""
    for name in ("json", "structural_tag"):
        if (schema := getattr(constraint, name, None)) is not None:
            check_schema(schema)


def _read(schema: Any) -> Any:
    if not isinstance(schema, str):
        return schema
    try:
        return orjson.loads(schema)
    except orjson.JSONDecodeError:
        return schema  # vLLM refuses it


def _number(digits: str) -> int:
    return int(digits[: MOST_DIGITS + 1] or 0)


def _refuse(reason: str) -> None:
    raise VLLMValidationError(f"the schema takes too long to prepare: {reason}")
