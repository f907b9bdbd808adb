"""Models are loaded and reloaded while requests are served; none is dropped."""

import asyncio
import traceback
from pathlib import Path

import pytest

from gateway.backend_loader import BackendLoader
from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError
from gateway.models import repository as repository_module
from gateway.models.model_folder import Override
from gateway.models.repository import ModelRepository
from gateway.models.repository_control import RepositoryControl
from gateway.settings import EVERY_MODEL, ControlMode, ModelSettings
from tests.builders import read_all, settle, soon, text_request
from tests.gateway.models.lifecycles import (
    BATCHED,
    EXPLICIT,
    NO_WEIGHTS,
    answer,
    lookup,
    refusal,
    states,
)
from tests.registries import ALL_VERSIONS, ScriptedBackend, Start, write

# Control modes.


async def test_under_explicit_control_models_load_on_request_only(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    write(tmp_path, "a", 1)
    control = await start(**EXPLICIT)
    assert await states(control) == [("a", "", "", "")]
    assert control.registry.failures() == {}
    assert lookup(control, "a") == "'a' is not found"
    await soon(control.load("a"))
    assert await states(control) == [("a", "1", "READY", "")]
    assert await answer(control, backend.instances["a 1"][0], "hi") == ["hi"]


async def test_named_models_are_loaded_at_the_start(tmp_path: Path, start: Start) -> None:
    for name in ("a", "b", "c"):
        write(tmp_path, name, 1)
    control = await start(startup=("a", "c"), **EXPLICIT)
    assert [model.name for model in control.registry.models()] == ["a", "c"]
    everything = await start(startup=(EVERY_MODEL,), **EXPLICIT)
    assert [model.name for model in everything.registry.models()] == ["a", "b", "c"]


async def test_a_named_model_that_is_nowhere_is_a_failure(start: Start) -> None:
    control = await start(startup=("absent",), **EXPLICIT)
    reason = "Not found: model 'absent' is not in any repository"
    assert control.registry.failures() == {"absent": reason}


@pytest.mark.parametrize("mode", [ControlMode.NONE, ControlMode.POLL])
async def test_load_requests_are_refused_without_explicit_control(
    tmp_path: Path, start: Start, mode: ControlMode
) -> None:
    write(tmp_path, "a", 1)
    control = await start(control_mode=mode)
    for ask in (control.load("a"), control.unload("a")):
        with pytest.raises(InferenceError) as caught:
            await ask
        assert caught.value.code is Code.UNAVAILABLE
        assert caught.value.message == (
            "explicit model load / unload is not allowed if polling is enabled"
        )
    assert control.registry.find("a", "").ready


async def test_a_refusal_does_not_keep_those_before_it(start: Start) -> None:
    control = await start(control_mode=ControlMode.NONE)
    lengths = set()
    for _ in range(3):
        with pytest.raises(InferenceError) as caught:
            await control.load("a")
        lengths.add(len(traceback.extract_tb(caught.value.__traceback__)))
    assert len(lengths) == 1


async def test_nothing_can_be_loaded_before_the_registry_runs(tmp_path: Path) -> None:
    write(tmp_path, "a", 1)
    settings = ModelSettings(**EXPLICIT)
    control = RepositoryControl(ModelRepository((tmp_path,)), settings, BackendLoader())
    assert await refusal(control, "a") == "Server not ready"


# What cannot be loaded (the texts are those of Triton 2.51, with our detail behind them).


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "Model name cannot be empty. Please enter a valid name to deploy."),
        ("  ", "Model name cannot be empty. Please enter a valid name to deploy."),
        *(
            (
                name,
                f"invalid model name '{name}', model name must not contain path traversal "
                "characters",
            )
            for name in ("..", " .. ", "a/b", "/", "a\0b")
        ),
        *(
            (
                name,
                f"failed to load '{name}', failed to poll from model repository: model '{name}' "
                "is not in any repository",
            )
            for name in ("absent", "...", "..m", "x" * 300)
        ),
    ],
)
async def test_names_that_are_no_models(
    tmp_path: Path, start: Start, name: str, message: str
) -> None:
    write(tmp_path, "a", 1)
    control = await start(**EXPLICIT)
    assert await refusal(control, name) == message
    await soon(control.unload(name))
    await soon(control.load("a"))
    assert control.registry.find("a", "").ready


