"""Models are loaded, changed and unloaded while requests are served; none is dropped."""

import asyncio
import os
import shutil
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.backend_loader import BackendLoader
from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest
from gateway.models import repository as repository_module
from gateway.models.registry import ModelRegistry
from gateway.models.repository import ModelRepository
from gateway.models.table import IndexRow
from gateway.models.upload import Override
from gateway.settings import EVERY_MODEL, ControlMode, ModelSettings
from gateway.tensor import text_tensor
from tests.builders import ScriptedInstance, read_all, settle, soon, text_request
from tests.registries import ALL_VERSIONS, Backends, ScriptedBackend, Start, no_infer, write
from tests.serving import wait_until

EXPLICIT: dict[str, Any] = {"control_mode": ControlMode.EXPLICIT}
NO_WEIGHTS = InferenceError(Code.INTERNAL, "no weights")
BATCHED = (
    '{"backend": "scripted", "max_batch_size": 4, '
    '"input": [{"name": "text_input", "data_type": "TYPE_STRING", "dims": [1]}], '
    '"output": [{"name": "text_output", "data_type": "TYPE_STRING", "dims": [1]}]}'
)


async def states(registry: ModelRegistry) -> list[tuple[str, str, str, str]]:
    rows = await registry.index()
    return [(row.name, row.version, row.state, row.reason) for row in rows]


async def refusal(registry: ModelRegistry, name: str, override: Override | None = None) -> str:
    """The text of the error that a load ends with."""
    with pytest.raises(InferenceError) as caught:
        await soon(registry.load(name, override))
    return caught.value.message


def lookup(registry: ModelRegistry, name: str, version: str = "") -> str:
    """Why a request for the model is refused."""
    with pytest.raises(InferenceError) as caught:
        registry.find(name, version)
    return caught.value.message.removeprefix("Request for unknown model: ")


async def answer(registry: ModelRegistry, instance: ScriptedInstance, text: str) -> list[str]:
    """Ask the model `a`, and have that instance answer."""
    with registry.find("a", "").submit(text_request()) as stream:
        (await instance.begun()).finish(text)
        return await soon(read_all(stream))


# Control modes.


