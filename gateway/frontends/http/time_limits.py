"""Time limits of a connection: the bytes that its client owes, and the timer for them."""

import asyncio
from collections.abc import Callable
from enum import Enum, auto

from gateway.settings import HttpTimeLimits

HELD_SECS = 1.0
"""A timer this many seconds late was delayed by a blocked loop, as were the client's bytes."""


class Owed(Enum):
    """The next bytes that a client has to send."""

    NOTHING = auto()
    """An answer is under way, or reading is paused."""
    HEAD = auto()
    """The rest of a request line with headers."""
    BODY = auto()
    REQUEST = auto()
    """The first byte of a request."""


class ClientDeadline:
    """Calls `expire` once, when the client has owed the same bytes for longer than their limit.

    A connection has one timer, which fires at intervals of the shortest limit. A request sets no
    timer: `restart` only notes the time.
    """

    __slots__ = (
        "_expected_at",
        "_expire",
        "_limits",
        "_loop",
        "_owed",
        "_round",
        "_since",
        "_timer",
    )

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        limits: HttpTimeLimits,
        owed: Callable[[], Owed],
        expire: Callable[[Owed, float], None],
    ) -> None:
        by_debt = {
            Owed.HEAD: limits.head_secs,
            Owed.BODY: limits.body_idle_secs,
            Owed.REQUEST: limits.connection_idle_secs,
        }
        self._limits = {owed: secs for owed, secs in by_debt.items() if secs}
        self._loop = loop
        self._owed = owed
        self._expire = expire
        self._since = self._expected_at = loop.time()
        self._round = min(self._limits.values(), default=0.0)
        self._timer: asyncio.TimerHandle | None = None
        if self._limits:
            self._look_in(self._round)

    def restart(self) -> None:
        """Restart the limit: the client owes other bytes, or has sent some."""
        self._since = self._loop.time()

    def cancel(self) -> None:
        """Cancel the timer: the connection is lost."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look_in(self, secs: float) -> None:
        self._expected_at = self._loop.time() + secs
        self._timer = self._loop.call_later(secs, self._look)

    def _look(self) -> None:
        now, owed = self._loop.time(), self._owed()
        limit = self._limits.get(owed)
        if limit is None:
            # Time without a debt does not count; a debt may begin before the next check.
            self._since = now + self._round
            self._look_in(self._round)
        elif now - self._expected_at > HELD_SECS:
            self._look_in(HELD_SECS)
        elif (left := self._since + limit - now) > 0:
            self._look_in(min(left, self._round))
        else:
            self._timer = None
            self._expire(owed, limit)
