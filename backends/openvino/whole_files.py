"""Checks that a file is whole: of a part the library would try every format it knows."""

import mmap
from collections.abc import Callable, Mapping
from pathlib import Path

from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError

XML_END = b"</net>"
TAIL_BYTES = 64

VARINT, LENGTH_DELIMITED = 0, 2
FIXED_SIZES = {1: 8, 5: 4}
"""Bytes of values of fixed size, by wire type."""
LONGEST_VARINT = 10
"""In bytes."""
SAVED_MODEL = "saved_model.pb"
HEAD_BYTES = 512
CONTROLS = bytes(byte for byte in range(32) if byte not in b"\t\n\r")
"""Bytes of every protobuf message of a model, and of no text."""


def check_whole(config: ModelConfig, file: Path) -> None:
    """Raise INVALID_ARG for a file that is cut short; a SavedModel is a folder."""
    read = file / SAVED_MODEL if file.is_dir() else file
    problem_of = CHECKS.get(read.suffix)
    if problem_of is None or not read.is_file():
        return
    if problem := problem_of(read):
        shown = read.relative_to(file.parent.parent)
        raise InferenceError(
            Code.INVALID_ARG, f"unable to load model '{config.name}': '{shown}' is {problem}"
        )


def _xml_problem(file: Path) -> str:
    with file.open("rb") as opened:
        opened.seek(max(0, file.stat().st_size - TAIL_BYTES))
        if opened.read().rstrip().endswith(XML_END):
            return ""
    return f"cut short, or no model of OpenVINO: expected {XML_END.decode()} at its end"


def _protobuf_problem(file: Path) -> str:
    if file.stat().st_size == 0:
        return "empty"
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if _is_text(data):
            return TEXT_PROBLEMS.get(file.suffix, "")
        if _is_whole(data):
            return ""
    return "cut short, or of another format: its protobuf fields do not end with the file"


def _is_text(data: mmap.mmap) -> bool:
    """Whether it is a message as text, which has other ends."""
    head = data[:HEAD_BYTES]
    return head == head.translate(None, CONTROLS)


def _is_whole(data: mmap.mmap) -> bool:
    """Whether the outermost fields end with the data."""
    at = 0
    try:
        while at < len(data):
            tag, at = _varint(data, at)
            if tag >> 3 == 0:  # no field has this number; a file of zeros would take seconds
                return False
            at = _end(data, at, tag & 7)
    except (IndexError, KeyError, ValueError):
        return False
    return at == len(data)


def _end(data: mmap.mmap, at: int, kind: int) -> int:
    """The end of the value of a field; KeyError for an unknown wire type."""
    if kind == VARINT:
        return _varint(data, at)[1]
    if kind == LENGTH_DELIMITED:
        size, at = _varint(data, at)
        return at + size
    return at + FIXED_SIZES[kind]


def _varint(data: mmap.mmap, at: int) -> tuple[int, int]:
    """A number and its end; IndexError if the data ends before, ValueError if it is too long."""
    value = 0
    for place in range(LONGEST_VARINT):
        byte = data[at + place]
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return value, at + place + 1
    raise ValueError(f"a number of more than {LONGEST_VARINT} bytes")


TEXT_PROBLEMS = {".onnx": "text, and not an ONNX file"}
"""The problem of a text, by suffix; other texts are left to the library, which reads GraphDefs."""
CHECKS: Mapping[str, Callable[[Path], str]] = {
    ".xml": _xml_problem,
    ".onnx": _protobuf_problem,
    ".pb": _protobuf_problem,
    ".pdmodel": _protobuf_problem,
}
"""The problem of a file or "", by its suffix."""
