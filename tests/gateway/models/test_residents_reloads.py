"""New versions of models that may sleep are loaded and checked before they serve."""

import asyncio
from pathlib import Path

import pytest

from gateway.memory_settings import ModelMemory
from gateway.models import residence
from gateway.models.repository_control import RepositoryControl
from gateway.settings import ControlMode
from tests.builders import ScriptedInstance, read_all, settle, soon
from tests.gateway.models.golden.files import CAPITAL, write_golden
from tests.gateway.models.lifecycles import EXPLICIT, NO_WEIGHTS, refusal, states
from tests.gateway.models.sleeping import (
    answered,
    ask,
    eventually,
    given,
    loaded,
    model_of,
    stages,
)
from tests.gateway.models.test_residents import ONE
from tests.registries import ALL_VERSIONS, ScriptedBackend, Start, write

HOST = ModelMemory(host=1000 << 20)
"""Room for one model with LARGE."""
LARGE = {"memory_mb": 600}
ASLEEP = [("a", "1", "READY", "asleep"), ("a", "2", "UNAVAILABLE", "Internal: no weights")]


async def instance_of(backend: ScriptedBackend, key: str) -> ScriptedInstance:
    """The first instance of a version."""
    await eventually(lambda: bool(backend.instances.get(key)))
    return backend.instances[key][0]


async def still_answers(backend: ScriptedBackend, control: RepositoryControl, nth: int) -> None:
    """The version before serves, and alone takes memory."""
    assert len(control.residents.models) == 1
    assert control.residents.residence.residents.keys() == control.residents.models.keys()
    await answered(backend, control, "a", nth=nth)


async def test_a_broken_version_that_a_client_loads_leaves_the_one_before(
    tmp_path: Path, backend: ScriptedBackend, start: Start
) -> None:
    write(tmp_path, "a", 1)
    control = await start(memory=ONE, startup=("a",), **EXPLICIT)
    await answered(backend, control, "a")
    write(tmp_path, "a", 2)
    backend.errors["a 2"] = NO_WEIGHTS
    assert "no weights" in await refusal(control, "a")
    assert await states(control) == ASLEEP, "it has given its room to the new version"
    await still_answers(backend, control, nth=1)


async def test_a_broken_version_that_a_poll_finds_leaves_the_one_before_in_memory(
    tmp_path: Path, backend: ScriptedBackend, start: Start
) -> None:
    write(tmp_path, "a", 1, more=given(residency="on_demand"))
    control = await start(control_mode=ControlMode.POLL)
    await answered(backend, control, "a")
    write(tmp_path, "a", 2, more=given(residency="on_demand"))
    backend.errors["a 2"] = NO_WEIGHTS
    await soon(control.poll())
    assert await states(control) == [("a", "1", "READY", ""), ASLEEP[1]]
    (before,) = backend.instances["a 1"]
    with ask(control, "a") as stream:
        (await before.begun()).finish("before")
        assert await soon(read_all(stream)) == ["before"]


@pytest.mark.parametrize("text", ["Paris", "Lyon"])
async def test_a_version_answers_its_golden_requests_although_the_one_before_is_asleep(
    tmp_path: Path, backend: ScriptedBackend, start: Start, text: str
) -> None:
    write(tmp_path, "a", 1)
    control = await start(memory=ONE, startup=("a",), **EXPLICIT)
    write(tmp_path, "a", 2)
    write_golden(tmp_path / "a", "capital", CAPITAL)
    load = asyncio.create_task(control.load("a"))
    (await (await instance_of(backend, "a 2")).begun()).finish(text)
    if text == "Paris":
        await soon(load)
        assert (model_of(control, "a").version, stages(control)) == ("2", {"a": "awake"})
        return
    with pytest.raises(Exception, match="golden request 'capital'"):
        await soon(load)
    assert model_of(control, "a").version == "1"
    await still_answers(backend, control, nth=0)


async def test_at_the_start_models_with_golden_requests_answer_them_one_after_the_other(
    tmp_path: Path, backend: ScriptedBackend, start: Start
) -> None:
    for name in "ab":
        write(tmp_path, name, 1)
        write_golden(tmp_path / name, "capital", CAPITAL)
    starting = asyncio.create_task(start(memory=ONE))
    first = (await soon(backend.loading.get())).removesuffix(" 1")
    (await (await loaded(backend, first)).begun()).finish("Paris")
    second = (await soon(backend.loading.get())).removesuffix(" 1")
    assert backend.instances[f"{first} 1"][0].closes == 1, "its memory is free"
    (await (await loaded(backend, second)).begun()).finish("Paris")
    control = await soon(starting)
    assert stages(control) == {first: "asleep", second: "awake"}
    await answered(backend, control, first, nth=1)


