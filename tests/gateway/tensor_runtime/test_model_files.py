"""Finding a model's file and libraries, and nothing else on the host; the state of its files."""

import os
from pathlib import Path

import pytest

from gateway.config import ModelConfig, ModelOperations
from gateway.errors import Code, InferenceError
from gateway.tensor_runtime.model_files import file_stamps, find_file, find_libraries
from tests.tensor_backends import version_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The version folder of a model m."""
    return version_folder(tmp_path)


def named(filename: str = "") -> ModelConfig:
    return ModelConfig(name="m", default_model_filename=filename)


def libraries(*names: str) -> ModelConfig:
    return ModelConfig(name="m", model_operations=ModelOperations(op_library_filename=names))


def test_a_model_is_a_file_or_a_folder_with_one(folder: Path) -> None:
    (folder / "model.onnx").write_bytes(b"")
    (folder / "other.onnx").mkdir()
    (folder / "other.onnx" / "model.onnx").write_bytes(b"")
    assert find_file(named(), folder, "model.onnx") == folder / "model.onnx"
    assert (
        find_file(named("other.onnx"), folder, "model.onnx") == folder / "other.onnx" / "model.onnx"
    )


def test_a_link_may_lead_elsewhere(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(b"")
    (folder / "model.onnx").symlink_to(tmp_path / "weights")
    assert find_file(named(), folder, "model.onnx") == folder / "model.onnx"


@pytest.mark.parametrize(
    ("filename", "shown"),
    [("", "1/model.onnx"), ("x.onnx", "1/x.onnx"), ("sub/x.onnx", "1/sub/x.onnx")],
)
def test_a_file_that_is_not_there_is_named_without_its_place_on_the_host(
    folder: Path, filename: str, shown: str
) -> None:
    with pytest.raises(InferenceError) as caught:
        find_file(named(filename), folder, "model.onnx")
    assert caught.value.code is Code.UNAVAILABLE
    assert caught.value.message == f"unable to find '{shown}' for model instance 'm'"


def test_a_missing_model_file_is_named(folder: Path) -> None:
    (folder / "model.onnx").mkdir()
    with pytest.raises(InferenceError, match=r"'1/model\.onnx/model\.onnx'"):
        find_file(named(), folder, "model.onnx")


@pytest.mark.parametrize(
    "name", ["../x", "../../../../etc/passwd", "/etc/passwd", "a\0b", "sub/../../x", "..", "."]
)
def test_a_name_that_leads_out_of_the_version_folder_is_refused(folder: Path, name: str) -> None:
    with pytest.raises(InferenceError) as caught:
        find_file(named(name), folder, "model.onnx")
    assert caught.value.code is Code.INVALID_ARG
    assert caught.value.message == (f"file '{name}' of model 'm' is outside of the model's folder")


def test_libraries_are_in_the_version_folder_or_the_models(folder: Path) -> None:
    (folder / "a.so").write_bytes(b"")
    (folder.parent / "b.so").write_bytes(b"")
    assert find_libraries(libraries("a.so", "b.so"), folder) == [
        folder / "a.so",
        folder.parent / "b.so",
    ]
    assert find_libraries(ModelConfig(), folder) == []


@pytest.mark.parametrize("name", ["missing.so", "/usr/lib/libc.so", "../../other.so", "a\0b"])
def test_libraries_elsewhere_are_refused(folder: Path, name: str) -> None:
    with pytest.raises(InferenceError) as caught:
        find_libraries(libraries(name), folder)
    assert caught.value.code is Code.INVALID_ARG
    assert str(folder.parent) not in caught.value.message


def test_a_file_in_any_folder_of_a_version_changes_its_stamps(folder: Path) -> None:
    (folder / "sub").mkdir()
    file = folder / "sub" / "weights"
    file.write_bytes(b"1")
    os.utime(file, ns=(1, 1))
    before = file_stamps(folder)
    assert before == file_stamps(folder)
    os.utime(file, ns=(2, 2))
    assert (changed := file_stamps(folder)) != before
    (folder / "more").write_bytes(b"")
    assert file_stamps(folder) > changed


def test_a_file_replaced_by_one_of_its_size_and_age_changes_the_stamps(folder: Path) -> None:
    for name in ("weights", "new"):
        (folder / name).write_bytes(b"1")
        os.utime(folder / name, ns=(1, 1))
    before = file_stamps(folder)
    (folder / "new").replace(folder / "weights")
    (folder / "new").write_bytes(b"1")
    os.utime(folder / "new", ns=(1, 1))
    assert file_stamps(folder) != before


def test_stamps_follow_links_once(folder: Path, tmp_path: Path) -> None:
    stored = tmp_path / "stored"
    stored.mkdir()
    (stored / "weights").write_bytes(b"1")
    (folder / "linked").symlink_to(stored)
    (folder / "missing").symlink_to(tmp_path / "missing")
    for name in "ab":
        (stored / name).symlink_to(folder)
    before = file_stamps(folder)
    assert [path for path, *_ in before] == [str(folder / "linked" / "weights")]
    (stored / "weights").write_bytes(b"22")
    assert file_stamps(folder) != before


def test_a_missing_folder_has_no_stamps(folder: Path) -> None:
    assert not file_stamps(folder / "missing")
