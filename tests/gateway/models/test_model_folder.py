"""Changes of a model's folder that its state shows."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from gateway.models.model_folder import by_version, take_snapshot


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model with a version."""
    (tmp_path / "1" / "assets").mkdir(parents=True)
    (tmp_path / "configs").mkdir()
    for name in ("config.pbtxt", "1/model.onnx", "1/assets/vocabulary", "configs/other.pbtxt"):
        (tmp_path / name).write_text("x")
    return tmp_path


def touch(folder: Path) -> None:
    path = folder / "1" / "model.onnx"
    os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns + 1))


def resize(folder: Path) -> None:
    path = folder / "1" / "assets" / "vocabulary"
    stamp = path.stat()
    path.write_text("longer")
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))


def add_version(folder: Path) -> None:
    (folder / "2").mkdir()


def remove(folder: Path) -> None:
    (folder / "1" / "model.onnx").unlink()


@pytest.mark.parametrize("change", [touch, resize, add_version, remove])
def test_changes_of_model_files_are_noticed(folder: Path, change: Callable[[Path], None]) -> None:
    before = take_snapshot(folder)
    assert take_snapshot(folder) == before
    change(folder)
    assert take_snapshot(folder) != before
    assert by_version(take_snapshot(folder)) != by_version(before)


@pytest.mark.parametrize("name", ["config.pbtxt", "configs/other.pbtxt", "configs/new.pbtxt"])
def test_changes_of_configs_are_distinguished(folder: Path, name: str) -> None:
    before = take_snapshot(folder)
    (folder / name).write_text("something else")
    assert take_snapshot(folder) != before
    assert by_version(take_snapshot(folder)) == by_version(before)


def test_bytecode_of_python_is_no_change(folder: Path) -> None:
    before = take_snapshot(folder)
    bytecode = folder / "1" / "__pycache__"
    bytecode.mkdir(parents=True)
    (bytecode / "model.cpython-311.pyc").write_bytes(b"x")
    assert take_snapshot(folder) == before


def test_links_are_followed_but_not_in_circles(folder: Path, tmp_path: Path) -> None:
    other = tmp_path.parent / f"{tmp_path.name}-weights"
    other.mkdir()
    (other / "weights").write_text("x")
    (folder / "2").symlink_to(other)
    (folder / "1" / "up").symlink_to(folder)
    (folder / "1" / "dangling").symlink_to("nowhere")
    before = take_snapshot(folder)
    assert "2/weights" in before
    (other / "weights").write_text("better ones")
    assert take_snapshot(folder) != before


def test_a_removed_folder_has_an_empty_state(tmp_path: Path) -> None:
    assert take_snapshot(tmp_path / "absent") == {}
