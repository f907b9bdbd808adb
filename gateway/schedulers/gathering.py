"""Is it worth a few turns of the event loop to let more requests arrive before a batch is taken?

Requests of many clients come through the loop one after the other, each in several turns. A batch
that is taken at once then has one of them, though others are nearly there. With a single client
nobody else comes, and turns are lost time; so it is tried now and then, and kept up while it pays.
What is decided here are numbers only.
"""

from dataclasses import dataclass

LIMIT_NS = 2_000_000
"""The longest wait: turns take longer where the loop has much else to do."""
PATIENCE = 24
"""So many turns in a row that bring nothing end the wait."""
TRY_EVERY = 64
"""One in so many batches waits although the last wait brought nothing."""
CREDIT = 16
"""So many waits in a row must bring nothing before the next batches are taken at once."""


@dataclass(slots=True)
class Gathering:
    """What the waits before the latest batches have brought."""

    taken_at_once: int = 0
    credit: int = 0

    @property
    def worthwhile(self) -> bool:
        """Whether the next batch should wait."""
        if self.credit:
            return True
        self.taken_at_once += 1
        return self.taken_at_once >= TRY_EVERY

    def waited(self, *, some_came: bool) -> None:
        """A batch has waited, and requests came meanwhile, or none."""
        self.taken_at_once = 0
        self.credit = CREDIT if some_came else max(0, self.credit - 1)


@dataclass(slots=True)
class Wait:
    """One wait, begun at `began_ns` with so many rows: for how many more turns?"""

    rows: int
    began_ns: int
    quiet: int = -1

    def over(self, rows: int, enough: int, now_ns: int) -> bool:
        """Whether to wait no more, now that so many rows are there and so many are enough."""
        self.quiet = self.quiet + 1 if rows == self.rows else 0
        self.rows = rows
        late = now_ns - self.began_ns >= LIMIT_NS
        return rows >= enough or self.quiet >= PATIENCE or late