async def test_under_explicit_control_models_load_on_request_only(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    write(tmp_path, "a", 1)
    registry = await start(**EXPLICIT)
    assert await states(registry) == [("a", "", "", "")]
    assert registry.failures() == {}
    assert lookup(registry, "a") == "'a' is not found"
    await soon(registry.load("a"))
    assert await states(registry) == [("a", "1", "READY", "")]
    assert await answer(registry, backend.instances["a 1"][0], "hi") == ["hi"]


async def test_named_models_are_loaded_at_the_start(tmp_path: Path, start: Start) -> None:
    for name in ("a", "b", "c"):
        write(tmp_path, name, 1)
    registry = await start(startup=("a", "c"), **EXPLICIT)
    assert [model.name for model in registry.models()] == ["a", "c"]
    everything = await start(startup=(EVERY_MODEL,), **EXPLICIT)
    assert [model.name for model in everything.models()] == ["a", "b", "c"]


async def test_a_named_model_that_is_nowhere_is_a_failure(start: Start) -> None:
    registry = await start(startup=("absent",), **EXPLICIT)
    reason = "Not found: model 'absent' is not in any repository"
    assert registry.failures() == {"absent": reason}


@pytest.mark.parametrize("mode", [ControlMode.NONE, ControlMode.POLL])
async def test_load_requests_are_refused_without_explicit_control(
    tmp_path: Path, start: Start, mode: ControlMode
) -> None:
    write(tmp_path, "a", 1)
    registry = await start(control_mode=mode)
    for ask in (registry.load("a"), registry.unload("a")):
        with pytest.raises(InferenceError) as caught:
            await ask
        assert caught.value.code is Code.UNAVAILABLE
        assert caught.value.message == (
            "explicit model load / unload is not allowed if polling is enabled"
        )
    assert registry.find("a", "").ready


async def test_a_refusal_does_not_keep_those_before_it(start: Start) -> None:
    registry = await start(control_mode=ControlMode.NONE)
    lengths = set()
    for _ in range(3):
        with pytest.raises(InferenceError) as caught:
            await registry.load("a")
        lengths.add(len(traceback.extract_tb(caught.value.__traceback__)))
    assert len(lengths) == 1


async def test_nothing_can_be_loaded_before_the_registry_runs(tmp_path: Path) -> None:
    write(tmp_path, "a", 1)
    settings = ModelSettings(**EXPLICIT)
    registry = ModelRegistry(ModelRepository((tmp_path,)), settings, BackendLoader())
    assert await refusal(registry, "a") == "Server not ready"


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
    registry = await start(**EXPLICIT)
    assert await refusal(registry, name) == message
    await soon(registry.unload(name))
    await soon(registry.load("a"))
    assert registry.find("a", "").ready


async def test_names_with_dots_are_fine(tmp_path: Path, start: Start) -> None:
    names = ("...", "..m", "m..1", "m.v1")
    for name in names:
        write(tmp_path, name, 1)
    registry = await start(**EXPLICIT)
    for name in names:
        await soon(registry.load(name))
        assert registry.find(name, "").name == name


async def test_an_unreadable_config_is_an_error_of_its_load_only(
    tmp_path: Path, start: Start
) -> None:
    write(tmp_path, "a", 1, text="\x00\x01\x02")
    registry = await start(**EXPLICIT)
    message = await refusal(registry, "a")
    assert message.startswith("failed to load 'a', failed to poll from model repository: a/config")
    assert await states(registry) == [("a", "", "", "")]
    assert registry.failures() == {}


@pytest.mark.parametrize("mode", [ControlMode.EXPLICIT, ControlMode.POLL])
async def test_an_unforeseen_error_of_a_read_does_not_affect_other_models(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch, mode: ControlMode
) -> None:
    def fail(text: str, source: str) -> ModelConfig:
        raise RuntimeError(f"unforeseen in {tmp_path}")

    write(tmp_path, "a", 1)
    registry = await start(startup=(EVERY_MODEL,), control_mode=mode)
    monkeypatch.setattr(repository_module, "parse", fail)
    write(tmp_path, "b", 1)
    why = "model 'b' cannot be read; the server's log says why"
    if mode is ControlMode.POLL:
        await soon(registry.poll())
        assert registry.failures() == {"b": f"Internal: {why}"}
    else:
        assert (await refusal(registry, "b")).endswith(f": {why}")
    assert registry.find("a", "").ready


async def test_a_model_without_versions_is_reported(tmp_path: Path, start: Start) -> None:
    write(tmp_path, "a")
    (tmp_path / "a" / "01").mkdir()
    registry = await start(**EXPLICIT)
    none = "at least one version must be available under the version policy of model 'a'"
    assert await refusal(registry, "a") == f"load failed for model 'a': {none}\n"
    assert lookup(registry, "a") == "'a' has no available versions"
    assert lookup(registry, "a", "1") == "'a' version 1 is not found"
    assert await states(registry) == [("a", "", "UNAVAILABLE", f"Invalid argument: {none}")]


async def test_a_version_that_fails_names_its_reason(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    write(tmp_path, "a", 1, 2, more=ALL_VERSIONS)
    backend.errors["a 2"] = NO_WEIGHTS
    registry = await start(**EXPLICIT)
    assert await refusal(registry, "a") == (
        "load failed for model 'a': version 2 is at UNAVAILABLE state: Internal: no weights;\n"
    )
    assert await states(registry) == [
        ("a", "1", "UNAVAILABLE", "unloaded"),
        ("a", "2", "UNAVAILABLE", "Internal: no weights"),
    ]
    assert lookup(registry, "a") == "'a' has no available versions"
    assert lookup(registry, "a", "2") == "'a' version 2 is not at ready state"
    assert list(registry.failures()) == ["a version 2"]


async def test_a_load_that_failed_is_tried_again_by_the_next_request(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    write(tmp_path, "a", 1)
    backend.errors["a 1"] = NO_WEIGHTS
    registry = await start(**EXPLICIT)
    await refusal(registry, "a")
    del backend.errors["a 1"]
    await soon(registry.load("a"))
    assert registry.find("a", "").ready
    assert registry.failures() == {}


async def test_a_version_is_tried_as_often_as_it_may(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    write(tmp_path, "a", 1)
    backend.errors["a 1"] = NO_WEIGHTS
    registry = await start(load_retry_count=2)
    assert registry.failures() == {"a version 1": "Internal: no weights"}
    assert backend.loading.qsize() == 3


# Reloading.


async def test_loading_what_serves_unchanged_does_nothing(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    write(tmp_path, "a", 1)
    registry = await start(startup=("a",), **EXPLICIT)
    model = registry.find("a", "")
    await soon(registry.load("a"))
    assert registry.find("a", "") is model
    assert len(backend.instances["a 1"]) == 1


async def test_a_reload_drops_no_request(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    """A hundred requests are open, and more come all the while: each is answered, by old or new."""
    write(tmp_path, "a", 1)
    registry = await start(startup=("a",), **EXPLICIT)
    (old,) = backend.instances["a 1"]
    backend.gate = asyncio.Semaphore(0)
    before = [registry.find("a", "").submit(text_request()) for _ in range(100)]
    (tmp_path / "a" / "1" / "weights").write_text("better")
    await soon(backend.loading.get())
    reload = asyncio.create_task(registry.load("a"))
    await soon(backend.loading.get())
    assert (await states(registry)) == [("a", "1", "READY", "")]
    meanwhile = [registry.find("a", "").submit(text_request()) for _ in range(10)]
    backend.gate.release()
    await soon(reload)
    new = backend.instances["a 1"][1]
    after = [registry.find("a", "").submit(text_request()) for _ in range(10)]
    assert registry.in_flight == 120
    assert old.closes == 0
    for _ in after:
        (await new.begun()).finish("new")
    for _ in (*before, *meanwhile):
        (await old.begun()).finish("old")
    assert [await soon(read_all(each)) for each in (*before, *meanwhile)] == [["old"]] * 110
    assert [await soon(read_all(each)) for each in after] == [["new"]] * 10
    await soon(old.closed.wait())
    assert registry.failures() == {}


async def test_a_failed_reload_keeps_the_served_versions_and_reports_the_reason(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    write(tmp_path, "a", 1)
    registry = await start(startup=("a",), **EXPLICIT)
    old, config = backend.instances["a 1"][0], registry.find("a", "").config
    backend.errors["a 1 again"] = NO_WEIGHTS
    override = Override(BATCHED)
    assert await refusal(registry, "a", override) == (
        "load failed for model 'a': version 1 is at UNAVAILABLE state: Internal: no weights;\n"
    )
    assert await states(registry) == [("a", "1", "READY", "")]
    assert registry.find("a", "").config == config
    assert registry.failures() == {}
    assert await answer(registry, old, "still here") == ["still here"]
    (tmp_path / "a" / "config.pbtxt").write_text("nonsense")
    assert "unknown field 'nonsense'" in await refusal(registry, "a")
    assert await answer(registry, old, "still here") == ["still here"]


async def test_versions_outside_the_new_policy_are_unloaded_after_the_swap(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    write(tmp_path, "a", 1, 2, more=ALL_VERSIONS)
    registry = await start(startup=("a",), **EXPLICIT)
    with registry.find("a", "1").submit(text_request()) as stream:
        execution = await backend.instances["a 1"][0].begun()
        (tmp_path / "a" / "3").mkdir()
        write(tmp_path, "a", more="version_policy { specific { versions: [2, 3] } }")
        await soon(registry.load("a"))
        assert await states(registry) == [
            ("a", "1", "UNLOADING", ""),
            ("a", "2", "READY", ""),
            ("a", "3", "READY", ""),
        ]
        assert lookup(registry, "a", "1") == "'a' version 1 is not at ready state"
        execution.finish("done")
        assert await soon(read_all(stream)) == ["done"]
    await soon(backend.instances["a 1"][0].closed.wait())
    await settle()
    assert (await states(registry))[0] == ("a", "1", "UNAVAILABLE", "unloaded")
    assert registry.failures() == {}


async def test_a_failed_new_version_does_not_affect_the_old_one(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    write(tmp_path, "a", 1, more=ALL_VERSIONS)
    registry = await start(startup=("a",), **EXPLICIT)
    (tmp_path / "a" / "2").mkdir()
    backend.errors["a 2"] = NO_WEIGHTS
    await refusal(registry, "a")
    assert await states(registry) == [
        ("a", "1", "READY", ""),
        ("a", "2", "UNAVAILABLE", "Internal: no weights"),
    ]
    assert await answer(registry, backend.instances["a 1"][0], "hi") == ["hi"]


# In-place instance updates.


def group(count: int, name: str = "") -> str:
    return f'instance_group {{ kind: KIND_CPU count: {count} name: "{name}" }}'


async def test_only_the_instances_that_differ_are_loaded_and_closed(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    write(tmp_path, "a", 1, more=group(2))
    registry = await start(startup=("a",), **EXPLICIT)
    model, (first, second) = registry.find("a", ""), backend.instances["a 1"]
    write(tmp_path, "a", more=group(1, "left") + group(2, "right"))
    await soon(registry.load("a"))
    assert registry.find("a", "") is model
    assert [each.name for each in model.config.instance_group] == ["left", "right"]
    *_, third = backend.instances["a 1"]
    assert list(model.instances) == [first, second, third]
    assert backend.contexts["a 1"][2].name == "right_1"
    write(tmp_path, "a", more=group(1))
    with model.submit(text_request()) as kept, model.submit(text_request()) as leaving:
        running = [await each.begun() for each in (first, second)]
        await soon(registry.load("a"))
        assert list(model.instances) == [first]
        await soon(third.closed.wait())
        assert second.closes == 0
        for execution in running:
            execution.finish("undisturbed")
        assert await soon(read_all(kept)) == await soon(read_all(leaving)) == ["undisturbed"]
    await soon(second.closed.wait())
    assert await answer(registry, first, "alone") == ["alone"]
    assert model.statistics.success.count == 3


async def test_an_instance_that_cannot_be_added_does_not_affect_the_others(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    write(tmp_path, "a", 1, more=group(1))
    registry = await start(startup=("a",), **EXPLICIT)
    model = registry.find("a", "")
    backend.errors["a 1 again"] = NO_WEIGHTS
    write(tmp_path, "a", more=group(3))
    assert "no weights" in await refusal(registry, "a")
    assert [each.count for each in model.config.instance_group] == [1]
    assert await answer(registry, backend.instances["a 1"][0], "hi") == ["hi"]


async def test_other_files_than_the_config_make_it_a_real_reload(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    write(tmp_path, "a", 1, more=group(1))
    registry = await start(startup=("a",), **EXPLICIT)
    model = registry.find("a", "")
    write(tmp_path, "a", more=group(2))
    (tmp_path / "a" / "1" / "weights").write_text("")
    await soon(registry.load("a"))
    assert registry.find("a", "") is not model
    assert len(backend.instances["a 1"]) == 3


# Overrides.


async def test_an_override_holds_until_the_next_load_without_one(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    write(tmp_path, "a", 1)
    registry = await start(startup=("a",), **EXPLICIT)
    await soon(registry.load("a", Override(BATCHED)))
    assert registry.find("a", "").config.max_batch_size == 4
    model = registry.find("a", "")
    await soon(registry.load("a", Override(BATCHED)))
    assert registry.find("a", "") is not model
    await soon(registry.load("a"))
    assert registry.find("a", "").config.max_batch_size == 0


async def test_uploaded_files_live_as_long_as_their_model(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    registry = await start(**EXPLICIT)
    files = {"file:1/weights": b"one", "file:5/weights": b"five"}
    config = BATCHED.replace("{", '{"version_policy": {"all": {}}, ', 1)
    await soon(registry.load("new", Override(config, files)))
    assert [model.version for model in registry.models()] == ["1", "5"]
    folder = backend.contexts["new 5"][0].path
    assert (folder / "weights").read_bytes() == b"five"
    with registry.find("new", "5").submit(batched_request()) as stream:
        execution = await backend.instances["new 5"][0].begun()
        await soon(registry.unload("new"))
        await soon(backend.instances["new 1"][0].closed.wait())
        await settle()
        assert (folder / "weights").exists()
        execution.finish("done")
        assert await soon(read_all(stream)) == ["done"]
    await soon(backend.instances["new 5"][0].closed.wait())
    await asyncio.to_thread(
        wait_until, lambda: not folder.parent.exists(), "the uploaded files are deleted"
    )


def batched_request() -> InferRequest:
    return InferRequest(
        model="new", inputs=(replace(text_tensor("text_input", ["x"]), shape=(1, 1)),)
    )


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (Override("{"), "Invalid config override: "),
        (Override("[]"), "Invalid config override: "),
        (Override('{"nope": 1}'), "Invalid config override: "),
        (Override('{"name": "other"}'), "unexpected directory name 'a' for model 'other'"),
        (
            Override(None, {"file:1/x": b""}),
            "Load parameter 'config' must be specified for model file override",
        ),
        *(
            (
                Override(BATCHED, {f"file:{path}": b""}),
                f"Invalid file parameter 'file:{path}' with normalized path '{normal}' must stay "
                "within model directory.",
            )
            for path, normal in [("../x", "../x"), ("1/../../x", "../x"), ("", "."), ("..", "..")]
        ),
        (Override(BATCHED, {"file:1": b"", "file:1/x": b""}), "cannot be written: "),
        (Override(BATCHED, {"file:1/" + "x" * 300: b""}), "cannot be written: "),
    ],
)
async def test_an_invalid_override_is_refused_and_changes_nothing(
    tmp_path: Path, start: Start, override: Override, said: str
) -> None:
    write(tmp_path, "a", 1)
    registry = await start(startup=("a",), **EXPLICIT)
    model = registry.find("a", "")
    message = await refusal(registry, "a", override)
    assert message.startswith("failed to load 'a', failed to poll from model repository: ")
    assert said in message
    assert str(tmp_path) not in message
    assert registry.find("a", "") is model
    assert await states(registry) == [("a", "1", "READY", "")]


# Unloading.


async def test_an_unloaded_model_is_not_found_and_ends_with_its_last_request(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    write(tmp_path, "a", 1)
    registry = await start(startup=("a",), **EXPLICIT)
    (instance,) = backend.instances["a 1"]
    with registry.find("a", "").submit(text_request()) as stream:
        execution = await instance.begun()
        await soon(registry.unload("a"))
        assert lookup(registry, "a") == "'a' has no available versions"
        assert lookup(registry, "a", "1") == "'a' version 1 is not at ready state"
        assert await states(registry) == [("a", "1", "UNLOADING", "")]
        assert (registry.in_flight, instance.closes) == (1, 0)
        execution.finish("done")
        assert await soon(read_all(stream)) == ["done"]
    await soon(instance.closed.wait())
    await settle()
    assert await states(registry) == [("a", "1", "UNAVAILABLE", "unloaded")]
    assert await registry.index(ready=True) == []
    assert registry.failures() == {}
    await soon(registry.unload("a"))
    await soon(registry.load("a"))
    assert await answer(registry, backend.instances["a 1"][1], "back") == ["back"]


async def test_the_unload_of_a_failed_model_blocks_no_operation(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    write(tmp_path, "a", 1)
    backend.errors["a 1"] = NO_WEIGHTS
    registry = await start(startup=("a",), **EXPLICIT)
    assert registry.failures()
    await soon(registry.unload("a"))
    assert registry.failures() == {}


async def test_a_model_can_be_loaded_while_it_is_still_unloading(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    write(tmp_path, "a", 1)
    registry = await start(startup=("a",), **EXPLICIT)
    (old,) = backend.instances["a 1"]
    with registry.find("a", "").submit(text_request()) as stream:
        execution = await old.begun()
        await soon(registry.unload("a"))
        await soon(registry.load("a"))
        assert await states(registry) == [("a", "1", "READY", "")]
        assert await answer(registry, backend.instances["a 1"][1], "new") == ["new"]
        execution.finish("old")
        assert await soon(read_all(stream)) == ["old"]
    await soon(old.closed.wait())
    await settle()
    assert await states(registry) == [("a", "1", "READY", "")]


# Operations at the same time.


async def test_loads_of_one_model_wait_for_each_other_and_load_it_once(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    write(tmp_path, "a", 1)
    write(tmp_path, "b", 1)
    registry = await start(**EXPLICIT)
    backend.gate = asyncio.Semaphore(0)
    loads = [asyncio.create_task(registry.load("a")) for _ in range(3)]
    assert await soon(backend.loading.get()) == "a 1"
    assert lookup(registry, "a") == "'a' is still loading"
    assert (await states(registry))[0] == ("a", "1", "LOADING", "")
    other = asyncio.create_task(registry.load("b"))
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
    registry = await start(**EXPLICIT)
    if served:
        await soon(registry.load("a"))
        await soon(backend.loading.get())
        write(tmp_path, "a", 1, more="parameters { key: 'k' value { string_value: 'v' } }")
    backend.gate = asyncio.Semaphore(0)
    load = asyncio.create_task(registry.load("a"))
    await soon(backend.loading.get())
    await soon(registry.unload("a"))
    with pytest.raises(InferenceError, match="it was unloaded while it was being loaded"):
        await soon(load)
    if served:
        await soon(backend.instances["a 1"][0].closed.wait())
        await settle()
    assert await states(registry) == [("a", "1", "UNAVAILABLE", "unloaded")]
    backend.gate = None
    await soon(registry.load("a"))
    assert await states(registry) == [("a", "1", "READY", "")]


async def test_a_load_continues_after_its_client_disconnects(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    write(tmp_path, "a", 1)
    registry = await start(**EXPLICIT)
    backend.gate = asyncio.Semaphore(0)
    load = asyncio.create_task(registry.load("a"))
    await soon(backend.loading.get())
    load.cancel()
    await asyncio.wait([load])
    backend.gate.release()
    await soon(registry.load("a"))
    assert len(backend.instances["a 1"]) == 1


async def test_stopping_fails_the_load_that_a_client_waits_for(
    tmp_path: Path, backend: ScriptedBackend
) -> None:
    write(tmp_path, "a", 1, 2, more=ALL_VERSIONS)
    settings = ModelSettings(repositories=(tmp_path,), **EXPLICIT)
    registry = ModelRegistry(ModelRepository((tmp_path,)), settings, Backends(backend))
    running = asyncio.create_task(registry.run(no_infer))
    await soon(registry.wait_settled())
    backend.gate = asyncio.Semaphore(1)
    load = asyncio.create_task(registry.load("a"))
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
    registry = await start(control_mode=ControlMode.POLL)
    model = registry.find("a", "")
    await soon(registry.poll())
    assert registry.find("a", "") is model
    write(tmp_path, "new", 1)
    shutil.rmtree(tmp_path / "gone")
    (tmp_path / "a" / "2").mkdir()
    await soon(registry.poll())
    await soon(backend.instances["gone 1"][0].closed.wait())
    await settle()
    assert [(each.name, each.version) for each in registry.models()] == [("a", "2"), ("new", "1")]
    assert lookup(registry, "gone") == "'gone' has no available versions"
    assert lookup(registry, "gone", "1") == "'gone' version 1 is not at ready state"
    assert "gone" not in [row.name for row in await registry.index()]
    assert registry.failures() == {}


async def test_a_folder_that_is_restored_unchanged_is_loaded_again(
    tmp_path: Path, start: Start
) -> None:
    write(tmp_path, "a", 1)
    registry = await start(control_mode=ControlMode.POLL)
    os.rename(tmp_path / "a", tmp_path.parent / f"{tmp_path.name}-away")
    await soon(registry.poll())
    assert list(registry.models()) == []
    os.rename(tmp_path.parent / f"{tmp_path.name}-away", tmp_path / "a")
    await soon(registry.poll())
    assert registry.find("a", "").ready


async def test_a_model_that_is_half_copied_fails_and_is_loaded_once_it_is_whole(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    registry = await start(control_mode=ControlMode.POLL)
    write(tmp_path, "a", 1, text='backend: "scri')
    await soon(registry.poll())
    assert list(registry.failures()) == ["a"]
    assert (await states(registry))[0][2] == "UNAVAILABLE"
    assert lookup(registry, "a") == "'a' is not found"
    write(tmp_path, "a", 1)
    backend.errors["a 1"] = NO_WEIGHTS
    await soon(registry.poll())
    assert registry.failures() == {"a version 1": "Internal: no weights"}
    await soon(registry.poll())
    assert backend.loading.qsize() == 1
    (tmp_path / "a" / "1" / "weights").write_text("all of it")
    del backend.errors["a 1"]
    await soon(registry.poll())
    assert registry.find("a", "").ready
    assert registry.failures() == {}


async def test_a_model_with_corrupted_files_keeps_serving(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    write(tmp_path, "a", 1)
    registry = await start(control_mode=ControlMode.POLL)
    (tmp_path / "a" / "config.pbtxt").write_bytes(b"\x00\xff")
    await soon(registry.poll())
    assert await states(registry) == [("a", "1", "READY", "")]
    assert await answer(registry, backend.instances["a 1"][0], "hi") == ["hi"]


async def test_a_removed_repository_changes_nothing(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    home = tmp_path / "models"
    home.mkdir()
    write(home, "a", 1)
    registry = await start(home, control_mode=ControlMode.POLL)
    os.rename(home, tmp_path / "elsewhere")
    await soon(registry.poll())
    assert await answer(registry, backend.instances["a 1"][0], "hi") == ["hi"]


async def test_a_second_repository_with_the_name_ends_the_model_until_it_is_one_again(
    tmp_path: Path, start: Start
) -> None:
    homes = [tmp_path / "one", tmp_path / "two"]
    for home in homes:
        home.mkdir()
    write(homes[0], "a", 1)
    registry = await start(*homes, control_mode=ControlMode.POLL)
    write(homes[1], "a", 1)
    await soon(registry.poll())
    assert lookup(registry, "a") == "'a' is not found"
    twice = "model appears in two or more repositories"
    assert registry.failures() == {"a": twice}
    assert await registry.index() == [IndexRow("a", "", "UNAVAILABLE", twice)]
    shutil.rmtree(homes[0] / "a")
    await soon(registry.poll())
    assert registry.find("a", "").ready
    assert registry.failures() == {}


async def test_a_name_that_two_repositories_have_from_the_start_is_a_failure(
    tmp_path: Path, start: Start
) -> None:
    homes = [tmp_path / "one", tmp_path / "two"]
    for home in homes:
        home.mkdir()
        write(home, "a", 1)
    registry = await start(*homes)
    assert registry.failures() == {"a": "model appears in two or more repositories"}


async def test_a_model_that_never_loaded_and_is_removed_is_forgotten(
    tmp_path: Path, start: Start
) -> None:
    write(tmp_path, "a", 1, text="nonsense")
    registry = await start(control_mode=ControlMode.POLL)
    assert list(registry.failures()) == ["a"]
    shutil.rmtree(tmp_path / "a")
    await soon(registry.poll())
    assert (registry.failures(), await registry.index()) == ({}, [])


async def test_polling_happens_by_itself(tmp_path: Path, start: Start) -> None:
    registry = await start(control_mode=ControlMode.POLL, poll_secs=0.01)
    write(tmp_path, "a", 1)
    async with asyncio.timeout(5.0):
        while not list(registry.models()):
            await registry.changed()


# The folder of a model that serves.


async def test_a_model_without_a_folder_serves_until_its_next_load(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    write(tmp_path, "a", 1)
    registry = await start(startup=("a",), **EXPLICIT)
    shutil.rmtree(tmp_path / "a")
    assert await answer(registry, backend.instances["a 1"][0], "hi") == ["hi"]
    assert await refusal(registry, "a") == (
        "failed to load 'a', failed to poll from model repository: model 'a' is not in any "
        "repository"
    )
    assert await answer(registry, backend.instances["a 1"][0], "hi") == ["hi"]
    assert await states(registry) == [("a", "1", "READY", "")]


# Namespaces.


async def test_a_name_in_two_namespaces_has_to_be_unique_for_requests(
    tmp_path: Path, start: Start
) -> None:
    homes = [tmp_path / "one", tmp_path / "two"]
    for home in homes:
        home.mkdir()
        write(home, "a", 1)
    write(homes[1], "b", 1)
    registry = await start(*homes, namespacing=True, **EXPLICIT)
    await soon(registry.load("b"))
    await soon(registry.load("a"))
    assert registry.find("b", "").namespace == str(homes[1])
    assert [each.namespace for each in registry.models()][:2] == [str(home) for home in homes]
    with pytest.raises(InferenceError) as caught:
        registry.find("a", "")
    assert (caught.value.code, caught.value.message) == (
        Code.INVALID_ARG,
        "There are 2 identifiers of model 'a' in global map, model namespace must be provided to "
        "resolve ambiguity.",
    )
