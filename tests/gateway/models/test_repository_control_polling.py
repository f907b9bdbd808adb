"""Polling continues after every failure, foreseen or not."""

import os
from pathlib import Path
from typing import Any

import pytest

from gateway.config import ModelConfig
from gateway.config.pbtxt import parse
from gateway.errors import InferenceError
from gateway.models import homes
from gateway.models.lifecycle import Lifecycle
from gateway.models.model_folder import Snapshot, take_snapshot
from gateway.models.repository import ModelRepository
from gateway.settings import ControlMode
from tests.builders import soon
from tests.registries import Start, write

DEPTH = 1100
POLL = {"control_mode": ControlMode.POLL}


def deepen(folder: Path) -> None:
    """Make folders deeper than Python's recursion; no path names the innermost one at once."""
    at = os.open(folder, os.O_RDONLY)
    for _ in range(DEPTH):
        os.mkdir("a", dir_fd=at)
        below = os.open("a", os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    os.close(at)


def flatten(folder: Path) -> None:
    """Remove these folders, which recursion could not."""
    inner, spare = folder / "a", folder / "b"
    while (inner / "a").exists():
        (inner / "a").rename(spare)
        inner.rmdir()
        spare.rename(inner)
    inner.rmdir()


async def test_a_folder_deeper_than_recursion_is_polled(tmp_path: Path, start: Start) -> None:
    write(tmp_path, "deep", 1)
    control = await start(**POLL)
    before = control.registry.find("deep", "")
    deepen(tmp_path / "deep" / "1")
    await soon(control.poll())
    assert control.registry.find("deep", "") is not before, "the change is noticed"
    assert control.registry.find("deep", "").ready
    assert len(take_snapshot(tmp_path / "deep")) == DEPTH + 2
    flatten(tmp_path / "deep" / "1")


async def test_a_poll_scans_each_folder_once(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    scanned: list[str] = []

    def counts(folder: Path) -> Snapshot:
        scanned.append(folder.name)
        return take_snapshot(folder)

    monkeypatch.setattr(homes, "take_snapshot", counts)
    write(tmp_path, "changed", 1)
    write(tmp_path, "unchanged", 1)
    control = await start(**POLL)
    assert sorted(scanned) == ["changed", "unchanged"], "the start, too"
    scanned.clear()
    write(tmp_path, "changed", 2)
    write(tmp_path, "new", 1)
    await soon(control.poll())
    assert sorted(scanned) == ["changed", "new", "unchanged"]
    assert control.registry.find("changed", "").version == "2"
    assert control.registry.find("new", "").ready
    scanned.clear()
    await soon(control.poll())
    assert sorted(scanned) == ["changed", "new", "unchanged"]


async def test_an_unreadable_folder_is_logged_once_and_others_are_polled(
    tmp_path: Path,
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    write(tmp_path, "broken", 1)
    control = await start(**POLL)
    broken = control.registry.find("broken", "")

    def fails(folder: Path) -> Snapshot:
        if folder.name == "broken":
            raise RecursionError("too deep")
        return take_snapshot(folder)

    monkeypatch.setattr(homes, "take_snapshot", fails)
    write(tmp_path, "new", 1)
    await soon(control.poll())
    await soon(control.poll())
    assert control.registry.find("new", "").ready
    assert control.registry.find("broken", "") is broken
    errors = [each for each in caplog.records if each.levelname == "ERROR"]
    assert [(each.message, vars(each)["model"]) for each in errors] == [
        ("model folder poll failed", "broken")
    ]
    monkeypatch.undo()
    write(tmp_path, "broken", 2)
    await soon(control.poll())
    assert control.registry.find("broken", "").version == "2"


async def test_an_unforeseen_error_of_a_load_does_not_affect_other_models(
    tmp_path: Path,
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    control = await start(**POLL)
    write(tmp_path, "broken", 1)
    write(tmp_path, "good", 1)

    def fails(text: str, source: str) -> ModelConfig:
        if source.startswith("broken/"):
            raise RecursionError("too deep")
        return parse(text, source)

    monkeypatch.setattr("gateway.models.repository.parse", fails)
    await soon(control.poll())
    assert control.registry.find("good", "").ready
    assert "cannot be read" in control.registry.failures()["broken"]
    assert [vars(each)["model"] for each in caplog.records if each.exc_info] == ["broken"]


@pytest.mark.parametrize("mode", [ControlMode.POLL, ControlMode.EXPLICIT])
async def test_an_unforeseen_error_of_an_operation_does_not_end_the_registry(
    mode: ControlMode,
    tmp_path: Path,
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    control = await start(control_mode=mode)
    write(tmp_path, "a", 1)

    async def fails(*_: object) -> None:
        raise ValueError("unforeseen")

    with monkeypatch.context() as patched:
        patched.setattr(Lifecycle, "follow", fails)
        patched.setattr(Lifecycle, "load", fails)
        if mode is ControlMode.POLL:
            await soon(control.poll())
        else:
            with pytest.raises(InferenceError, match="model 'a' failed unexpectedly"):
                await soon(control.load("a"))
    assert [vars(each)["model"] for each in caplog.records if each.exc_info] == ["a"]
    await soon(control.poll() if mode is ControlMode.POLL else control.load("a"))
    assert control.registry.find("a", "").ready


async def test_a_folder_that_was_missing_during_its_load_is_loaded_by_a_later_poll(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = await start(**POLL)
    write(tmp_path, "moved", 1)
    away = tmp_path.parent / "away"
    read = ModelRepository.source

    def missing(repository: ModelRepository, *arguments: Any, **options: Any) -> Any:
        (tmp_path / "moved").rename(away)
        return read(repository, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(ModelRepository, "source", missing)
        await soon(control.poll())
    away.rename(tmp_path / "moved")
    await soon(control.poll())
    assert control.registry.find("moved", "").ready
