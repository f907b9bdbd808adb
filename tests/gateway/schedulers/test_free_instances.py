"""Which instance takes the next execution, with and without turns."""

import weakref

import pytest

from gateway.config import InstanceGroup
from gateway.schedulers.free_instances import FreeInstances
from gateway.schedulers.rate_limiter import RateLimiter
from tests.builders import ScriptedInstance, settle

PLAIN = InstanceGroup()


class Free:
    """Free instances, and those that were taken when their turn came."""

    def __init__(self, wanted: int = 1) -> None:
        self.instances = FreeInstances(self.on_turn)
        self.taken: list[object] = []
        self.turns = 0
        self.wanted = wanted

    def on_turn(self) -> None:
        self.turns += 1
        while self.wanted and (instance := self.instances.take()) is not None:
            self.taken.append(instance)
            self.wanted -= 1


async def test_whoever_has_been_free_for_longest_is_taken() -> None:
    free = Free().instances
    one, other = ScriptedInstance(1), ScriptedInstance(1)
    free.add(one)
    free.add(other)
    assert free.first is one
    assert [free.take(), free.take(), free.take()] == [one, other, None]
    assert not free
    free.ended(other)
    free.ended(one)
    assert [free.take(), free.take()] == [other, one]


@pytest.mark.parametrize(("concurrency", "times"), [(1, 1), (3, 3), (None, 9)])
async def test_an_instance_is_taken_as_often_as_it_can_execute(
    concurrency: int | None, times: int
) -> None:
    free = Free().instances
    instance = ScriptedInstance(concurrency)
    free.add(instance)
    assert [free.take() for _ in range(times)] == [instance] * times
    assert bool(free) is (concurrency is None)


async def test_one_that_has_gone_does_not_come_back() -> None:
    free = Free().instances
    instance = ScriptedInstance(2)
    free.add(instance)
    assert free.take() is instance
    free.forget(instance)
    assert not free.knows(instance)
    free.ended(instance)
    assert free.take() is None


async def test_with_a_limiter_an_instance_is_taken_in_its_turn_only() -> None:
    limiter, free = RateLimiter(), Free()
    instance = ScriptedInstance(1)
    free.instances.add(instance, limiter.register(PLAIN, 0))
    assert free.instances.limited
    assert free.instances.take() is None
    await settle()
    assert (free.taken, free.turns) == ([instance], 1)
    assert not free.instances


async def test_a_turn_that_is_not_used_is_lost_and_nothing_is_held() -> None:
    limiter, free = RateLimiter(), Free(wanted=0)
    instance = ScriptedInstance(1)
    share = limiter.register(PLAIN, 0)
    free.instances.add(instance, share)
    free.instances.take()
    await settle()
    assert (free.taken, free.turns, share.executions) == ([], 1, 0)
    free.wanted = 1
    free.instances.take()
    await settle()
    assert (free.taken, free.turns, share.executions) == ([instance], 2, 1)


async def test_whoever_rests_gets_no_turn() -> None:
    limiter, free = RateLimiter(), Free()
    free.instances.add(ScriptedInstance(1), limiter.register(PLAIN, 0))
    free.instances.take()
    free.instances.rest()
    await settle()
    assert free.turns == 0


async def test_one_that_goes_while_it_waits_gets_no_turn() -> None:
    limiter, free = RateLimiter(), Free()
    instance = ScriptedInstance(1)
    free.instances.add(instance, limiter.register(PLAIN, 0))
    free.instances.take()
    free.instances.forget(instance)
    await settle()
    assert free.turns == 0
    replacement = ScriptedInstance(1)
    free.instances.add(replacement, limiter.register(PLAIN, 0))
    free.instances.take()
    await settle()
    assert free.taken == [replacement]


async def test_a_limiter_keeps_nobody_whose_instances_have_gone() -> None:
    limiter, free = RateLimiter(), Free()
    instance = ScriptedInstance(1)
    free.instances.add(instance, limiter.register(PLAIN, 0))
    free.instances.take()
    free.instances.forget(instance)
    gone = weakref.ref(free.instances)
    del free.instances
    assert gone() is None