async def test_a_version_without_room_is_not_loaded_and_the_error_names_what_takes_it(
    tmp_path: Path, backend: ScriptedBackend, start: Start
) -> None:
    write(tmp_path, "a", 1, more=given(residency="pinned"))
    control = await start(memory=ONE, startup=("a",), **EXPLICIT)
    await answered(backend, control, "a")
    write(tmp_path, "a", 2, more=given(residency="pinned"))
    text = "model 'a' is not in memory and there is no room: a (pinned)"
    assert text in await refusal(control, "a")
    (before,) = backend.instances["a 1"]
    with ask(control, "a") as stream:
        (await before.begun()).finish("before")
        assert await soon(read_all(stream)) == ["before"]


async def test_versions_that_load_together_need_room_for_one_only(
    tmp_path: Path, backend: ScriptedBackend, start: Start
) -> None:
    write(tmp_path, "a", 1, more=ALL_VERSIONS)
    control = await start(memory=ONE, control_mode=ControlMode.POLL)
    write(tmp_path, "a", 2, 3, more=ALL_VERSIONS)
    await soon(control.poll())
    in_memory = [each for each in control.registry.models() if not each.instances.asleep]
    assert len(in_memory) == 1


async def test_a_version_that_loads_with_a_broken_one_gives_its_room_back(
    tmp_path: Path, backend: ScriptedBackend, start: Start
) -> None:
    write(tmp_path, "a", 1, more=ALL_VERSIONS)
    control = await start(memory=ONE, startup=("a",), **EXPLICIT)
    write(tmp_path, "a", 2, 3, more=ALL_VERSIONS)
    backend.errors["a 3"] = NO_WEIGHTS
    assert "version 3 is at UNAVAILABLE state: Internal: no weights" in await refusal(control, "a")
    assert model_of(control, "a").version == "1"
    await still_answers(backend, control, nth=0)


async def test_models_that_are_always_in_memory_and_load_together_keep_within_the_budget(
    tmp_path: Path, backend: ScriptedBackend, start: Start
) -> None:
    for name in "ab":
        write(tmp_path, name, 1, more=given(**LARGE))
    control = await start(memory=HOST)
    (found,) = backend.instances
    assert list(stages(control)) == [found.removesuffix(" 1")]
    (refused,) = [row[3] for row in await states(control) if row[3]]
    assert "budget is 1.0 GiB, of which other versions always need 0.6 GiB" in refused


async def test_versions_that_are_always_in_memory_load_within_the_budget_or_none_does(
    tmp_path: Path, backend: ScriptedBackend, start: Start
) -> None:
    write(tmp_path, "a", 1, 2, more=given(**LARGE) + ALL_VERSIONS)
    control = await start(memory=HOST)
    assert [row[2] for row in await states(control)] == ["UNAVAILABLE", "UNAVAILABLE"]
    assert not control.residents.models


async def test_a_version_may_need_the_memory_of_the_one_that_it_replaces(
    tmp_path: Path, backend: ScriptedBackend, start: Start
) -> None:
    write(tmp_path, "a", 1, more=given(**LARGE))
    write(tmp_path, "b", 1, more=given(memory_mb=300, residency="on_demand"))
    control = await start(memory=HOST, startup=("a", "b"), **EXPLICIT)
    backend.gate = asyncio.Semaphore(0)
    write(tmp_path, "a", 2, more=given(**LARGE))
    load = asyncio.create_task(control.load("a"))
    await eventually(lambda: backend.loading.qsize() == 2)
    waiting = ask(control, "b")
    await settle()
    backend.gate.release()
    await soon(load)
    assert model_of(control, "a").version == "2"
    backend.gate.release()
    (await (await loaded(backend, "b")).begun()).finish("b")
    assert await soon(read_all(waiting)) == ["b"], "it has waited for the room of version 1"


async def test_a_version_that_did_not_load_gives_its_memory_back(
    tmp_path: Path, backend: ScriptedBackend, start: Start
) -> None:
    for name in "ab":
        write(tmp_path, name, 1, more=given(**LARGE))
    backend.errors["a 1"] = NO_WEIGHTS
    control = await start(memory=HOST, **EXPLICIT)
    assert "no weights" in await refusal(control, "a")
    assert not control.residents.models
    await soon(control.load("b"))
    assert "of which other versions always need 0.6 GiB" in await refusal(control, "a")


async def test_a_load_that_waits_for_room_keeps_no_other_model_from_loading(
    tmp_path: Path, backend: ScriptedBackend, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(residence, "STAY_SECS", 0.0)
    for name in "ap":
        write(tmp_path, name, 1, more=given(residency="on_demand", **LARGE))
    settings = {"memory": HOST, "load_thread_count": 1, **EXPLICIT}
    control = await start(startup=("a", "p"), **settings)
    stream = ask(control, "p")
    execution = await (await loaded(backend, "p")).begun()
    write(tmp_path, "a", 2, more=given(residency="on_demand", **LARGE))
    load = asyncio.create_task(control.load("a"))
    await eventually(lambda: len(control.residents.models) == 3)
    write(tmp_path, "x", 1)
    await soon(control.load("x"))
    assert not load.done()
    execution.finish("p")
    assert await soon(read_all(stream)) == ["p"]
    await soon(load)
    assert model_of(control, "a").version == "2"