@pytest.mark.parametrize(
    "name",
    [
        *("a\nb", "\x1b[31ma", "a\u202eb", "a\u200bb", "e\u0301", "a\\b", " a", "a ", "\ud800"),
        *("x" * 256, "\u00e9" * 128),
    ],
)
async def test_an_uploaded_model_has_a_name_that_logs_can_show(start: Start, name: str) -> None:
    control = await start(**EXPLICIT)
    override = Override('{"backend": "scripted"}', {"file:1/x": b""})
    with pytest.raises(InferenceError) as caught:
        await control.load(name, override)
    assert caught.value.code is Code.INVALID_ARG
    assert caught.value.message.startswith(f"invalid model name {name[:64]!a} of ")
    assert list(control.registry) == []
    longest = "\u00e9" * 127 + "x"
    await soon(control.load(longest, override))
    assert control.registry.find(longest, "").ready


async def test_names_with_dots_are_fine(tmp_path: Path, start: Start) -> None:
    names = ("...", "..m", "m..1", "m.v1")
    for name in names:
        write(tmp_path, name, 1)
    control = await start(**EXPLICIT)
    for name in names:
        await soon(control.load(name))
        assert control.registry.find(name, "").name == name


async def test_an_unreadable_config_is_an_error_of_its_load_only(
    tmp_path: Path, start: Start
) -> None:
    write(tmp_path, "a", 1, text="\x00\x01\x02")
    control = await start(**EXPLICIT)
    message = await refusal(control, "a")
    assert message.startswith("failed to load 'a', failed to poll from model repository: a/config")
    assert await states(control) == [("a", "", "", "")]
    assert control.registry.failures() == {}


@pytest.mark.parametrize("mode", [ControlMode.EXPLICIT, ControlMode.POLL])
async def test_an_unforeseen_error_of_a_read_does_not_affect_other_models(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch, mode: ControlMode
) -> None:
    def fail(text: str, source: str) -> ModelConfig:
        raise RuntimeError(f"unforeseen in {tmp_path}")

    write(tmp_path, "a", 1)
    control = await start(startup=(EVERY_MODEL,), control_mode=mode)
    monkeypatch.setattr(repository_module, "parse", fail)
    write(tmp_path, "b", 1)
    why = "model 'b' cannot be read; the server's log says why"
    if mode is ControlMode.POLL:
        await soon(control.poll())
        assert control.registry.failures() == {"b": f"Internal: {why}"}
    else:
        assert (await refusal(control, "b")).endswith(f": {why}")
    assert control.registry.find("a", "").ready


async def test_a_model_without_versions_is_reported(tmp_path: Path, start: Start) -> None:
    write(tmp_path, "a")
    (tmp_path / "a" / "01").mkdir()
    control = await start(**EXPLICIT)
    none = "at least one version must be available under the version policy of model 'a'"
    assert await refusal(control, "a") == f"load failed for model 'a': {none}\n"
    assert lookup(control, "a") == "'a' has no available versions"
    assert lookup(control, "a", "1") == "'a' version 1 is not found"
    assert await states(control) == [("a", "", "UNAVAILABLE", f"Invalid argument: {none}")]


