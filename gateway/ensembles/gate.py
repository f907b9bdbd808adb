"""How many executions of one step may there be at once? (`max_inflight_requests`)"""

from collections.abc import Callable

Admit = Callable[[], None]


class StepGate:
    """Shared by all requests of an ensemble: first come, first in. `limit` 0 admits everybody.

    Everything is plain. Whoever has entered, or has been admitted later, leaves once.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._inside = 0
        self._waiting: dict[Admit, None] = {}

    def enter(self, admit: Admit) -> bool:
        """Whether there is room; otherwise `admit` is called once there is."""
        if self._limit and self._inside >= self._limit:
            self._waiting[admit] = None
            return False
        self._inside += 1
        return True

    def leave(self) -> None:
        """Make room for the one who waits longest."""
        if self._waiting:
            admit = next(iter(self._waiting))
            del self._waiting[admit]
            admit()
        else:
            self._inside -= 1

    def withdraw(self, admit: Admit) -> None:
        """Wait no more; no effect on one that does not wait."""
        self._waiting.pop(admit, None)
