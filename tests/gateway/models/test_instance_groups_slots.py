"""Placements of instance groups, and instances that an update can keep."""

import asyncio
from dataclasses import replace

import pytest

from gateway.backend import Instance
from gateway.config import InstanceGroup, InstanceKind, RateLimiter, Resource
from gateway.errors import Code, InferenceError
from gateway.models.instance_groups import (
    InstanceSlot,
    Placement,
    load_slots,
    match_slots,
    placements,
    register_slots,
    unregister_slots,
)
from gateway.schedulers.rate_limiter import ExecutionLimiter
from gateway.settings import ResourceLimit
from tests.builders import TEXT, ScriptedInstance, soon

CPU = InstanceGroup(name="cpu", kind=InstanceKind.KIND_CPU, count=2)
GPU = InstanceGroup(name="gpu", kind=InstanceKind.KIND_GPU, count=2, gpus=(0, 1))
BROKEN = InferenceError(Code.INTERNAL, "no room")


async def nothing() -> Instance:
    raise AssertionError("nothing is loaded here")


def slot(group: InstanceGroup, device: int = 0) -> InstanceSlot:
    return InstanceSlot(nothing, Placement(name=f"{group.name}_0", group=group, device=device))


def test_each_group_has_its_count_on_each_gpu() -> None:
    found = list(placements(replace(TEXT, instance_group=(CPU, GPU))))
    assert [(each.name, each.device) for each in found] == [
        ("cpu_0", 0),
        ("cpu_1", 0),
        ("gpu_0", 0),
        ("gpu_1", 0),
        ("gpu_0", 1),
        ("gpu_1", 1),
    ]
    assert [each.group for each in found] == [CPU] * 2 + [GPU] * 4


def test_without_groups_there_is_one_place() -> None:
    assert [each.name for each in placements(TEXT)] == ["text_0"]


def test_names_and_counts_make_no_difference_but_settings_and_devices_do() -> None:
    renamed = replace(CPU, name="other", count=9)
    present = [slot(CPU), slot(CPU), slot(GPU), slot(GPU, 1)]
    wanted = [slot(GPU, 1), slot(renamed), slot(renamed), slot(renamed)]
    passive = slot(replace(CPU, passive=True))
    assert match_slots([*wanted, passive], present) == [
        present[3],
        present[0],
        present[1],
        None,
        None,
    ]


@pytest.mark.parametrize("side_by_side", [True, False])
async def test_if_one_cannot_be_loaded_none_stays_loaded(side_by_side: bool) -> None:
    loaded = ScriptedInstance()

    async def load() -> Instance:
        return loaded

    async def fail() -> Instance:
        raise BROKEN

    slots = [InstanceSlot(load), InstanceSlot(fail)]
    with pytest.raises(InferenceError, match="no room"):
        await soon(load_slots(slots, side_by_side=side_by_side))
    assert (loaded.closes, [each.instance for each in slots]) == (1, [None, None])


async def test_instances_load_side_by_side_only_if_they_may() -> None:
    loading, gate = 0, asyncio.Event()

    async def load() -> Instance:
        nonlocal loading
        loading += 1
        await gate.wait()
        return ScriptedInstance()

    together = asyncio.create_task(
        load_slots([InstanceSlot(load), InstanceSlot(load)], side_by_side=True)
    )
    in_turn = asyncio.create_task(
        load_slots([InstanceSlot(load), InstanceSlot(load)], side_by_side=False)
    )
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert loading == 3
    gate.set()
    await soon(asyncio.gather(together, in_turn))
    assert loading == 4


def needing(count: int, device: int = 0) -> InstanceSlot:
    resources = (Resource(name="R", count=count),)
    return slot(replace(CPU, rate_limiter=RateLimiter(resources=resources)), device)


def test_each_active_slot_is_registered_for_its_device() -> None:
    slots = [needing(1), needing(2, device=1), slot(replace(CPU, passive=True))]
    register_slots(slots, ExecutionLimiter())
    found = [each.registration.needs if each.registration is not None else None for each in slots]
    assert found == [{("R", 0): 1}, {("R", 1): 2}, None]


def test_without_a_limiter_no_slot_is_registered() -> None:
    slots = [needing(1)]
    register_slots(slots, None)
    assert slots[0].registration is None


def test_if_one_slot_cannot_be_registered_none_is() -> None:
    limiter = ExecutionLimiter([ResourceLimit("R", 1)])
    slots = [needing(1), needing(2)]
    with pytest.raises(InferenceError, match="the minimum required count is 2"):
        register_slots(slots, limiter)
    assert [each.registration for each in slots] == [None, None]
    register_slots(slots[:1], limiter)
    unregister_slots(slots)
    assert slots[0].registration is None
