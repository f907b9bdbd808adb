"""Loads and unloads of some versions of a model while its others serve."""

from pathlib import Path

import pytest

from gateway.errors import InferenceError
from gateway.models.model_folder import Override, read_versions
from gateway.models.repository import ModelId
from gateway.models.repository_control import RepositoryControl
from tests.builders import read_all, settle, soon, text_request
from tests.gateway.models.ensembles import chain
from tests.gateway.models.lifecycles import EXPLICIT, NO_WEIGHTS, answer, lookup, refusal, states
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


def only(*versions: int) -> Override:
    return Override(versions=frozenset(versions))


async def test_versions_of_a_load_are_served_besides_those_that_serve_until_a_load_without_them(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    write(tmp_path, "a", 1, 2, 3)
    control = await start(startup=("a",), **EXPLICIT)
    await soon(control.load("a", only(1)))
    assert serving(control) == ["1", "3"]
    write(tmp_path, "a", 4)
    await soon(control.load("a", only(2)))
    assert serving(control) == ["1", "2", "3"]
    await soon(control.load("a"))
    assert serving(control) == ["4"]
    assert loads(backend) == {f"a {number}": 1 for number in (1, 2, 3, 4)}


async def test_a_changed_policy_ends_the_choice_of_versions(tmp_path: Path, start: Start) -> None:
    write(tmp_path, "a", 1, 2, 3, 4)
    control = await start(startup=("a",), **EXPLICIT)
    await soon(control.load("a", only(1)))
    write(tmp_path, "a", more=selecting(3))
    await soon(control.load("a", only(2)))
    assert serving(control) == ["2", "3"]


async def test_a_version_of_a_model_that_is_not_loaded_is_loaded_alone(
    tmp_path: Path, start: Start
) -> None:
    write(tmp_path, "a", 1, 2, more=ALL_VERSIONS)
    control = await start(**EXPLICIT)
    await soon(control.load("a", only(1)))
    assert serving(control) == ["1"]


async def test_a_version_that_is_not_there_is_neither_loaded_nor_unloaded(
    tmp_path: Path, start: Start
) -> None:
    write(tmp_path, "a", 1, 3, 4, more=ALL_VERSIONS)
    control = await start(startup=("a",), **EXPLICIT)
    for ask in (control.load("a", only(3, 9)), control.unload("a", frozenset({3, 9}))):
        with pytest.raises(InferenceError) as caught:
            await soon(ask)
        assert caught.value.message == "model 'a' has no version 9, it has 1, 3, 4"
    assert serving(control) == ["1", "3", "4"]


async def test_versions_are_unloaded_alone_and_the_last_one_with_its_model(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    write(tmp_path, "a", 1, 2, 3, more=ALL_VERSIONS)
    control = await start(startup=("a",), **EXPLICIT)
    with control.registry.find("a", "3").submit(text_request()) as stream:
        execution = await backend.instances["a 3"][0].begun()
        await soon(control.unload("a", frozenset({3})))
        assert serving(control) == ["1", "2"]
        execution.finish("done")
        assert await soon(read_all(stream)) == ["done"]
    await soon(backend.instances["a 3"][0].closed.wait())
    await settle()
    assert await states(control) == [
        ("a", "1", "READY", ""),
        ("a", "2", "READY", ""),
        ("a", "3", "UNAVAILABLE", "unloaded"),
    ]
    assert control.registry.failures() == {}
    await soon(control.load("a", only(1)))
    assert serving(control) == ["1", "2"]
    await soon(control.unload("a", frozenset({1, 2})))
    assert lookup(control, "a") == "'a' has no available versions"
    await soon(control.unload("a", frozenset({1})))
    await soon(control.load("a"))
    assert serving(control) == ["1", "2", "3"]


async def test_an_ensemble_ends_with_the_version_that_it_calls(
    tmp_path: Path, start: Start
) -> None:
    write(tmp_path, "a", 1, 2, more=ALL_VERSIONS)
    write(tmp_path, "e", 1, text=chain("a", "a", version=1))
    control = await start(startup=("e",), **EXPLICIT)
    await soon(control.unload("a", frozenset({2})))
    assert serving(control, "e") == ["1"]
    await soon(control.load("a", only(2)))
    await soon(control.unload("a", frozenset({1})))
    assert serving(control, "e") == []
    await soon(control.load("a", only(1)))
    assert serving(control, "e") == ["1"]


async def test_a_version_that_is_held_is_not_unloaded_alone(tmp_path: Path, start: Start) -> None:
    write(tmp_path, "a", 1, 2, more=ALL_VERSIONS)
    control = await start(startup=("a",), **EXPLICIT)
    control.registry.get_or_add(ModelId("a")).held = frozenset({2})
    with pytest.raises(InferenceError, match="version 2 of model 'a' is part of a rollout"):
        await soon(control.unload("a", frozenset({2})))
    await soon(control.unload("a", frozenset({1})))
    assert serving(control) == ["2"]


@pytest.mark.parametrize("text", ["", "x", "4,", "-1", "01", "3,3", "9" * 30])
def test_versions_that_are_no_numbers_are_refused(text: str) -> None:
    with pytest.raises(InferenceError, match=r"'versions': found .* such as"):
        read_versions(text)


def test_versions_are_numbers_with_commas_between() -> None:
    assert read_versions("3, 14") == {3, 14}
