"""Gives instances of all models their turns, if executions need resources that are limited.

Triton's rate limiter. What is decided stands in `resources.py`; this keeps count. Without a
limiter no instance has a share, and none waits for its turn.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from gateway.backend import Instance
from gateway.config import InstanceGroup
from gateway.schedulers.resources import Claim, Needs, Pool, availability, choose, needs_of
from gateway.settings import ResourceLimit


class Share:
    """What a place for an instance has in the rate limiter, until it leaves."""

    __slots__ = ("executions", "limiter", "needs", "priority")

    def __init__(self, limiter: "RateLimiter", needs: Needs, priority: int) -> None:
        self.limiter = limiter
        self.needs = needs
        self.priority = max(priority, 1)
        self.executions = 0

    @property
    def claim(self) -> Claim:
        """What it says when it could execute."""
        return Claim(self.executions * self.priority, self.needs)

    def leave(self) -> None:
        """Nothing will execute here any more; idempotent."""
        self.limiter.leave(self)


class Applicant(Protocol):
    """Whoever has instances that could execute; one for each model."""

    def candidates(self) -> Iterator[tuple[Instance, Share]]:
        """Those that are free."""

    def offer(self, instance: Instance) -> None:
        """It is this one's turn: take it within this call, or leave it."""


class RateLimiter:
    """Gives the instances of all models their turns, and counts what they hold.

    Turns are given in a turn of the event loop of their own, so that all who ask in one turn are
    compared. Nobody holds anything while they wait, so nobody waits for each other.
    """

    def __init__(self, given: Sequence[ResourceLimit] = ()) -> None:
        self._given = tuple(given)
        self._shares: dict[Share, None] = {}
        self._available: dict[Pool, int] = {}
        self._held: Counter[Pool] = Counter()
        self._asking: dict[Applicant, None] = {}
        self._decision: asyncio.Handle | None = None

    def enrol(self, group: InstanceGroup, device: int) -> Share:
        """A share for a place of that group on that device; INVALID_ARG if it could never run."""
        priority = group.rate_limiter.priority if group.rate_limiter is not None else 0
        share = Share(self, needs_of(group, device), priority)
        self._available = self._compute((*self._shares, share))
        self._shares[share] = None
        return share

    def leave(self, share: Share) -> None:
        """Forget a share; what is available is reckoned anew from those that stay."""
        if share in self._shares:
            del self._shares[share]
            self._available = self._compute(self._shares)
            self._decide_soon()

    def ask(self, applicant: Applicant) -> None:
        """Have `offer` called once, when it is the turn of a candidate."""
        self._asking.setdefault(applicant)
        self._decide_soon()

    def rest(self, applicant: Applicant) -> None:
        """Do not call `offer`."""
        if applicant in self._asking:
            del self._asking[applicant]
            self._decide_soon()

    def began(self, share: Share) -> None:
        """An execution has begun, and holds what it needs."""
        share.executions += 1
        self._held.update(share.needs)

    def ended(self, share: Share) -> None:
        """An execution has ended, one way or another."""
        self._held.subtract(share.needs)
        self._decide_soon()

    def _compute(self, shares: Iterable[Share]) -> dict[Pool, int]:
        return availability((share.needs for share in shares), self._given)

    def _decide_soon(self) -> None:
        if self._asking and self._decision is None:
            self._decision = asyncio.get_running_loop().call_soon(self._decide)

    def _decide(self) -> None:
        self._decision = None
        while True:
            found = [
                (applicant, instance, share)
                for applicant in self._asking
                for instance, share in applicant.candidates()
                if share in self._shares
            ]
            left = {pool: count - self._held[pool] for pool, count in self._available.items()}
            index = choose([share.claim for _, _, share in found], left)
            if index is None:
                return
            applicant, instance, _ = found[index]
            del self._asking[applicant]
            applicant.offer(instance)
