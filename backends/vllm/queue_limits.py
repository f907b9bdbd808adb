"""The limits for which requests wait in the queue of an engine."""

from collections import deque
from typing import Any

FULL = 0.9
"""The part of the KV cache from which on a prompt may have no room."""
KV_CACHE = "its KV cache"
MOST_CHANGES = 256
"""Changes that are kept; steps take milliseconds, and few of them change the limit."""


class QueueLimits:
    """The limits after the latest steps of an engine that executes `most_running` requests at once.

    Times are seconds of the monotonic clock. A prompt also waits for the tokens of a step, of which
    vLLM's statistics have nothing: the limit is not known then.
    """

    def __init__(self, most_running: int) -> None:
        self._most_running = most_running
        self._sequences = f"max_num_seqs ({most_running})"
        self._changes: deque[tuple[float, str]] = deque(maxlen=MOST_CHANGES)

    def note(self, step: Any, secs: float) -> None:
        """Note the `SchedulerStats` of a step that ended at that time."""
        found = ""
        if step.num_running_reqs >= self._most_running:
            found = self._sequences
        elif step.kv_cache_usage >= FULL:
            found = KV_CACHE
        if not self._changes or self._changes[-1][1] != found:
            self._changes.append((secs, found))

    def at(self, secs: float) -> str:
        """The limit until a request was scheduled at that time; "" if it is not known."""
        for since, limit in reversed(self._changes):
            if since <= secs:
                return limit
        return ""
