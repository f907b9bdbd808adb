"""Which processors do the threads of an instance keep to?

The system moves threads that compute to where it sees room, and is late with it: two of them share
a processor for a while, and another one is idle. Threads that keep to processors of their own lose
nothing that way, but cannot get out of the way of others either: models say whether they want it.
"""

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock

from backends.onnxruntime.parameters import switch
from gateway.config import ModelConfig

log = logging.getLogger("sluice.onnxruntime")

PINNING = "cpu_pinning"

Processors = frozenset[int]


class Pin:
    """An instance's processors, until `end`."""

    def __init__(self, processors: Processors, end: Callable[[Processors], None]) -> None:
        self.processors = processors
        self._end = end

    def keep(self) -> None:
        """Keep the calling thread, and those that it starts from now on, to the processors."""
        os.sched_setaffinity(0, self.processors)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """The same for as long as the block runs; threads started in it stay there."""
        before = os.sched_getaffinity(0)
        self.keep()
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)

    def end(self) -> None:
        """Leave the processors to others."""
        self._end(self.processors)


class Pins:
    """The instances that keep to each processor; used by any thread."""

    def __init__(self) -> None:
        self._taken: Counter[int] = Counter()
        self._lock = Lock()

    def take(self, config: ModelConfig, threads: int) -> Pin | None:
        """One processor for each thread, those with the fewest instances; None if not asked for.

        The last ones come first: engines, such as vLLM's on the CPU, begin with the first. Also
        None where the system cannot do it. Raises INVALID_ARG for what is no switch.
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
        return Pin(found, self._give_back)

    def _give_back(self, processors: Processors) -> None:
        with self._lock:
            self._taken.subtract(processors)
