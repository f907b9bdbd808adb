"""Ensembles are loaded and unloaded with their members; texts are those of Triton 2.51.

They are those of a first load: of one that fails again Triton gives no reason.
"""

import asyncio
import shutil
from pathlib import Path

import pytest

from gateway.errors import Code, InferenceError
from gateway.models.repository_control import RepositoryControl
from gateway.settings import EVERY_MODEL, ControlMode
from tests.builders import WAIT_SECS, soon
from tests.gateway.models.ensembles import (
    EXPLICIT,
    INT_TEXT,
    NO_WEIGHTS,
    answer,
    chain,
    names,
    only,
    states,
)
from tests.registries import ScriptedBackend, Start, write

pytestmark = pytest.mark.usefixtures("two_ensembles")


async def refusal(control: RepositoryControl, name: str) -> tuple[Code, str]:
    with pytest.raises(InferenceError) as caught:
        await soon(control.load(name))
    return caught.value.code, caught.value.message


# Coming.


async def test_an_ensemble_returns_the_response_of_its_last_member(
    start: Start, backend: ScriptedBackend
) -> None:
    control = await start()
    a, b = only(backend, "a"), only(backend, "b")
    assert await answer(control, "outer", a, b, b) == ["xxxx"]
    assert (a.asked, b.asked) == (["x"], ["xx", "xxx"])


async def test_members_that_are_not_there_are_loaded_first(start: Start) -> None:
    control = await start(startup=("a",), **EXPLICIT)
    a = control.registry.find("a", "")
    await soon(control.load("outer"))
    assert names(control) == ["a", "b", "e", "outer"]
    assert control.registry.find("a", "") is a


