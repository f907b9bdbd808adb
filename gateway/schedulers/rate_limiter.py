"""The rate limiter: turns of the instances of all models, by the resources they need.

Triton's rate limiter (`ModelRateLimiter` of the model configuration).
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
    """A resource of one device; None for a resource that all devices share."""

    name: str
    device: int | None


ResourceNeeds = Mapping[ResourcePool, int]
"""The amount of each pool that an execution holds."""


class Claim(NamedTuple):
    """The needs of an instance that could execute; the lowest score has the first turn."""

    score: int
    needs: ResourceNeeds


class Registration:
    """An instance's entry in the rate limiter, until `unregister`."""

    __slots__ = ("executions", "limiter", "needs", "priority")

    def __init__(self, limiter: "ExecutionLimiter", needs: ResourceNeeds, priority: int) -> None:
        self.limiter = limiter
        self.needs = needs
        self.priority = max(priority, 1)
        self.executions = 0

    @property
    def claim(self) -> Claim:
        """Its claim for a turn."""
        return Claim(self.executions * self.priority, self.needs)

    def unregister(self) -> None:
        """Remove it from the limiter; idempotent."""
        self.limiter.unregister(self)


class RateLimitedInstances(Protocol):
    """The instances of one model, as the rate limiter sees them."""

    def candidates(self) -> Iterator[tuple[Instance, Registration]]:
        """The free instances with their registrations."""

    def offer(self, instance: Instance) -> None:
        """Give an instance its turn, which ends with this call."""


class ExecutionLimiter:
    """Gives the instances of all models their turns, and counts the resources they hold.

    Turns are given in a separate turn of the event loop, so that all requests for turns of one
    loop turn are compared. A waiting instance holds no resources, so there is no deadlock.
    """

    def __init__(self, given: Sequence[ResourceLimit] = ()) -> None:
        self._given = tuple(given)
        self._registrations: dict[Registration, None] = {}
        self._available: dict[ResourcePool, int] = {}
        self._held: Counter[ResourcePool] = Counter()
        self._asking: dict[RateLimitedInstances, None] = {}
        self._decision: asyncio.Handle | None = None

    def register(self, group: InstanceGroup, device: int) -> Registration:
        """Register an instance of a group on a device; INVALID_ARG if it could never execute."""
        priority = group.rate_limiter.priority if group.rate_limiter is not None else 0
        registration = Registration(self, needs_of(group, device), priority)
        self._available = self._compute((*self._registrations, registration))
        self._registrations[registration] = None
        return registration

    def unregister(self, registration: Registration) -> None:
        """Remove a registration, and recompute the available resources."""
        if registration in self._registrations:
            del self._registrations[registration]
            self._available = self._compute(self._registrations)
            self._decide_soon()

    def ask(self, model: RateLimitedInstances) -> None:
        """Call `offer` once, in the turn of one of its candidates."""
        self._asking.setdefault(model)
        self._decide_soon()

    def rest(self, model: RateLimitedInstances) -> None:
        """Withdraw `ask`."""
        if model in self._asking:
            del self._asking[model]
            self._decide_soon()

    def began(self, registration: Registration) -> None:
        """Count an execution, and the resources that it holds."""
        registration.executions += 1
        self._held.update(registration.needs)

    def ended(self, registration: Registration) -> None:
        """Release the resources of an execution."""
        self._held.subtract(registration.needs)
        self._decide_soon()

    def _compute(self, registrations: Iterable[Registration]) -> dict[ResourcePool, int]:
        return availability((registration.needs for registration in registrations), self._given)

    def _decide_soon(self) -> None:
        if self._asking and self._decision is None:
            self._decision = asyncio.get_running_loop().call_soon(self._decide)

    def _decide(self) -> None:
        self._decision = None
        while True:
            found = [
                (model, instance, registration)
                for model in self._asking
                for instance, registration in model.candidates()
                if registration in self._registrations
            ]
            left = {pool: count - self._held[pool] for pool, count in self._available.items()}
            index = choose([registration.claim for _, _, registration in found], left)
            if index is None:
                return
            model, instance, _ = found[index]
            del self._asking[model]
            model.offer(instance)


def needs_of(group: InstanceGroup, device: int) -> ResourceNeeds:
    """The needs of each execution on a device; the larger count of a resource named twice."""
    needs: dict[ResourcePool, int] = {}
    for each in group.rate_limiter.resources if group.rate_limiter is not None else ():
        pool = ResourcePool(each.name, None if each.global_ else device)
        needs[pool] = max(each.count, needs.get(pool, 0))
    return needs


def availability(
    all_needs: Iterable[ResourceNeeds], given: Sequence[ResourceLimit]
) -> dict[ResourcePool, int]:
    """The available count of each pool that is needed.

    If limits are `given`, a resource without one has a count of 0. Otherwise the count is the
    most that a single execution needs. Raises INVALID_ARG with Triton's texts if the count is too
    low for an execution, or if a resource is both global and of a device.
    """
    most: dict[ResourcePool, int] = {}
    for needs in all_needs:
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
    """The index of the claim that executes next; None if no claim can.

    Claims are in the order of their scores, then of their indices. A claim that has to wait is
    overtaken only by claims that do not use what it waits for, so that it is not starved.
    """
    remaining = Counter(left)
    for index in sorted(range(len(claims)), key=lambda index: claims[index].score):
        needs = claims[index].needs
        if all(not count or remaining[pool] >= count for pool, count in needs.items()):
            return index
        remaining.subtract(needs)
    return None


def _given(pool: ResourcePool, given: Sequence[ResourceLimit]) -> int:
    """The largest limit of a pool; for a shared resource the device of a limit is ignored."""
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
