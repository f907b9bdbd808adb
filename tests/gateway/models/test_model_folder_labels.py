"""Label files are read as by Triton, and only inside the model's folder."""

from dataclasses import replace
from pathlib import Path

import pytest

from gateway.errors import Code, InferenceError
from gateway.models.model_folder import read_labels
from tests.builders import TEXT


def labels(folder: Path, filename: str) -> tuple[str, ...]:
    output = replace(TEXT.output[0], label_filename=filename)
    return read_labels(replace(TEXT, output=(output,)), folder)["text_output"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (b"cat\ndog\n", ("cat", "dog")),
        (b"cat\ndog", ("cat", "dog")),
        (b"cat\n\nsnow leopard\n", ("cat", "", "snow leopard")),
        (b"", ()),
        (b"\n", ("",)),
        (b"\xff\n", ("\ufffd",)),
    ],
)
def test_every_line_is_the_label_of_its_index(
    tmp_path: Path, text: bytes, found: tuple[str, ...]
) -> None:
    (tmp_path / "labels.txt").write_bytes(text)
    assert labels(tmp_path, "labels.txt") == found


def test_outputs_without_a_file_have_no_labels(tmp_path: Path) -> None:
    assert read_labels(TEXT, tmp_path) == {}


def test_a_file_that_is_not_there_is_named_without_its_folder(tmp_path: Path) -> None:
    with pytest.raises(InferenceError) as caught:
        labels(tmp_path, "absent.txt")
    assert caught.value.code is Code.INTERNAL
    assert caught.value.message == (
        "failed to open text file for read text/absent.txt: No such file or directory"
    )


@pytest.mark.parametrize("filename", ["../labels.txt", "/etc/passwd", "1/../../x", "link", "a\0b"])
def test_a_file_outside_the_model_is_refused(tmp_path: Path, filename: str) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    (tmp_path / "labels.txt").write_text("secret")
    (folder / "link").symlink_to(tmp_path / "labels.txt")
    with pytest.raises(InferenceError) as caught:
        labels(folder, filename)
    assert caught.value.code is Code.UNSUPPORTED
    assert "is outside model directory" in caught.value.message
    assert str(tmp_path) not in caught.value.message
