"""Gives instances of all models their turns, if executions need resources that are limited.

Triton's rate limiter. What is decided stands in `resources.py`; this keeps count. Without a
limiter no instance has a share, and none waits for its turn.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from gateway.backend import Instance
from gateway.config import InstanceGroup
from gateway.errors import Code, InferenceError
from gateway.settings import ResourceLimit


class ResourcePool(NamedTuple):
    """A resource on one device, or with None the one that all devices share."""

    name: str
    device: int | None


ResourceNeeds = Mapping[ResourcePool, int]
"""How much of each pool an execution holds while it runs."""


class Claim(NamedTuple):
    """What an instance that could execute needs; the smallest score goes first."""

    score: int
    needs: ResourceNeeds


class Registration:
    """What a place for an instance has in the rate limiter, until it leaves."""

    __slots__ = ("executions", "limiter", "needs", "priority")

    def __init__(self, limiter: "RateLimiter", needs: ResourceNeeds, priority: int) -> None:
        self.limiter = limiter
        self.needs = needs
        self.priority = max(priority, 1)
        self.executions = 0

    @property
    def claim(self) -> Claim:
        """What it says when it could execute."""
        return Claim(self.executions * self.priority, self.needs)

    def unregister(self) -> None:
        """Nothing will execute here any more; idempotent."""
        self.limiter.unregister(self)


class RateLimitedInstances(Protocol):
    """Whoever has instances that could execute; one for each model."""

    def candidates(self) -> Iterator[tuple[Instance, Registration]]:
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
        self._shares: dict[Registration, None] = {}
        self._available: dict[ResourcePool, int] = {}
        self._held: Counter[ResourcePool] = Counter()
        self._asking: dict[RateLimitedInstances, None] = {}
        self._decision: asyncio.Handle | None = None

    def register(self, group: InstanceGroup, device: int) -> Registration:
        """A share for a place of that group on that device; INVALID_ARG if it could never run."""
        priority = group.rate_limiter.priority if group.rate_limiter is not None else 0
        share = Registration(self, needs_of(group, device), priority)
        self._available = self._compute((*self._shares, share))
        self._shares[share] = None
        return share

    def unregister(self, share: Registration) -> None:
        """Forget a share; what is available is reckoned anew from those that stay."""
        if share in self._shares:
            del self._shares[share]
            self._available = self._compute(self._shares)
            self._decide_soon()

    def ask(self, applicant: RateLimitedInstances) -> None:
        """Have `offer` called once, when it is the turn of a candidate."""
        self._asking.setdefault(applicant)
        self._decide_soon()

    def rest(self, applicant: RateLimitedInstances) -> None:
        """Do not call `offer`."""
        if applicant in self._asking:
            del self._asking[applicant]
            self._decide_soon()

    def began(self, share: Registration) -> None:
        """An execution has begun, and holds what it needs."""
        share.executions += 1
        self._held.update(share.needs)

    def ended(self, share: Registration) -> None:
        """An execution has ended, one way or another."""
        self._held.subtract(share.needs)
        self._decide_soon()

    def _compute(self, shares: Iterable[Registration]) -> dict[ResourcePool, int]:
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


def needs_of(group: InstanceGroup, device: int) -> ResourceNeeds:
    """What each execution on that device needs; of a resource named twice the larger count."""
    needs: dict[ResourcePool, int] = {}
    for each in group.rate_limiter.resources if group.rate_limiter is not None else ():
        pool = ResourcePool(each.name, None if each.global_ else device)
        needs[pool] = max(each.count, needs.get(pool, 0))
    return needs


def availability(
    everybody: Iterable[ResourceNeeds], given: Sequence[ResourceLimit]
) -> dict[ResourcePool, int]:
    """How much there is of each pool that anybody needs.

    It is what was `given`, if anything was (a resource that is not among it cannot be had), or
    else the most that a single execution needs. Raises INVALID_ARG with Triton's texts if that
    is too little for somebody, or if a resource is both on devices and shared.
    """
    most: dict[ResourcePool, int] = {}
    for needs in everybody:
        for pool, count in needs.items():
            most[pool] = max(count, most.get(pool, 0))
    found = {pool: _given(pool, given) for pool in most} if given else dict(most)
    for pool, count in most.items():
        if found[pool] < count:
            raise _too_little(pool, found[pool], count)
        if pool.device is not None and ResourcePool(pool.name, None) in most:
            raise InferenceError(
                Code.INVALID_ARG,
                f'Resource "{pool.name}" is present as both global and device-specific resource '
                "in the model configuration.",
            )
    return found


def choose(claims: Sequence[Claim], left: Mapping[ResourcePool, int]) -> int | None:
    """The index of the claim whose instance executes next; None if there is not enough left.

    Scores decide, and among equal ones the order. One for which there is not enough is passed
    over, but only by those who leave it all that it waits for: who needs much is not starved.
    """
    remaining = Counter(left)
    for index in sorted(range(len(claims)), key=lambda index: claims[index].score):
        needs = claims[index].needs
        if all(not count or remaining[pool] >= count for pool, count in needs.items()):
            return index
        remaining.subtract(needs)
    return None


def _given(pool: ResourcePool, given: Sequence[ResourceLimit]) -> int:
    """The largest limit that holds for a pool; a shared one has no device, whatever was said."""
    return max(
        (
            each.count
            for each in given
            if each.name == pool.name
            and (pool.device is None or each.device in (None, pool.device))
        ),
        default=0,
    )


def _too_little(pool: ResourcePool, limit: int, needed: int) -> InferenceError:
    return InferenceError(
        Code.INVALID_ARG,
        f'Resource count for "{pool.name}" is limited to {limit} which will prevent scheduling of '
        f"one or more model instances, the minimum required count is {needed}",
    )
