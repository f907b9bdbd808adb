"""GGUF files are checked before the library, which crashes on files cut short."""

import struct
from pathlib import Path

import pytest
from sluice_llm.request import Refusal

from backends.openvino_genai.worker.sluice_openvino_genai.compiling import tiny_gguf
from backends.openvino_genai.worker.sluice_openvino_genai.gguf_header import read_header

TINY = tiny_gguf()


def written(folder: Path, content: bytes) -> Path:
    path = folder / "m.gguf"
    path.write_bytes(content)
    return path


def test_architecture_and_length_are_read(tmp_path: Path) -> None:
    found = read_header(written(tmp_path, TINY))
    assert (found.architecture, found.context_length) == ("llama", 64)
    assert (found.tensor_types, found.inaccurate) == ({0, 1}, ())


@pytest.mark.parametrize("kept", [0, 3, 10, 100, 5000, len(TINY) - 200])
def test_a_file_cut_anywhere_is_refused(tmp_path: Path, kept: int) -> None:
    with pytest.raises(Refusal, match=r"its m\.gguf (is|cannot|has)"):
        read_header(written(tmp_path, TINY[:kept]))


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"PK\x03\x04" * 100, r"is no GGUF file: it begins with b'PK"),
        (TINY.replace(struct.pack("<I", 3), struct.pack("<I", 9), 1), "has GGUF version 9"),
        (
            TINY.replace(b"llama", b"gemma", 1),
            "has the architecture 'gemma', expected one of llama",
        ),
        (TINY[:4] + b"\xff" * 200, "GGUF version|cut short"),
    ],
)
def test_a_file_of_another_kind_is_refused(tmp_path: Path, content: bytes, error: str) -> None:
    with pytest.raises(Refusal, match=error):
        read_header(written(tmp_path, content))
