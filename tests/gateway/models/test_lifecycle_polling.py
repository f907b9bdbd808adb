"""Concurrent operations on models, polling, and namespaces."""

import asyncio
import os
import shutil
from pathlib import Path

import pytest

from gateway.errors import Code, InferenceError
from gateway.models.index import IndexRow
from gateway.models.repository import ModelRepository
from gateway.models.repository_control import RepositoryControl
from gateway.settings import ControlMode, ModelSettings
from tests.builders import WAIT_SECS, settle, soon
from tests.gateway.models.lifecycles import EXPLICIT, NO_WEIGHTS, answer, lookup, refusal, states
from tests.registries import ALL_VERSIONS, Backends, ScriptedBackend, Start, no_infer, write

# Operations at the same time.


async def test_loads_of_one_model_wait_for_each_other_and_load_it_once(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    write(tmp_path, "a", 1)
    write(tmp_path, "b", 1)
    control = await start(**EXPLICIT)
    backend.gate = asyncio.Semaphore(0)
    loads = [asyncio.create_task(control.load("a")) for _ in range(3)]
    assert await soon(backend.loading.get()) == "a 1"
    assert lookup(control, "a") == "'a' is still loading"
    assert (await states(control))[0] == ("a", "1", "LOADING", "")
    other = asyncio.create_task(control.load("b"))
    assert await soon(backend.loading.get()) == "b 1"
    backend.gate.release()
    backend.gate.release()
    await soon(asyncio.gather(*loads, other))
    assert len(backend.instances["a 1"]) == 1


@pytest.mark.parametrize("served", [False, True])
async def test_an_unload_ends_the_load_before_it(
    tmp_path: Path, start: Start, backend: ScriptedBackend, served: bool
) -> None:
    write(tmp_path, "a", 1)
    control = await start(**EXPLICIT)
    if served:
        await soon(control.load("a"))
        await soon(backend.loading.get())
        write(tmp_path, "a", 1, more="parameters { key: 'k' value { string_value: 'v' } }")
    backend.gate = asyncio.Semaphore(0)
    load = asyncio.create_task(control.load("a"))
    await soon(backend.loading.get())
    await soon(control.unload("a"))
    with pytest.raises(InferenceError, match="it was unloaded while it was being loaded"):
        await soon(load)
    if served:
        await soon(backend.instances["a 1"][0].closed.wait())
        await settle()
    assert await states(control) == [("a", "1", "UNAVAILABLE", "unloaded")]
    backend.gate = None
    await soon(control.load("a"))
    assert await states(control) == [("a", "1", "READY", "")]


async def test_a_load_continues_after_its_client_disconnects(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    write(tmp_path, "a", 1)
    control = await start(**EXPLICIT)
    backend.gate = asyncio.Semaphore(0)
    load = asyncio.create_task(control.load("a"))
    await soon(backend.loading.get())
    load.cancel()
    await asyncio.wait([load])
    backend.gate.release()
    await soon(control.load("a"))
    assert len(backend.instances["a 1"]) == 1


async def test_stopping_fails_the_load_that_a_client_waits_for(
    tmp_path: Path, backend: ScriptedBackend
) -> None:
    write(tmp_path, "a", 1, 2, more=ALL_VERSIONS)
    settings = ModelSettings(repositories=(tmp_path,), **EXPLICIT)
    control = RepositoryControl(ModelRepository((tmp_path,)), settings, Backends(backend))
    running = asyncio.create_task(control.run(no_infer))
    await soon(control.registry.wait_settled())
    backend.gate = asyncio.Semaphore(1)
    load = asyncio.create_task(control.load("a"))
    await soon(backend.loading.get())
    await soon(backend.loading.get())  # the second waits at the gate
    running.cancel()
    with pytest.raises(InferenceError) as caught:
        await soon(load)
    assert (caught.value.code, caught.value.message) == (Code.UNAVAILABLE, "Server exiting")
    await asyncio.wait([running])
    loaded = [each for found in backend.instances.values() for each in found]
    assert [each.closes for each in loaded] == [1] * len(loaded)


# Polling.


async def test_polling_follows_the_folders(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    write(tmp_path, "a", 1)
    write(tmp_path, "gone", 1)
    control = await start(control_mode=ControlMode.POLL)
    model = control.registry.find("a", "")
    await soon(control.poll())
    assert control.registry.find("a", "") is model
    write(tmp_path, "new", 1)
    shutil.rmtree(tmp_path / "gone")
    (tmp_path / "a" / "2").mkdir()
    await soon(control.poll())
    await soon(backend.instances["gone 1"][0].closed.wait())
    await settle()
    assert [(each.name, each.version) for each in control.registry.models()] == [
        ("a", "2"),
        ("new", "1"),
    ]
    assert lookup(control, "gone") == "'gone' has no available versions"
    assert lookup(control, "gone", "1") == "'gone' version 1 is not at ready state"
    assert "gone" not in [row.name for row in await control.index()]
    assert control.registry.failures() == {}


async def test_a_folder_that_is_restored_unchanged_is_loaded_again(
    tmp_path: Path, start: Start
) -> None:
    write(tmp_path, "a", 1)
    control = await start(control_mode=ControlMode.POLL)
    os.rename(tmp_path / "a", tmp_path.parent / f"{tmp_path.name}-away")
    await soon(control.poll())
    assert list(control.registry.models()) == []
    os.rename(tmp_path.parent / f"{tmp_path.name}-away", tmp_path / "a")
    await soon(control.poll())
    assert control.registry.find("a", "").ready


async def test_a_model_that_is_half_copied_fails_and_is_loaded_once_it_is_whole(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    control = await start(control_mode=ControlMode.POLL)
    write(tmp_path, "a", 1, text='backend: "scri')
    await soon(control.poll())
    assert list(control.registry.failures()) == ["a"]
    assert (await states(control))[0][2] == "UNAVAILABLE"
    assert lookup(control, "a") == "'a' is not found"
    write(tmp_path, "a", 1)
    backend.errors["a 1"] = NO_WEIGHTS
    await soon(control.poll())
    assert control.registry.failures() == {"a version 1": "Internal: no weights"}
    await soon(control.poll())
    assert backend.loading.qsize() == 1
    (tmp_path / "a" / "1" / "weights").write_text("all of it")
    del backend.errors["a 1"]
    await soon(control.poll())
    assert control.registry.find("a", "").ready
    assert control.registry.failures() == {}


async def test_a_model_with_corrupted_files_keeps_serving(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    write(tmp_path, "a", 1)
    control = await start(control_mode=ControlMode.POLL)
    (tmp_path / "a" / "config.pbtxt").write_bytes(b"\x00\xff")
    await soon(control.poll())
    assert await states(control) == [("a", "1", "READY", "")]
    assert await answer(control, backend.instances["a 1"][0], "hi") == ["hi"]


async def test_a_removed_repository_changes_nothing(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    home = tmp_path / "models"
    home.mkdir()
    write(home, "a", 1)
    control = await start(home, control_mode=ControlMode.POLL)
    os.rename(home, tmp_path / "elsewhere")
    await soon(control.poll())
    assert await answer(control, backend.instances["a 1"][0], "hi") == ["hi"]


async def test_a_second_repository_with_the_name_ends_the_model_until_it_is_one_again(
    tmp_path: Path, start: Start
) -> None:
    homes = [tmp_path / "one", tmp_path / "two"]
    for home in homes:
        home.mkdir()
    write(homes[0], "a", 1)
    control = await start(*homes, control_mode=ControlMode.POLL)
    write(homes[1], "a", 1)
    await soon(control.poll())
    assert lookup(control, "a") == "'a' is not found"
    twice = "model appears in two or more repositories"
    assert control.registry.failures() == {"a": twice}
    assert await control.index() == [IndexRow("a", "", "UNAVAILABLE", twice)]
    shutil.rmtree(homes[0] / "a")
    await soon(control.poll())
    assert control.registry.find("a", "").ready
    assert control.registry.failures() == {}


async def test_a_name_that_two_repositories_have_from_the_start_is_a_failure(
    tmp_path: Path, start: Start
) -> None:
    homes = [tmp_path / "one", tmp_path / "two"]
    for home in homes:
        home.mkdir()
        write(home, "a", 1)
    control = await start(*homes)
    assert control.registry.failures() == {"a": "model appears in two or more repositories"}


async def test_a_model_that_never_loaded_and_is_removed_is_forgotten(
    tmp_path: Path, start: Start
) -> None:
    write(tmp_path, "a", 1, text="nonsense")
    control = await start(control_mode=ControlMode.POLL)
    assert list(control.registry.failures()) == ["a"]
    shutil.rmtree(tmp_path / "a")
    await soon(control.poll())
    assert (control.registry.failures(), await control.index()) == ({}, [])


async def test_polling_happens_by_itself(tmp_path: Path, start: Start) -> None:
    control = await start(control_mode=ControlMode.POLL, poll_secs=0.01)
    write(tmp_path, "a", 1)
    async with asyncio.timeout(WAIT_SECS):
        while not list(control.registry.models()):
            await control.registry.changed()


# The folder of a model that serves.


async def test_a_model_without_a_folder_serves_until_its_next_load(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    write(tmp_path, "a", 1)
    control = await start(startup=("a",), **EXPLICIT)
    shutil.rmtree(tmp_path / "a")
    assert await answer(control, backend.instances["a 1"][0], "hi") == ["hi"]
    assert await refusal(control, "a") == (
        "failed to load 'a', failed to poll from model repository: model 'a' is not in any "
        "repository"
    )
    assert await answer(control, backend.instances["a 1"][0], "hi") == ["hi"]
    assert await states(control) == [("a", "1", "READY", "")]


# Namespaces.


async def test_a_name_in_two_namespaces_has_to_be_unique_for_requests(
    tmp_path: Path, start: Start
) -> None:
    homes = [tmp_path / "one", tmp_path / "two"]
    for home in homes:
        home.mkdir()
        write(home, "a", 1)
    write(homes[1], "b", 1)
    control = await start(*homes, namespacing=True, **EXPLICIT)
    await soon(control.load("b"))
    await soon(control.load("a"))
    assert control.registry.find("b", "").namespace == str(homes[1])
    assert [each.namespace for each in control.registry.models()][:2] == [
        str(home) for home in homes
    ]
    with pytest.raises(InferenceError) as caught:
        control.registry.find("a", "")
    assert (caught.value.code, caught.value.message) == (
        Code.INVALID_ARG,
        "There are 2 identifiers of model 'a' in global map, model namespace must be provided to "
        "resolve ambiguity.",
    )
