"""Resources of executions, their amount and their turns; a real Triton agrees on limits."""

import pytest

from gateway.config import InstanceGroup, RateLimiter, Resource
from gateway.errors import Code, InferenceError
from gateway.schedulers.rate_limiter import (
    Claim,
    ResourceNeeds,
    ResourcePool,
    availability,
    choose,
    needs_of,
)
from gateway.settings import ResourceLimit

R, S = ResourcePool("R", 0), ResourcePool("S", 0)
SHARED = ResourcePool("R", None)
ONE: ResourceNeeds = {R: 1}
TWO: ResourceNeeds = {R: 2}
BOTH: ResourceNeeds = {R: 1, S: 1}


def group(*resources: Resource) -> InstanceGroup:
    return InstanceGroup(rate_limiter=RateLimiter(resources=resources))


def refused(needs: list[ResourceNeeds], *given: ResourceLimit) -> str:
    with pytest.raises(InferenceError) as caught:
        availability(needs, given)
    assert caught.value.code is Code.INVALID_ARG
    return caught.value.message


def test_a_resource_is_of_its_device_or_shared_by_all() -> None:
    both = group(Resource(name="R", count=2), Resource(name="S", global_=True, count=1))
    assert needs_of(both, 3) == {ResourcePool("R", 3): 2, ResourcePool("S", None): 1}
    assert needs_of(InstanceGroup(), 3) == {}


def test_of_a_resource_named_twice_the_larger_count_is_needed() -> None:
    twice = group(Resource(name="R", count=3), Resource(name="R", count=1))
    assert needs_of(twice, 0) == {R: 3}


def test_by_default_resources_suffice_for_the_largest_needs() -> None:
    assert availability([ONE, {R: 4, S: 1}, TWO, {}], ()) == {R: 4, S: 1}
    assert availability([], ()) == {}


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ([ResourceLimit("R", 5)], 5),
        ([ResourceLimit("R", 5, 0)], 5),
        ([ResourceLimit("R", 3, 0), ResourceLimit("R", 1)], 3),
        ([ResourceLimit("R", 1, 0), ResourceLimit("R", 3)], 3),
        ([ResourceLimit("R", 2, 0), ResourceLimit("R", 9, 1)], 2),
    ],
)
def test_a_limit_holds_for_its_device_or_for_each(given: list[ResourceLimit], found: int) -> None:
    assert availability([TWO], given) == {R: found}


def test_the_limit_of_a_shared_resource_has_no_device() -> None:
    assert availability([{SHARED: 1}], [ResourceLimit("R", 3, 5)]) == {SHARED: 3}


@pytest.mark.parametrize(
    ("given", "limit"),
    [
        (ResourceLimit("R", 1), 1),
        (ResourceLimit("R", 0), 0),
        (ResourceLimit("R", 3, 1), 0),
        (ResourceLimit("other", 3), 0),
    ],
)
def test_an_instance_that_could_never_execute_is_refused(given: ResourceLimit, limit: int) -> None:
    assert refused([ONE, TWO], given) == (
        f'Resource count for "R" is limited to {limit} which will prevent scheduling of one or '
        "more model instances, the minimum required count is 2"
    )


def test_a_resource_with_a_count_of_zero_is_not_needed() -> None:
    assert availability([{R: 0}], [ResourceLimit("R", 0)]) == {R: 0}
    assert choose([Claim(0, {R: 0})], {R: -1}) == 0


def test_a_resource_cannot_be_shared_and_of_a_device() -> None:
    assert refused([ONE, {SHARED: 1}]) == (
        'Resource "R" is present as both global and device-specific resource in the model '
        "configuration."
    )


@pytest.mark.parametrize(
    ("claims", "left", "chosen"),
    [
        ([], {R: 1}, None),
        ([Claim(3, {}), Claim(2, {}), Claim(2, {})], {}, 1),
        ([Claim(0, ONE)], {R: 0}, None),
        ([Claim(0, ONE)], {}, None),
        ([Claim(0, ONE)], {R: 1}, 0),
        ([Claim(0, TWO), Claim(5, {})], {R: 1}, 1),
        # A claim of two is not passed over by claims of one, with any amount free.
        ([Claim(0, TWO), Claim(5, ONE)], {R: 1}, None),
        ([Claim(6, TWO), Claim(5, ONE)], {R: 1}, 1),
        # Nor by claims of only a part of its resources,
        ([Claim(0, BOTH), Claim(5, ONE)], {R: 1, S: 0}, None),
        # but by claims that leave it enough.
        ([Claim(0, BOTH), Claim(5, ONE)], {R: 2, S: 0}, 1),
        ([Claim(0, BOTH), Claim(1, BOTH), Claim(5, ONE)], {R: 2, S: 0}, None),
    ],
)
def test_the_lowest_score_executes_first_and_is_not_starved(
    claims: list[Claim], left: dict[ResourcePool, int], chosen: int | None
) -> None:
    assert choose(claims, left) == chosen
