"""Pauses of a replica after failures."""

import math
from collections import deque

FAILURES, WITHIN_SECS = 3, 10.0
"""The failures within that time that begin a pause."""
FIRST_PAUSE_SECS, LONGEST_PAUSE_SECS = 5.0, 60.0
"""The first pause; each further one is twice as long, until a request is answered."""


class Pauses:
    """The pauses of one model at one replica, in seconds of the loop's clock.

    The replica is left out until `left_out_until`. One request tries it then, while others wait for
    as long again: its failure begins the next pause, its first response ends them all.
    """

    def __init__(self) -> None:
        self.left_out_until = -math.inf
        self._pause_secs = 0.0
        self._is_tried = False
        self._failed_at: deque[float] = deque(maxlen=FAILURES)

    def fail(self, now: float) -> None:
        """Count a failure; within a pause those of older requests do not count."""
        self._failed_at.append(now)
        failures = len(self._failed_at)
        if not self._pause_secs and failures == FAILURES and now - self._failed_at[0] < WITHIN_SECS:
            self._pause(now, FIRST_PAUSE_SECS)
        elif self._is_tried:
            self._pause(now, min(LONGEST_PAUSE_SECS, 2 * self._pause_secs))

    def send(self, now: float) -> None:
        """Count a request; after failures it tries the replica."""
        if self._pause_secs:
            self._is_tried = True
            self.left_out_until = max(self.left_out_until, now + self._pause_secs)

    def answer(self) -> None:
        """End the pauses, if a request tries the replica."""
        if self._is_tried:
            self._pause_secs, self._is_tried = 0.0, False
            self.left_out_until = -math.inf
            self._failed_at.clear()

    def _pause(self, now: float, secs: float) -> None:
        self._pause_secs, self._is_tried = secs, False
        self.left_out_until = now + secs
