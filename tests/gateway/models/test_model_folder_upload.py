"""Uploaded files: their folder, and its deletion."""

import gc
from pathlib import Path

import pytest

from gateway.errors import Code, InferenceError
from gateway.models import model_folder
from gateway.models.model_folder import UploadedFolder, stay_inside


@pytest.mark.parametrize(
    ("parameter", "path"),
    [
        ("file:1/model.onnx", "1/model.onnx"),
        ("file:./1/model.onnx", "1/model.onnx"),
        ("file:1//model.onnx", "1/model.onnx"),
        ("file:1/../2/model.onnx", "2/model.onnx"),
        ("file:/1/model.onnx", "1/model.onnx"),
        ("file:..m/...", "..m/..."),
        ("file:1\\..\\x", "1\\..\\x"),
    ],
)
def test_paths_are_normalised(parameter: str, path: str) -> None:
    assert stay_inside(parameter) == path


@pytest.mark.parametrize(
    "path", ["", ".", "..", "../x", "1/../../x", "/../x", "//..//x", "1/..", "a\0b"]
)
def test_paths_outside_the_folder_are_refused(path: str) -> None:
    with pytest.raises(InferenceError) as caught:
        UploadedFolder({"file:1/x": b"", f"file:{path}": b""})
    assert caught.value.code is Code.INVALID_ARG
    assert caught.value.message.startswith(f"Invalid file parameter 'file:{path}' with normalized")


@pytest.mark.parametrize(
    ("files", "size"),
    [(dict.fromkeys(map("file:1/{}".format, range(5)), b""), 0), ({"file:1/x": bytes(9)}, 9)],
)
def test_a_load_has_a_limited_number_of_files_and_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes], size: int
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(model_folder, "MOST_FILES", 4)
    monkeypatch.setattr(model_folder, "MOST_UPLOADED_BYTES", 8)
    UploadedFolder({**dict.fromkeys(list(files)[:3], b"ab"), "file:1/y": b"ab"}).release()
    with pytest.raises(InferenceError) as caught:
        UploadedFolder(files)
    assert (caught.value.code, caught.value.message) == (
        Code.INVALID_ARG,
        f"the load has {len(files)} files of {size} bytes, expected at most 4 files and 8 bytes; "
        "copy the model to a repository",
    )
    assert list(tmp_path.iterdir()) == []


def test_the_last_release_deletes_the_folder() -> None:
    upload = UploadedFolder({"file:1/deep/model": b"x"})
    assert (upload.path / "1" / "deep" / "model").read_bytes() == b"x"
    upload.hold()
    upload.release()
    assert upload.path.exists()
    upload.release()
    assert not upload.path.exists()


def test_a_failed_upload_deletes_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(InferenceError, match="cannot be written") as caught:
        UploadedFolder({"file:1": b"", "file:1/x": b""})
    assert str(tmp_path) not in caught.value.message
    assert list(tmp_path.iterdir()) == []


def test_without_a_place_for_the_files_there_is_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "absent"))
    with pytest.raises(InferenceError, match="no folder can be made for uploaded files") as caught:
        UploadedFolder({"file:1/x": b""})
    assert caught.value.code is Code.INTERNAL


def test_a_folder_without_references_is_deleted() -> None:
    upload = UploadedFolder({"file:1/model": b"x"})
    path = upload.path
    del upload
    gc.collect()
    assert not path.exists()