async def test_members_are_loaded_once_however_many_ensembles_call_them(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    for number in range(5):
        write(tmp_path, f"e{number}", 1, text=chain("b", "a"))
    control = await start()
    assert control.registry.failures() == {}
    assert {name: len(found) for name, found in backend.instances.items()} == {"a 1": 1, "b 1": 1}


async def test_a_member_that_fails_is_tried_once_and_its_ensembles_say_why(
    start: Start, backend: ScriptedBackend
) -> None:
    backend.errors["b 1"] = NO_WEIGHTS
    control = await start()
    why = (
        "ensemble 'e' depends on 'b' which has no loaded version. Model 'b' loading failed with "
        "error: version 1 is at UNAVAILABLE state: Internal: no weights;"
    )
    outer = (
        f"ensemble 'outer' depends on 'e' which is not valid. Model 'e' failed with error: {why}"
    )
    assert control.registry.failures() == {
        "b version 1": "Internal: no weights",
        "e": f"Invalid argument: {why}",
        "outer": f"Invalid argument: {outer}",
    }
    tried = [backend.loading.get_nowait() for _ in range(backend.loading.qsize())]
    assert sorted(tried) == ["a 1", "b 1"]
    assert control.registry.find("a", "").ready


async def test_a_load_error_names_the_failed_member(start: Start, backend: ScriptedBackend) -> None:
    backend.errors["b 1"] = NO_WEIGHTS
    control = await start(**EXPLICIT)
    assert await refusal(control, "e") == (
        Code.INVALID_ARG,
        "load failed for model 'e': ensemble 'e' depends on 'b' which has no loaded version. Model "
        "'b' loading failed with error: version 1 is at UNAVAILABLE state: Internal: no weights;\n",
    )
    with pytest.raises(InferenceError) as caught:
        control.registry.find("e", "")
    assert caught.value.message == "Request for unknown model: 'e' is not found"


async def test_members_that_are_nowhere_are_named(tmp_path: Path, start: Start) -> None:
    write(tmp_path, "e", 1, text=chain("absent", "a", "gone"))
    control = await start(**EXPLICIT)
    assert await refusal(control, "e") == (
        Code.INVALID_ARG,
        "load failed for model 'e': ensemble e contains models that are not available or "
        "ambiguous: absent, gone\n",
    )


@pytest.mark.parametrize("version", [9, 0, -5])
async def test_a_version_that_is_not_loaded_is_named(
    tmp_path: Path, start: Start, version: int
) -> None:
    write(tmp_path, "e", 1, text=chain("a", version=version))
    control = await start(**EXPLICIT)
    assert await refusal(control, "e") == (
        Code.INVALID_ARG,
        "load failed for model 'e': ensemble 'e' depends on 'a' whose required version "
        f"{version} is not loaded.\n",
    )
    assert await states(control, "a") == {"a": ("READY", "")}


async def test_members_that_do_not_fit_are_an_error_and_serve_on(
    tmp_path: Path, start: Start
) -> None:
    write(tmp_path, "b", 1, text=INT_TEXT)
    control = await start()
    assert control.registry.failures()["e"] == (
        "Invalid argument: in ensemble e, ensemble tensor t1: inconsistent data type: TYPE_STRING "
        "is inferred from model a while TYPE_INT32 is inferred from model b"
    )
    assert names(control) == ["a", "b"]


@pytest.mark.parametrize("mode", [ControlMode.EXPLICIT, ControlMode.NONE])
async def test_ensembles_that_need_one_another_are_refused_without_a_deadlock(
    tmp_path: Path, start: Start, mode: ControlMode
) -> None:
    for name, member in (("c1", "c2"), ("c2", "c3"), ("c3", "c1"), ("after", "c1"), ("me", "me")):
        write(tmp_path, name, 1, text=chain(member))
    control = await start(control_mode=mode, startup=(EVERY_MODEL,))
    circle = "Invalid argument: circular dependency between ensembles: "
    assert control.registry.failures() == {
        "c1": f"{circle}c1 -> ... -> c3 -> c1",
        "c2": f"{circle}c2 -> ... -> c1 -> c2",
        "c3": f"{circle}c3 -> ... -> c2 -> c3",
        "me": f"{circle}me -> ... -> me -> me",
        "after": "Invalid argument: ensemble 'after' depends on 'c1' which is not valid. Model "
        "'c1' failed with error: circular dependency between ensembles: c1 -> ... -> c3 -> c1",
    }
    assert names(control) == ["a", "b", "e", "outer"]
    if mode is ControlMode.EXPLICIT:
        assert await refusal(control, "c2") == (
            Code.INVALID_ARG,
            "load failed for model 'c2': circular dependency between ensembles: c2 -> ... -> c1 "
            "-> c2\n",
        )


async def test_a_member_is_looked_for_in_the_ensemble_s_own_namespace_first(
    tmp_path: Path, start: Start
) -> None:
    homes = [tmp_path / name for name in ("one", "two", "three")]
    for home in homes:
        home.mkdir()
        write(home, "e", 1, text=chain("a", "b"))
    for home in homes[:2]:
        write(home, "a", 1)
    write(homes[0], "b", 1)
    control = await start(*homes, namespacing=True)
    served = {str(home): [] for home in homes}
    for model in control.registry.models():
        served[model.namespace].append(model.name)
    assert list(served.values()) == [["a", "b", "e"], ["a", "e"], []]
    assert control.registry.failures() == {
        f"{homes[2]}::e": "Invalid argument: ensemble e contains models that are not available or "
        "ambiguous: a"
    }


# Going, and coming back.


async def test_an_ensemble_is_unloaded_and_loaded_with_its_member(start: Start) -> None:
    control = await start(startup=("outer",), **EXPLICIT)
    await soon(control.unload("b"))
    assert names(control) == ["a"]
    gone = dict.fromkeys(("b", "e", "outer"), ("UNAVAILABLE", "unloaded"))
    async with asyncio.timeout(WAIT_SECS):
        while await states(control, *gone) != gone:
            await control.registry.changed()
    assert control.registry.failures() == {}
    await soon(control.load("b"))
    assert names(control) == ["a", "b", "e", "outer"]


async def test_an_unloaded_ensemble_is_not_loaded_with_its_member(start: Start) -> None:
    control = await start(startup=("outer",), **EXPLICIT)
    await soon(control.unload("e"))
    assert names(control) == ["a", "b"]
    await soon(control.unload("b"))
    await soon(control.load("b"))
    assert names(control) == ["a", "b"]
    await soon(control.load("e"))
    assert names(control) == ["a", "b", "e", "outer"]


@pytest.mark.parametrize(("unload_dependents", "left"), [(False, ["a", "b"]), (True, ["b"])])
async def test_members_of_one_ensemble_only_are_unloaded_with_it_on_request(
    start: Start, unload_dependents: bool, left: list[str]
) -> None:
    control = await start(startup=("b",), **EXPLICIT)
    await soon(control.load("e"))
    await soon(control.unload("e", unload_dependents=unload_dependents))
    assert names(control) == left


async def test_an_ensemble_that_failed_is_loaded_once_its_member_is(
    start: Start, backend: ScriptedBackend
) -> None:
    backend.errors["b 1"] = NO_WEIGHTS
    control = await start(startup=("outer",), **EXPLICIT)
    assert names(control) == ["a"]
    del backend.errors["b 1"]
    await soon(control.load("b"))
    assert names(control) == ["a", "b", "e", "outer"]
    assert control.registry.failures() == {}


async def test_under_poll_an_ensemble_follows_the_folders_of_its_members(
    tmp_path: Path, start: Start
) -> None:
    control = await start(control_mode=ControlMode.POLL)
    shutil.rmtree(tmp_path / "b")
    await soon(control.poll())
    assert names(control) == ["a"]
    write(tmp_path, "b", 1)
    await soon(control.poll())
    assert names(control) == ["a", "b", "e", "outer"]
    shutil.rmtree(tmp_path / "b")
    shutil.rmtree(tmp_path / "outer")
    await soon(control.poll())
    write(tmp_path, "b", 1)
    await soon(control.poll())
    assert names(control) == ["a", "b", "e"]
