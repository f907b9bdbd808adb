"""In-place updates, overrides and unloads."""

import asyncio
import weakref
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.errors import InferenceError
from gateway.messages import InferRequest
from gateway.models.model_folder import Override
from gateway.tensor import text_tensor
from tests.builders import read_all, settle, soon, text_request, uncollected
from tests.gateway.models.lifecycles import (
    BATCHED,
    EXPLICIT,
    NO_WEIGHTS,
    answer,
    lookup,
    refusal,
    states,
)
from tests.registries import ScriptedBackend, Start, write
from tests.serving import wait_until

# In-place instance updates.


def group(count: int, name: str = "") -> str:
    return f'instance_group {{ kind: KIND_CPU count: {count} name: "{name}" }}'


async def test_only_the_instances_that_differ_are_loaded_and_closed(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    write(tmp_path, "a", 1, more=group(2))
    control = await start(startup=("a",), **EXPLICIT)
    model, (first, second) = control.registry.find("a", ""), backend.instances["a 1"]
    write(tmp_path, "a", more=group(1, "left") + group(2, "right"))
    await soon(control.load("a"))
    assert control.registry.find("a", "") is model
    assert [each.name for each in model.config.instance_group] == ["left", "right"]
    *_, third = backend.instances["a 1"]
    assert list(model.instances) == [first, second, third]
    assert backend.contexts["a 1"][2].name == "right_1"
    write(tmp_path, "a", more=group(1))
    with model.submit(text_request()) as kept, model.submit(text_request()) as leaving:
        running = [await each.begun() for each in (first, second)]
        await soon(control.load("a"))
        assert list(model.instances) == [first]
        await soon(third.closed.wait())
        assert second.closes == 0
        for execution in running:
            execution.finish("undisturbed")
        assert await soon(read_all(kept)) == await soon(read_all(leaving)) == ["undisturbed"]
    await soon(second.closed.wait())
    assert await answer(control, first, "alone") == ["alone"]
    assert model.statistics.success.count == 3


async def test_an_instance_that_cannot_be_added_does_not_affect_the_others(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    write(tmp_path, "a", 1, more=group(1))
    control = await start(startup=("a",), **EXPLICIT)
    model = control.registry.find("a", "")
    backend.errors["a 1 again"] = NO_WEIGHTS
    write(tmp_path, "a", more=group(3))
    assert "no weights" in await refusal(control, "a")
    assert [each.count for each in model.config.instance_group] == [1]
    assert await answer(control, backend.instances["a 1"][0], "hi") == ["hi"]


async def test_other_files_than_the_config_make_it_a_real_reload(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    write(tmp_path, "a", 1, more=group(1))
    control = await start(startup=("a",), **EXPLICIT)
    model = control.registry.find("a", "")
    write(tmp_path, "a", more=group(2))
    (tmp_path / "a" / "1" / "weights").write_text("")
    await soon(control.load("a"))
    assert control.registry.find("a", "") is not model
    assert len(backend.instances["a 1"]) == 3


# Overrides.


async def test_an_override_holds_until_the_next_load_without_one(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    write(tmp_path, "a", 1)
    control = await start(startup=("a",), **EXPLICIT)
    await soon(control.load("a", Override(BATCHED)))
    assert control.registry.find("a", "").config.max_batch_size == 4
    model = control.registry.find("a", "")
    await soon(control.load("a", Override(BATCHED)))
    assert control.registry.find("a", "") is not model
    await soon(control.load("a"))
    assert control.registry.find("a", "").config.max_batch_size == 0


async def test_uploaded_files_live_as_long_as_their_model(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    control = await start(**EXPLICIT)
    files = {"file:1/weights": b"one", "file:5/weights": b"five"}
    config = BATCHED.replace("{", '{"version_policy": {"all": {}}, ', 1)
    await soon(control.load("new", Override(config, files)))
    assert [model.version for model in control.registry.models()] == ["1", "5"]
    folder = backend.contexts["new 5"][0].path
    assert (folder / "weights").read_bytes() == b"five"
    with control.registry.find("new", "5").submit(batched_request()) as stream:
        execution = await backend.instances["new 5"][0].begun()
        await soon(control.unload("new"))
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
    control = await start(startup=("a",), **EXPLICIT)
    model = control.registry.find("a", "")
    message = await refusal(control, "a", override)
    assert message.startswith("failed to load 'a', failed to poll from model repository: ")
    assert said in message
    assert str(tmp_path) not in message
    assert control.registry.find("a", "") is model
    assert await states(control) == [("a", "1", "READY", "")]


class Files(dict[str, bytes]):
    """The files of a load."""


@pytest.mark.parametrize("config", ["{", '{"backend": "absent"}', '{"max_batch_size": -1}'])
async def test_the_files_of_a_failed_load_are_freed_without_garbage_collection(
    start: Start, config: str
) -> None:
    control = await start(**EXPLICIT)

    async def load(files: Files) -> None:
        with pytest.raises(InferenceError):
            await control.load("a", Override(config, files))

    with uncollected():
        files = Files({"file:1/x": b""})
        freed = weakref.ref(files)
        await load(files)
        del files
        await asyncio.to_thread(wait_until, lambda: freed() is None, "the files are freed")


# Unloading.


async def test_an_unloaded_model_is_not_found_and_ends_with_its_last_request(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    write(tmp_path, "a", 1)
    control = await start(startup=("a",), **EXPLICIT)
    (instance,) = backend.instances["a 1"]
    with control.registry.find("a", "").submit(text_request()) as stream:
        execution = await instance.begun()
        await soon(control.unload("a"))
        assert lookup(control, "a") == "'a' has no available versions"
        assert lookup(control, "a", "1") == "'a' version 1 is not at ready state"
        assert await states(control) == [("a", "1", "UNLOADING", "")]
        assert (control.loaded.in_flight, instance.closes) == (1, 0)
        execution.finish("done")
        assert await soon(read_all(stream)) == ["done"]
    await soon(instance.closed.wait())
    await settle()
    assert await states(control) == [("a", "1", "UNAVAILABLE", "unloaded")]
    assert await control.index(ready=True) == []
    assert control.registry.failures() == {}
    await soon(control.unload("a"))
    await soon(control.load("a"))
    assert await answer(control, backend.instances["a 1"][1], "back") == ["back"]


async def test_the_unload_of_a_failed_model_blocks_no_operation(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    write(tmp_path, "a", 1)
    backend.errors["a 1"] = NO_WEIGHTS
    control = await start(startup=("a",), **EXPLICIT)
    assert control.registry.failures()
    await soon(control.unload("a"))
    assert control.registry.failures() == {}


async def test_a_model_can_be_loaded_while_it_is_still_unloading(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    write(tmp_path, "a", 1)
    control = await start(startup=("a",), **EXPLICIT)
    (old,) = backend.instances["a 1"]
    with control.registry.find("a", "").submit(text_request()) as stream:
        execution = await old.begun()
        await soon(control.unload("a"))
        await soon(control.load("a"))
        assert await states(control) == [("a", "1", "READY", "")]
        assert await answer(control, backend.instances["a 1"][1], "new") == ["new"]
        execution.finish("old")
        assert await soon(read_all(stream)) == ["old"]
    await soon(old.closed.wait())
    await settle()
    assert await states(control) == [("a", "1", "READY", "")]
