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
LOOK_AGAIN = 16
"""After so many waits that ended with as many rows as expected one is not cut short, to see whether
more would come."""


@dataclass(slots=True)
class Gathering:
    """What the waits before the latest batches have brought.

    `expected` are the rows with which the last wait ended that was not cut short: clients that wait
    for their answers come in the same number again, and all the turns after the last are lost.
    """

    taken_at_once: int = 0
    credit: int = 0
    expected: int = 0
    cut_short: int = 0

    @property
    def worthwhile(self) -> bool:
        """Whether the next batch should wait."""
        if self.credit:
            return True
        self.taken_at_once += 1
        return self.taken_at_once >= TRY_EVERY

    def enough(self, most: int) -> int:
        """With how many rows the next wait ends at once; `most` is what a batch may have."""
        known = self.credit and self.expected > 1 and self.cut_short < LOOK_AGAIN
        return min(self.expected, most) if known else most

    def waited(self, before: int, rows: int, enough: int) -> None:
        """A batch has waited: so many rows were there before and after, and so many enough."""
        self.taken_at_once = 0
        is_cut_short = rows >= enough == self.expected
        self.cut_short = self.cut_short + 1 if is_cut_short else 0
        self.expected = rows
        if rows > before:
            self.credit = CREDIT
        elif not is_cut_short:
            self.credit = max(0, self.credit - 1)


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
