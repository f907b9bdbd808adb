"""The threads of sessions, and their CPU cores.

A session of n threads computes on the thread that runs it and on n - 1 of its own. The system moves
busy threads to idle cores too late: two of them share a core for a while, and another one is idle.
Bound threads avoid that, but cannot make room for other work: models choose it.
"""

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock

from gateway.config import ModelConfig
from gateway.process_limits import processors
from gateway.tensor_runtime.parameters import count, switch, thread_share

INTRA = "intra_op_thread_count"
INTER = "inter_op_thread_count"
GLOBAL = "enable-global-threadpool"
ALL_CORES = "all_cores_when_alone"


@dataclass(frozen=True, slots=True)
class SessionThreads:
    """The threads of one session: within one operator, and for concurrent operators."""

    intra: int
    inter: int

    @classmethod
    def read(cls, config: ModelConfig, settings: Mapping[str, str]) -> "SessionThreads":
        """The counts of the model's parameters, or else of `--backend-config`.

        If both are missing or 0, the instances of a model share the cores: together they have one
        thread per core, and each has at least one.
        """
        share = thread_share(config)
        return cls(
            count(config.parameters, INTRA) or count(settings, INTRA) or share,
            count(config.parameters, INTER) or count(settings, INTER) or share,
        )


def lone_threads(config: ModelConfig, settings: Mapping[str, str]) -> SessionThreads | None:
    """The threads of a session for runs that are alone, if it has more than the instances' own.

    None if the number of threads is configured. Raises INVALID_ARG for an invalid switch.
    """
    every = processors()
    is_wanted = switch(config.parameters, ALL_CORES, default=True)
    if not is_wanted or count(config.parameters, INTRA) or count(settings, INTRA):
        return None
    return SessionThreads(every, every) if thread_share(config) < every else None


@dataclass(frozen=True, slots=True)
class SharedThreads:
    """One pool for all sessions: its size, and the limit of concurrent runs.

    Runs compute on threads of their own in addition to those of the pool. Both are sized so that
    together they never use more threads than configured.
    """

    pool: int
    runs: int
    inter: int

    @classmethod
    def read(cls, settings: Mapping[str, str]) -> "SharedThreads | None":
        """The pool of `--backend-config`; None if every session has its own threads."""
        if not switch(settings, GLOBAL, default=False):
            return None
        threads = count(settings, INTRA) or processors()
        runs = max(1, threads // 2)
        return cls(threads - runs + 1, runs, count(settings, INTER) or 1)


log = logging.getLogger("sluice.onnxruntime")

PINNING = "cpu_pinning"

Processors = frozenset[int]


class CorePin:
    """An instance's cores, until `end`."""

    def __init__(self, processors: Processors, end: Callable[[Processors], None]) -> None:
        self.processors = processors
        self._end = end

    def keep(self) -> None:
        """Bind the calling thread, and threads that it starts later, to the cores."""
        os.sched_setaffinity(0, self.processors)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """The same within the block; threads started in it stay bound."""
        before = os.sched_getaffinity(0)
        self.keep()
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)

    def end(self) -> None:
        """Release the cores."""
        self._end(self.processors)


class CorePins:
    """The instances bound to each core; usable from any thread."""

    def __init__(self) -> None:
        self._taken: Counter[int] = Counter()
        self._lock = Lock()

    def take(self, config: ModelConfig, threads: int) -> CorePin | None:
        """One core for each thread, those with the fewest instances; None if not configured.

        The last cores come first: engines, such as vLLM's on the CPU, begin with the first. None
        also if the system cannot bind threads. Raises INVALID_ARG for an invalid switch.
        """
        if not switch(config.parameters, PINNING, default=False):
            return None
        if not hasattr(os, "sched_setaffinity"):
            log.warning("threads cannot be kept to processors here", extra={"model": config.name})
            return None
        with self._lock:
            ranked = sorted(os.sched_getaffinity(0), key=lambda each: (self._taken[each], -each))
            found = frozenset(ranked[:threads])
            self._taken.update(found)
        return CorePin(found, self._give_back)

    def _give_back(self, processors: Processors) -> None:
        with self._lock:
            self._taken.subtract(processors)
