"""Is an execution so short that it should run on the event loop, and not on a thread?

The way to a thread and back costs more than a tiny model does: about 25 us where nothing else runs,
and 90 us of processor time per request in a server with one client. What is decided here are
numbers only; whoever runs things tells how long they took.
"""

from dataclasses import dataclass

LIMIT_NS = 200_000
"""What the loop may be held up by one execution; it is held up as long by other work of ours."""
TRIALS = 8
TOLERATED = 3
FIRST_PAUSE = 256
LAST_PAUSE = 1 << 20


class ShortRuns:
    """Judges executions by their number of rows, in classes of powers of two.

    A class is tried on the thread first, and goes to the loop if the fastest of its trials was
    short. It goes back to the thread if runs on the loop take longer, at once for one that takes
    five times as long; every time it then stays there twice as many runs, before it is tried again.
    """

    def __init__(self) -> None:
        self._classes: dict[int, _Class] = {}

    def on_loop(self, rows: int) -> bool:
        """Whether an execution of so many rows should run on the loop."""
        known = self._classes.get(rows.bit_length())
        return known is not None and known.on_loop

    def ran_on_thread(self, rows: int, wall_ns: int) -> None:
        """An execution took so long from its begin to its end."""
        self._classes.setdefault(rows.bit_length(), _Class()).tried(wall_ns)

    def ran_on_loop(self, rows: int, processor_ns: int) -> None:
        """An execution took so much of the processor; others that had it meanwhile do not count."""
        self._classes[rows.bit_length()].held_up(processor_ns)


@dataclass(slots=True)
class _Class:
    on_loop: bool = False
    fastest_ns: int = 0
    trials: int = 0
    slow: int = 0
    pause: int = 0
    next_pause: int = FIRST_PAUSE

    def tried(self, wall_ns: int) -> None:
        if self.pause:
            self.pause -= 1
            return
        self.fastest_ns = min(self.fastest_ns, wall_ns) if self.trials else wall_ns
        self.trials += 1
        if self.trials < TRIALS:
            return
        self.trials = 0
        self.on_loop = self.fastest_ns <= LIMIT_NS
        if not self.on_loop:
            self._rest()

    def held_up(self, processor_ns: int) -> None:
        self.slow = self.slow + 1 if processor_ns > LIMIT_NS else max(0, self.slow - 1)
        if self.slow == TOLERATED or processor_ns > 5 * LIMIT_NS:
            self.on_loop = False
            self.slow = 0
            self._rest()

    def _rest(self) -> None:
        self.pause = self.next_pause
        self.next_pause = min(2 * self.next_pause, LAST_PAUSE)
