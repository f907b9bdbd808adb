"""Ensembles whose members change."""

import asyncio
from pathlib import Path

import pytest

from gateway.errors import InferenceError
from gateway.models.model_folder import Override
from gateway.settings import EVERY_MODEL
from tests.builders import read_all, soon, text_request
from tests.gateway.models.ensembles import (
    EXPLICIT,
    INT_TEXT,
    NO_WEIGHTS,
    answer,
    names,
    only,
    states,
)
from tests.registries import ScriptedBackend, Start, write

pytestmark = pytest.mark.usefixtures("two_ensembles")


# Changing.


async def test_an_ensemble_is_suspended_while_a_member_does_not_suit_it(
    tmp_path: Path, start: Start
) -> None:
    control = await start(startup=("outer",), **EXPLICIT)
    write(tmp_path, "b", 1, text=INT_TEXT)
    await soon(control.load("b"))
    assert names(control) == ["a", "b"]
    write(tmp_path, "b", 1)
    await soon(control.load("b"))
    assert names(control) == ["a", "b", "e", "outer"]


async def test_a_request_ends_with_the_members_it_began_with_and_later_ones_have_the_new(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    control = await start(startup=("e",), **EXPLICIT)
    old_a, old_b = only(backend, "a"), only(backend, "b")
    with control.registry.find("e", "").submit(text_request("x", model="e")) as stream:
        execution = await old_a.begun()
        write(tmp_path, "b", 1, more="parameters { key: 'new' value { string_value: '1' } }")
        await soon(control.load("b"))
        assert only(backend, "b") is not old_b
        execution.finish("xx")
        (await old_b.begun()).finish("the old one")
        assert await soon(read_all(stream)) == ["the old one"]
    await soon(old_b.closed.wait())
    assert await answer(control, "e", old_a, only(backend, "b")) == ["xxx"]


async def test_a_request_survives_the_unloading_of_members_it_has_not_reached(
    start: Start, backend: ScriptedBackend
) -> None:
    control = await start(startup=("e",), **EXPLICIT)
    a, b = only(backend, "a"), only(backend, "b")
    with control.registry.find("e", "").submit(text_request("x", model="e")) as stream:
        execution = await a.begun()
        await soon(control.unload("b"))
        assert await states(control, "b", "e") == dict.fromkeys("be", ("UNLOADING", ""))
        assert not b.closed.is_set()
        execution.finish("xx")
        (await b.begun()).finish("still there")
        assert await soon(read_all(stream)) == ["still there"]
    await soon(b.closed.wait())
    assert not a.closed.is_set()


async def test_a_failed_reload_of_a_member_does_not_affect_the_ensemble(
    start: Start, backend: ScriptedBackend
) -> None:
    control = await start(startup=("e",), **EXPLICIT)
    ensemble = control.registry.find("e", "")
    backend.errors["b 1 again"] = NO_WEIGHTS
    override = Override(config='{"backend": "scripted", "input": [], "output": []}')
    with pytest.raises(InferenceError):
        await soon(control.load("b", override))
    assert control.registry.find("e", "") is ensemble
    assert await answer(control, "e", only(backend, "a"), only(backend, "b")) == ["xxx"]


async def test_an_ensemble_whose_members_have_not_changed_is_not_loaded_again(
    start: Start,
) -> None:
    control = await start(**EXPLICIT, startup=(EVERY_MODEL,))
    ensemble = control.registry.find("e", "")
    await soon(control.load("b"))
    await soon(control.load("e"))
    assert control.registry.find("e", "") is ensemble


async def test_loads_of_members_and_ensembles_at_once_end_with_all_of_them_bound(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    control = await start(**EXPLICIT)
    async with asyncio.TaskGroup() as tasks:
        for name in ("outer", "b", "e", "a", "outer"):
            tasks.create_task(control.load(name))
    assert names(control) == ["a", "b", "e", "outer"]
    for number in range(3):
        more = f"parameters {{ key: 'n' value {{ string_value: '{number}' }} }}"
        write(tmp_path, "a", 1, more=more)
        write(tmp_path, "b", 1, more=more)
        async with asyncio.TaskGroup() as tasks:
            for name in ("a", "b", "e"):
                tasks.create_task(control.load(name))
    a, b = only(backend, "a"), only(backend, "b")
    assert await answer(control, "outer", a, b, b) == ["xxxx"]


async def test_an_ensemble_is_not_ready_while_the_instances_of_a_member_are_dead(
    start: Start, backend: ScriptedBackend
) -> None:
    control = await start(**EXPLICIT, startup=(EVERY_MODEL,))
    (instance,) = backend.instances["a 1"]
    backend.gate = asyncio.Semaphore(0)
    assert control.registry.find("outer", "").ready
    changed = asyncio.create_task(control.registry.changed())
    await asyncio.sleep(0)
    instance.die("its engine has stopped")
    await soon(changed)
    models = {name: control.registry.find(name, "") for name in ("a", "b", "e", "outer")}
    assert {name: each.ready for name, each in models.items()} == {
        "a": False,
        "b": True,
        "e": False,
        "outer": False,
    }
    assert models["outer"].trouble.startswith(
        "its member 'e' is not ready: its member 'a' is not ready: its engine has stopped"
    )
    assert "its engine has stopped" in control.registry.failures()["outer version 1"]
    backend.gate.release()
    while not models["outer"].ready:
        await soon(control.registry.changed())
    assert control.registry.failures() == {}
    assert control.registry.find("outer", "") is models["outer"], "it was not loaded again"
