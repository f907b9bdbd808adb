"""Instances that take the next execution, with and without a rate limiter."""

import weakref

import pytest

from gateway.config import InstanceGroup
from gateway.schedulers.rate_limiter import ExecutionLimiter
from gateway.schedulers.scheduler import FreeInstances, Lease
from tests.builders import ScriptedInstance, settle

PLAIN = InstanceGroup()


class Free:
    """Free instances, and those that were taken in their turns."""

    def __init__(self, wanted: int = 1) -> None:
        self.instances = FreeInstances(self.on_turn)
        self.taken: list[object] = []
        self.turns = 0
        self.wanted = wanted

    def on_turn(self) -> None:
        self.turns += 1
        while self.wanted and (lease := self.instances.take()) is not None:
            self.taken.append(lease.instance)
            self.wanted -= 1


def taken(free: FreeInstances, times: int = 1) -> list[Lease]:
    leases = [free.take() for _ in range(times)]
    return [lease for lease in leases if lease is not None]


async def test_the_instance_that_is_free_for_longest_is_taken_first() -> None:
    free = Free(wanted=0).instances
    one, other = ScriptedInstance(1), ScriptedInstance(1)
    free.add(one)
    free.add(other)
    assert free.first is one
    first, second = taken(free, 3)
    assert [first.instance, second.instance] == [one, other]
    assert not free.instances
    second.release()
    first.release()
    assert [lease.instance for lease in taken(free, 2)] == [other, one]


@pytest.mark.parametrize(("concurrency", "times"), [(1, 1), (3, 3), (None, 9)])
async def test_an_instance_is_taken_as_often_as_it_can_execute(
    concurrency: int | None, times: int
) -> None:
    free = Free().instances
    instance = ScriptedInstance(concurrency)
    free.add(instance)
    assert [lease.instance for lease in taken(free, times)] == [instance] * times
    assert bool(free.instances) is (concurrency is None)


async def test_a_removed_instance_is_not_taken_again() -> None:
    free = Free(wanted=0).instances
    instance = ScriptedInstance(2)
    free.add(instance)
    (lease,) = taken(free)
    free.remove(instance)
    assert not free.knows(instance)
    lease.release()
    assert free.take() is None


async def test_a_lease_ends_once() -> None:
    free = Free(wanted=0)
    free.instances.add(ScriptedInstance(1))
    (lease,) = taken(free.instances)
    lease.release()
    lease.release()
    assert free.turns == 1
    assert len(taken(free.instances, 2)) == 1


async def test_with_a_limiter_an_instance_is_taken_in_its_turn_only() -> None:
    limiter, free = ExecutionLimiter(), Free()
    instance = ScriptedInstance(1)
    free.instances.add(instance, limiter.register(PLAIN, 0))
    assert free.instances.limited
    assert free.instances.take() is None
    await settle()
    assert (free.taken, free.turns) == ([instance], 1)
    assert not free.instances.instances


async def test_an_unused_turn_ends_and_holds_no_resources() -> None:
    limiter, free = ExecutionLimiter(), Free(wanted=0)
    instance = ScriptedInstance(1)
    registration = limiter.register(PLAIN, 0)
    free.instances.add(instance, registration)
    free.instances.take()
    await settle()
    assert (free.taken, free.turns, registration.executions) == ([], 1, 0)
    free.wanted = 1
    free.instances.take()
    await settle()
    assert (free.taken, free.turns, registration.executions) == ([instance], 2, 1)


async def test_instances_without_queued_requests_get_no_turn() -> None:
    limiter, free = ExecutionLimiter(), Free()
    free.instances.add(ScriptedInstance(1), limiter.register(PLAIN, 0))
    free.instances.take()
    free.instances.rest()
    await settle()
    assert free.turns == 0


async def test_an_instance_removed_while_it_waits_gets_no_turn() -> None:
    limiter, free = ExecutionLimiter(), Free()
    instance = ScriptedInstance(1)
    free.instances.add(instance, limiter.register(PLAIN, 0))
    free.instances.take()
    free.instances.remove(instance)
    await settle()
    assert free.turns == 0
    replacement = ScriptedInstance(1)
    free.instances.add(replacement, limiter.register(PLAIN, 0))
    free.instances.take()
    await settle()
    assert free.taken == [replacement]


async def test_a_limiter_holds_no_reference_to_removed_instances() -> None:
    limiter, free = ExecutionLimiter(), Free()
    instance = ScriptedInstance(1)
    free.instances.add(instance, limiter.register(PLAIN, 0))
    free.instances.take()
    free.instances.remove(instance)
    gone = weakref.ref(free.instances)
    del free.instances
    assert gone() is None
