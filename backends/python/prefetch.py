"""Prefetch of executions by a busy worker."""

SHORT_NS = 500_000
AT_ONCE = 4
NEWEST = 0.25
"""What the newest execution weighs in what is typical."""


class Prefetch:
    """Says yes where executions are short, and few wait in the worker.

    The way to a worker and back takes longer than a small model does: if the next request is there
    when one has been executed, the worker needs not wait for it. It still executes one after the
    other. `allowed` is False for models whose executions must not be chosen any sooner.
    """

    __slots__ = ("_allowed", "_typical_ns")

    def __init__(self, *, allowed: bool) -> None:
        self._allowed = allowed
        self._typical_ns: float | None = None

    def measured(self, infer_ns: int) -> None:
        """How long an `execute` took."""
        typical = infer_ns if self._typical_ns is None else self._typical_ns
        self._typical_ns = typical + NEWEST * (infer_ns - typical)

    def room(self, busy: int) -> bool:
        """Whether a worker that has so many executions may be handed one more."""
        typical = self._typical_ns
        return self._allowed and typical is not None and typical < SHORT_NS and busy < AT_ONCE
