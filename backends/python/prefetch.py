"""Prefetch of executions by a busy worker."""

SHORT_NS = 500_000
AT_ONCE = 4
NEWEST = 0.25
"""Weight of the newest execution in the moving average."""


class Prefetch:
    """Allows one more execution in a busy worker, if executions are short and few wait there.

    The way to a worker and back takes longer than a small model: with the next request already
    there, the worker need not wait for it. It still executes one after the other. `allowed` is
    False for models whose executions must not be formed early.
    """

    __slots__ = ("_allowed", "_typical_ns")

    def __init__(self, *, allowed: bool) -> None:
        self._allowed = allowed
        self._typical_ns: float | None = None

    def measured(self, infer_ns: int) -> None:
        """Add the duration of an `execute`."""
        typical = infer_ns if self._typical_ns is None else self._typical_ns
        self._typical_ns = typical + NEWEST * (infer_ns - typical)

    def room(self, busy: int) -> bool:
        """Whether a worker with `busy` executions may get one more."""
        typical = self._typical_ns
        return self._allowed and typical is not None and typical < SHORT_NS and busy < AT_ONCE
