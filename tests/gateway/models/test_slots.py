"""Which places do instance groups make, and which instances may go on in other ones?"""

import asyncio
from dataclasses import replace

import pytest

from gateway.backend import Instance
from gateway.config import InstanceGroup, InstanceKind
from gateway.errors import Code, InferenceError
from gateway.models.slots import Place, Slot, fill, match, places
from tests.builders import TEXT, ScriptedInstance, soon

CPU = InstanceGroup(name="cpu", kind=InstanceKind.KIND_CPU, count=2)
GPU = InstanceGroup(name="gpu", kind=InstanceKind.KIND_GPU, count=2, gpus=(0, 1))
BROKEN = InferenceError(Code.INTERNAL, "no room")


async def nothing() -> Instance:
    raise AssertionError("nothing is loaded here")


def slot(group: InstanceGroup, device: int = 0) -> Slot:
    return Slot(nothing, Place(name=f"{group.name}_0", group=group, device=device))


def test_each_group_has_its_count_on_each_gpu() -> None:
    found = list(places(replace(TEXT, instance_group=(CPU, GPU))))
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
    assert [each.name for each in places(TEXT)] == ["text_0"]


def test_names_and_counts_make_no_difference_but_settings_and_devices_do() -> None:
    renamed = replace(CPU, name="other", count=9)
    present = [slot(CPU), slot(CPU), slot(GPU), slot(GPU, 1)]
    wanted = [slot(GPU, 1), slot(renamed), slot(renamed), slot(renamed)]
    passive = slot(replace(CPU, passive=True))
    assert match([*wanted, passive], present) == [present[3], present[0], present[1], None, None]


@pytest.mark.parametrize("side_by_side", [True, False])
async def test_if_one_cannot_be_loaded_none_stays_loaded(side_by_side: bool) -> None:
    loaded = ScriptedInstance()

    async def load() -> Instance:
        return loaded

    async def fail() -> Instance:
        raise BROKEN

    slots = [Slot(load), Slot(fail)]
    with pytest.raises(InferenceError, match="no room"):
        await soon(fill(slots, side_by_side=side_by_side))
    assert (loaded.closes, [each.instance for each in slots]) == (1, [None, None])


async def test_instances_load_side_by_side_only_if_they_may() -> None:
    loading, gate = 0, asyncio.Event()

    async def load() -> Instance:
        nonlocal loading
        loading += 1
        await gate.wait()
        return ScriptedInstance()

    together = asyncio.create_task(fill([Slot(load), Slot(load)], side_by_side=True))
    in_turn = asyncio.create_task(fill([Slot(load), Slot(load)], side_by_side=False))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert loading == 3
    gate.set()
    await soon(asyncio.gather(together, in_turn))
    assert loading == 4
