"""Loads and unloads of some versions of a model while its others serve."""

from pathlib import Path

import pytest

from gateway.models.repository import ModelId
from gateway.models.repository_control import RepositoryControl
from tests.builders import read_all, settle, soon, text_request
from tests.gateway.models.ensembles import chain
from tests.gateway.models.lifecycles import EXPLICIT, NO_WEIGHTS, answer, refusal
from tests.registries import ALL_VERSIONS, ScriptedBackend, Start, write


def serving(control: RepositoryControl, name: str = "a") -> list[str]:
    return [model.version for model in control.registry.models() if model.name == name]


def loads(backend: ScriptedBackend) -> dict[str, int]:
    """The number of loads of each version."""
    return {key: len(loaded) for key, loaded in backend.instances.items()}


async def test_a_new_version_is_the_only_one_that_loads(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    write(tmp_path, "a", 1, 2, 3, more=ALL_VERSIONS)
    control = await start(startup=("a",), **EXPLICIT)
    kept = list(control.registry.models())
    (third,) = backend.instances["a 3"]
    with kept[2].submit(text_request()) as stream:
        execution = await third.begun()
        write(tmp_path, "a", 4, more=ALL_VERSIONS)
        await soon(control.load("a"))
        assert list(control.registry.models())[:3] == kept
        assert loads(backend) == {"a 1": 1, "a 2": 1, "a 3": 1, "a 4": 1}
        execution.finish("undisturbed")
        assert await soon(read_all(stream)) == ["undisturbed"]
    assert kept[2].statistics.success.count == 1
    assert (third.closes, control.registry.find("a", "").version) == (0, "4")


async def test_a_new_version_that_fails_leaves_the_others_alone(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    write(tmp_path, "a", 1, 2, more=ALL_VERSIONS)
    control = await start(startup=("a",), **EXPLICIT)
    kept = list(control.registry.models())
    backend.errors["a 3"] = NO_WEIGHTS
    write(tmp_path, "a", 3, more=ALL_VERSIONS)
    assert "version 3 is at UNAVAILABLE state" in await refusal(control, "a")
    assert list(control.registry.models()) == kept
    assert await answer(control, backend.instances["a 2"][0], "hi") == ["hi"]


@pytest.mark.parametrize(
    ("changed", "loaded_again"),
    [("2/weights", {"a 2"}), ("3/deep/weights", {"a 3"}), ("labels.txt", {"a 1", "a 2", "a 3"})],
)
async def test_only_versions_with_changed_files_load_again(
    tmp_path: Path, start: Start, backend: ScriptedBackend, changed: str, loaded_again: set[str]
) -> None:
    write(tmp_path, "a", 1, 2, 3, more=ALL_VERSIONS)
    control = await start(startup=("a",), **EXPLICIT)
    path = tmp_path / "a" / changed
    path.parent.mkdir(exist_ok=True)
    path.write_text("new")
    await soon(control.load("a"))
    assert {key for key, count in loads(backend).items() if count == 2} == loaded_again
    assert serving(control) == ["1", "2", "3"]


def selecting(*versions: int) -> str:
    listed = ", ".join(map(str, versions))
    return f"version_policy {{ specific {{ versions: [{listed}] }} }}"


async def test_a_changed_policy_loads_and_unloads_the_difference(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    write(tmp_path, "a", 1, 2, 3, more=selecting(1, 2))
    control = await start(startup=("a",), **EXPLICIT)
    second = control.registry.find("a", "2")
    write(tmp_path, "a", more=selecting(2, 3))
    await soon(control.load("a"))
    assert serving(control) == ["2", "3"]
    assert control.registry.find("a", "2") is second
    assert loads(backend) == {"a 1": 1, "a 2": 1, "a 3": 1}
    await soon(backend.instances["a 1"][0].closed.wait())


async def test_a_removed_version_folder_unloads_its_version(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    write(tmp_path, "a", 1, 2, more=ALL_VERSIONS)
    control = await start(startup=("a",), **EXPLICIT)
    (tmp_path / "a" / "1").rmdir()
    await soon(control.load("a"))
    assert serving(control) == ["2"]
    assert loads(backend) == {"a 1": 1, "a 2": 1}


@pytest.mark.parametrize(("called", "stays"), [(1, True), (-1, False)])
async def test_an_ensemble_of_a_version_that_stays_is_not_loaded_again(
    tmp_path: Path, start: Start, called: int, stays: bool
) -> None:
    write(tmp_path, "a", 1, more=ALL_VERSIONS)
    write(tmp_path, "e", 1, 2, text=chain("a", "a", version=called, more=ALL_VERSIONS))
    control = await start(startup=("e",), **EXPLICIT)
    ensembles = [control.registry.find("e", version) for version in ("1", "2")]
    write(tmp_path, "a", 2, more=ALL_VERSIONS)
    await soon(control.load("a"))
    now = [control.registry.find("e", version) for version in ("1", "2")]
    assert (now == ensembles) is stays
    write(tmp_path, "e", 3, text=chain("a", "a", version=called, more=ALL_VERSIONS))
    await soon(control.load("e"))
    assert [control.registry.find("e", version) for version in ("1", "2")] == now
    assert serving(control, "e") == ["1", "2", "3"]


async def test_held_versions_serve_without_being_selected_by_the_policy(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    write(tmp_path, "a", 1)
    control = await start(startup=("a",), **EXPLICIT)
    known = control.registry.get_or_add(ModelId("a"))
    known.held = frozenset({1, 7})
    write(tmp_path, "a", 2)
    await soon(control.load("a"))
    assert serving(control) == ["1", "2"]
    known.held = frozenset()
    await soon(control.load("a"))
    assert serving(control) == ["2"]
    assert loads(backend) == {"a 1": 1, "a 2": 1}


async def test_a_request_without_a_version_gets_the_stable_one(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    once = 'parameters { key: "restart_tries" value { string_value: "0" } }'
    write(tmp_path, "a", 1, 2, more=ALL_VERSIONS + once)
    control = await start(startup=("a",), **EXPLICIT)
    control.registry.get_or_add(ModelId("a")).labels["stable"] = 1
    stable = control.registry.find("a", "")
    assert stable.version == "1"
    backend.instances["a 1"][0].die("it is out of memory")
    await settle()
    assert control.registry.find("a", "").version == "2"
    control.registry.get_or_add(ModelId("a")).labels["stable"] = 9
    assert control.registry.find("a", "").version == "2"