async def test_a_version_that_fails_names_its_reason(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    write(tmp_path, "a", 1, 2, more=ALL_VERSIONS)
    backend.errors["a 2"] = NO_WEIGHTS
    control = await start(**EXPLICIT)
    assert await refusal(control, "a") == (
        "load failed for model 'a': version 2 is at UNAVAILABLE state: Internal: no weights;\n"
    )
    assert await states(control) == [
        ("a", "1", "UNAVAILABLE", "unloaded"),
        ("a", "2", "UNAVAILABLE", "Internal: no weights"),
    ]
    assert lookup(control, "a") == "'a' has no available versions"
    assert lookup(control, "a", "2") == "'a' version 2 is not at ready state"
    assert list(control.registry.failures()) == ["a version 2"]


async def test_a_load_that_failed_is_tried_again_by_the_next_request(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    write(tmp_path, "a", 1)
    backend.errors["a 1"] = NO_WEIGHTS
    control = await start(**EXPLICIT)
    await refusal(control, "a")
    del backend.errors["a 1"]
    await soon(control.load("a"))
    assert control.registry.find("a", "").ready
    assert control.registry.failures() == {}


async def test_a_version_is_tried_as_often_as_it_may(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    write(tmp_path, "a", 1)
    backend.errors["a 1"] = NO_WEIGHTS
    control = await start(load_retry_count=2)
    assert control.registry.failures() == {"a version 1": "Internal: no weights"}
    assert backend.loading.qsize() == 3


# Reloading.


async def test_loading_what_serves_unchanged_does_nothing(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    write(tmp_path, "a", 1)
    control = await start(startup=("a",), **EXPLICIT)
    model = control.registry.find("a", "")
    await soon(control.load("a"))
    assert control.registry.find("a", "") is model
    assert len(backend.instances["a 1"]) == 1


async def test_a_reload_drops_no_request(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    """A hundred requests are open, and more come all the while: each is answered, by old or new."""
    write(tmp_path, "a", 1)
    control = await start(startup=("a",), **EXPLICIT)
    (old,) = backend.instances["a 1"]
    backend.gate = asyncio.Semaphore(0)
    before = [control.registry.find("a", "").submit(text_request()) for _ in range(100)]
    (tmp_path / "a" / "1" / "weights").write_text("better")
    await soon(backend.loading.get())
    reload = asyncio.create_task(control.load("a"))
    await soon(backend.loading.get())
    assert (await states(control)) == [("a", "1", "READY", "")]
    meanwhile = [control.registry.find("a", "").submit(text_request()) for _ in range(10)]
    backend.gate.release()
    await soon(reload)
    new = backend.instances["a 1"][1]
    after = [control.registry.find("a", "").submit(text_request()) for _ in range(10)]
    assert control.loaded.in_flight == 120
    assert old.closes == 0
    for _ in after:
        (await new.begun()).finish("new")
    for _ in (*before, *meanwhile):
        (await old.begun()).finish("old")
    assert [await soon(read_all(each)) for each in (*before, *meanwhile)] == [["old"]] * 110
    assert [await soon(read_all(each)) for each in after] == [["new"]] * 10
    await soon(old.closed.wait())
    assert control.registry.failures() == {}


async def test_a_failed_reload_keeps_the_served_versions_and_reports_the_reason(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    write(tmp_path, "a", 1)
    control = await start(startup=("a",), **EXPLICIT)
    old, config = backend.instances["a 1"][0], control.registry.find("a", "").config
    backend.errors["a 1 again"] = NO_WEIGHTS
    override = Override(BATCHED)
    assert await refusal(control, "a", override) == (
        "load failed for model 'a': version 1 is at UNAVAILABLE state: Internal: no weights;\n"
    )
    assert await states(control) == [("a", "1", "READY", "")]
    assert control.registry.find("a", "").config == config
    assert control.registry.failures() == {}
    assert await answer(control, old, "still here") == ["still here"]
    (tmp_path / "a" / "config.pbtxt").write_text("nonsense")
    assert "unknown field 'nonsense'" in await refusal(control, "a")
    assert await answer(control, old, "still here") == ["still here"]


async def test_versions_outside_the_new_policy_are_unloaded_after_the_swap(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    write(tmp_path, "a", 1, 2, more=ALL_VERSIONS)
    control = await start(startup=("a",), **EXPLICIT)
    with control.registry.find("a", "1").submit(text_request()) as stream:
        execution = await backend.instances["a 1"][0].begun()
        (tmp_path / "a" / "3").mkdir()
        write(tmp_path, "a", more="version_policy { specific { versions: [2, 3] } }")
        await soon(control.load("a"))
        assert await states(control) == [
            ("a", "1", "UNLOADING", ""),
            ("a", "2", "READY", ""),
            ("a", "3", "READY", ""),
        ]
        assert lookup(control, "a", "1") == "'a' version 1 is not at ready state"
        execution.finish("done")
        assert await soon(read_all(stream)) == ["done"]
    await soon(backend.instances["a 1"][0].closed.wait())
    await settle()
    assert (await states(control))[0] == ("a", "1", "UNAVAILABLE", "unloaded")
    assert control.registry.failures() == {}


async def test_a_failed_new_version_does_not_affect_the_old_one(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    write(tmp_path, "a", 1, more=ALL_VERSIONS)
    control = await start(startup=("a",), **EXPLICIT)
    (tmp_path / "a" / "2").mkdir()
    backend.errors["a 2"] = NO_WEIGHTS
    await refusal(control, "a")
    assert await states(control) == [
        ("a", "1", "READY", ""),
        ("a", "2", "UNAVAILABLE", "Internal: no weights"),
    ]
    assert await answer(control, backend.instances["a 1"][0], "hi") == ["hi"]
