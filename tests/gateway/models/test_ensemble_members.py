"""Ensembles are loaded and unloaded with their members; texts are those of Triton 2.51.

They are those of a first load: of one that fails again Triton gives no reason.
"""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from gateway.errors import Code, InferenceError
from gateway.models.model_folder import Override
from gateway.models.repository_control import RepositoryControl
from gateway.settings import EVERY_MODEL, ControlMode
from tests.builders import WAIT_SECS, ScriptedInstance, read_all, soon, text_request
from tests.registries import CONFIG, ScriptedBackend, Start, write

EXPLICIT: dict[str, Any] = {"control_mode": ControlMode.EXPLICIT}
NO_WEIGHTS = InferenceError(Code.INTERNAL, "no weights")
INT_TEXT = CONFIG.replace("TYPE_STRING", "TYPE_INT32").format(backend="scripted", more="")


def chain(*names: str, more: str = "", version: int = -1) -> str:
    """The config of an ensemble that calls these models one after the other."""
    tensors = ["text_input", *(f"t{number}" for number in range(1, len(names))), "text_output"]
    steps = "".join(
        f"""step {{ model_name: "{name}" model_version: {version}
            input_map {{ key: "text_input" value: "{tensors[number]}" }}
            output_map {{ key: "text_output" value: "{tensors[number + 1]}" }} }}
        """
        for number, name in enumerate(names)
    )
    return f"""
        platform: "ensemble"
        input {{ name: "text_input" data_type: TYPE_STRING dims: 1 }}
        output {{ name: "text_output" data_type: TYPE_STRING dims: 1 }}
        ensemble_scheduling {{ {steps} }}
        {more}
    """


@pytest.fixture(autouse=True)
def repository(tmp_path: Path) -> None:
    """An ensemble `e` of `a` and `b`, and one, `outer`, of `e` and `b`."""
    write(tmp_path, "a", 1)
    write(tmp_path, "b", 1)
    write(tmp_path, "e", 1, text=chain("a", "b"))
    write(tmp_path, "outer", 1, text=chain("e", "b"))


def names(control: RepositoryControl) -> list[str]:
    return [model.name for model in control.registry.models()]


async def states(control: RepositoryControl, *wanted: str) -> dict[str, tuple[str, str]]:
    """State and reason of each, or of those that are wanted."""
    rows = {row.name: (row.state, row.reason) for row in await control.index()}
    return {name: rows[name] for name in wanted or rows}


async def refusal(control: RepositoryControl, name: str) -> tuple[Code, str]:
    with pytest.raises(InferenceError) as caught:
        await soon(control.load(name))
    return caught.value.code, caught.value.message


async def answer(control: RepositoryControl, name: str, *instances: ScriptedInstance) -> list[str]:
    """Ask a model; the instances answer in turn, each with one letter more."""
    with control.registry.find(name, "").submit(text_request("x", model=name)) as stream:
        for number, instance in enumerate(instances, 1):
            (await instance.begun()).finish("x" * (number + 1))
        return await soon(read_all(stream))


def only(backend: ScriptedBackend, name: str) -> ScriptedInstance:
    return backend.instances[f"{name} 1"][-1]


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
