"""Finding a model's file and libraries, and nothing else on the host."""

from pathlib import Path

import pytest

from gateway.config import ModelConfig, ModelOperations
from gateway.errors import Code, InferenceError
from gateway.tensor_runtime.model_files import find_file, find_libraries
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
