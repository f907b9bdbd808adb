"""GGUF files are checked before the library, which crashes on files cut short."""

import struct
from pathlib import Path

import pytest
from sluice_llm.request import Mistake

from backends.openvino_genai.worker.sluice_openvino_genai.compiling import tiny_gguf
from backends.openvino_genai.worker.sluice_openvino_genai.gguf_header import read_header

TINY = tiny_gguf()


def written(folder: Path, content: bytes) -> Path:
    path = folder / "m.gguf"
    path.write_bytes(content)
    return path


def with_entry(name: bytes, kind: int, value: bytes) -> bytes:
    """The tiny model with one more entry."""
    (entries,) = struct.unpack_from("<Q", TINY, 16)
    entry = struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value
    return TINY[:16] + struct.pack("<Q", entries + 1) + entry + TINY[24:] + bytes(64)


def test_architecture_and_length_are_read(tmp_path: Path) -> None:
    found = read_header(written(tmp_path, TINY))
    assert (found.architecture, found.context_length) == ("llama", 64)
    assert (found.tensor_types, found.inaccurate) == ({0, 1}, ())


@pytest.mark.parametrize("kept", [0, 3, 10, 100, 5000, len(TINY) - 200])
def test_a_file_cut_anywhere_is_refused(tmp_path: Path, kept: int) -> None:
    with pytest.raises(Mistake, match=r"its m\.gguf (is|cannot|has)"):
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
    with pytest.raises(Mistake, match=error):
        read_header(written(tmp_path, content))


@pytest.mark.parametrize(
    ("name", "kind", "value", "error"),
    [
        (b"a", 13, bytes(8), "a value has the type 13, expected 0 to 12"),
        (b"a", 99, bytes(8), "a value has the type 99"),
        (b"a", 9, struct.pack("<IQ", 99, 1), "an array has values of the type 99"),
        (b"general.alignment", 4, bytes(4), "general.alignment is 0, expected a whole number"),
        (b"general.alignment", 5, b"\xff" * 4, "general.alignment is -1"),
        (b"general.alignment", 8, struct.pack("<Q", 2) + b"32", "general.alignment is '32'"),
        (b"general.alignment", 6, struct.pack("<f", 32), "general.alignment is 32.0"),
    ],
)
def test_a_damaged_value_is_named(
    tmp_path: Path, name: bytes, kind: int, value: bytes, error: str
) -> None:
    with pytest.raises(Mistake) as refused:
        read_header(written(tmp_path, with_entry(name, kind, value)))
    assert f"its m.gguf is damaged: {error}" in str(refused.value)


def test_an_alignment_of_the_file_is_used(tmp_path: Path) -> None:
    content = with_entry(b"general.alignment", 4, struct.pack("<I", 32))
    assert read_header(written(tmp_path, content)).architecture == "llama"
    content = with_entry(b"general.alignment", 4, struct.pack("<I", 1 << 20))
    with pytest.raises(Mistake, match="is cut short"):
        read_header(written(tmp_path, content))
