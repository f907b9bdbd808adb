"""Is it worth a few turns of the event loop to let more requests arrive before a batch is taken?

Requests of many clients come through the loop one after the other, each in several turns. A batch
that is taken at once then has one of them, though others are nearly there. With a single client
nobody else comes, and turns are lost time; so it is tried now and then, and kept up while it pays.
What is decided here are numbers only.
"""

from dataclasses import dataclass

MOST_TURNS = 96
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
    """One wait: for how many more turns?"""

    rows: int
    turns: int = -1
    quiet: int = -1

    def over(self, rows: int, enough: int) -> bool:
        """Whether to wait no more, now that so many rows are there and so many are enough."""
        self.quiet = self.quiet + 1 if rows == self.rows else 0
        self.turns += 1
        self.rows = rows
        return rows >= enough or self.quiet >= PATIENCE or self.turns >= MOST_TURNS
