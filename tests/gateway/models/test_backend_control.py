"""Models that load others: the registry's rules, and Triton's texts."""

from pathlib import Path

import pytest

from gateway.errors import Code, InferenceError
from gateway.models.backend_control import BackendControl
from gateway.settings import ControlMode
from tests.registries import ScriptedBackend, Start, write

EXPLICIT = {"control_mode": ControlMode.EXPLICIT}


async def test_a_model_is_loaded_and_unloaded(tmp_path: Path, start: Start) -> None:
    write(tmp_path, "a", 1)
    control = BackendControl(await start(**EXPLICIT))
    assert not control.ready("a", "")
    await control.load("a", "", {})
    assert control.ready("a", "")
    assert control.ready("a", "1")
    assert not control.ready("a", "2")
    assert not control.decoupled("a", "")
    await control.unload("a", unload_dependents=False)
    assert not control.ready("a", "")


async def test_a_load_may_bring_a_config(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    write(tmp_path, "a", 1)
    control = BackendControl(await start(**EXPLICIT))
    config = '{"backend": "scripted", "max_batch_size": 7, "input": [], "output": []}'
    await control.load("a", config, {})
    assert backend.contexts["a 1"][0].config.max_batch_size == 7


async def test_what_is_not_known_is_not_ready_and_nothing_else(start: Start) -> None:
    control = BackendControl(await start(**EXPLICIT))
    assert not control.ready("nobody", "")
    with pytest.raises(InferenceError) as refused:
        control.decoupled("nobody", "")
    assert refused.value.code is Code.NOT_FOUND


async def test_a_version_that_is_no_number_is_an_error(tmp_path: Path, start: Start) -> None:
    write(tmp_path, "a", 1)
    control = BackendControl(await start(**EXPLICIT))
    await control.load("a", "", {})
    with pytest.raises(InferenceError, match="version should be an integral value"):
        control.ready("a", "x")


async def test_only_a_server_under_explicit_control_changes_its_models(
    tmp_path: Path, start: Start
) -> None:
    write(tmp_path, "a", 1)
    control = BackendControl(await start())
    for operation in (control.load("a", "", {}), control.unload("a", unload_dependents=True)):
        with pytest.raises(InferenceError, match="explicit model load / unload is not allowed"):
            await operation


async def test_nothing_is_changed_while_the_server_starts(
    tmp_path: Path, start: Start, backend: ScriptedBackend
) -> None:
    write(tmp_path, "a", 1)
    control = BackendControl(await start(settled=False, startup=("a",), **EXPLICIT))
    for operation in (control.load("a", "", {}), control.unload("a", unload_dependents=True)):
        with pytest.raises(InferenceError) as refused:
            await operation
        assert (refused.value.code, refused.value.message) == (
            Code.UNAVAILABLE,
            "Server not ready",
        )
