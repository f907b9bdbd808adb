"""How much does an execution need, how much is there, and whose turn is it?

Triton's rate limiter (`ModelRateLimiter` of the model configuration).
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from gateway.config import InstanceGroup
from gateway.errors import Code, InferenceError
from gateway.settings import ResourceLimit


class Pool(NamedTuple):
    """A resource on one device, or with None the one that all devices share."""

    name: str
    device: int | None


Needs = Mapping[Pool, int]
"""How much of each pool an execution holds while it runs."""


class Claim(NamedTuple):
    """What an instance that could execute needs; the smallest score goes first."""

    score: int
    needs: Needs


def needs_of(group: InstanceGroup, device: int) -> Needs:
    """What each execution on that device needs; of a resource named twice the larger count."""
    needs: dict[Pool, int] = {}
    for each in group.rate_limiter.resources if group.rate_limiter is not None else ():
        pool = Pool(each.name, None if each.global_ else device)
        needs[pool] = max(each.count, needs.get(pool, 0))
    return needs


def availability(everybody: Iterable[Needs], given: Sequence[ResourceLimit]) -> dict[Pool, int]:
    """How much there is of each pool that anybody needs.

    It is what was `given`, if anything was (a resource that is not among it cannot be had), or
    else the most that a single execution needs. Raises INVALID_ARG with Triton's texts if that
    is too little for somebody, or if a resource is both on devices and shared.
    """
    most: dict[Pool, int] = {}
    for needs in everybody:
        for pool, count in needs.items():
            most[pool] = max(count, most.get(pool, 0))
    found = {pool: _given(pool, given) for pool in most} if given else dict(most)
    for pool, count in most.items():
        if found[pool] < count:
            raise _too_little(pool, found[pool], count)
        if pool.device is not None and Pool(pool.name, None) in most:
            raise InferenceError(
                Code.INVALID_ARG,
                f'Resource "{pool.name}" is present as both global and device-specific resource '
                "in the model configuration.",
            )
    return found


def choose(claims: Sequence[Claim], left: Mapping[Pool, int]) -> int | None:
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


def _given(pool: Pool, given: Sequence[ResourceLimit]) -> int:
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


def _too_little(pool: Pool, limit: int, needed: int) -> InferenceError:
    return InferenceError(
        Code.INVALID_ARG,
        f'Resource count for "{pool.name}" is limited to {limit} which will prevent scheduling of '
        f"one or more model instances, the minimum required count is {needed}",
    )
