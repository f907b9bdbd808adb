"""Files of protobuf are whole if their outermost fields are valid, and end with the file."""

from pathlib import Path

import pytest

from backends.openvino.whole_files import check_whole
from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError

FIELD = b"\x08\x01"
"""Field 1, a number: 1."""
LONGEST = b"\xff" * 9 + b"\x01"
"""The longest number of protobuf."""


def check(folder: Path, data: bytes) -> None:
    file = folder / "model.onnx"
    file.write_bytes(data)
    check_whole(ModelConfig(name="m"), file)


@pytest.mark.parametrize(
    "data", [FIELD, b"\x08" + LONGEST + FIELD, b"\x12\x02ab" + FIELD, b"\x0d1234\x09" + bytes(8)]
)
def test_whole_fields_are_accepted(folder: Path, data: bytes) -> None:
    check(folder, data)


@pytest.mark.parametrize(
    "data",
    [
        bytes(10_000_000),
        FIELD + bytes(2),
        FIELD + b"\xff" * 1_000_000,
        b"\x08" + b"\x80" * 10 + b"\x00" + FIELD,
        b"\x88" + b"\x80" * 10 + b"\x00\x01",
    ],
    ids=["zeros", "field 0", "ones", "long number", "long number of field 1"],
)
@pytest.mark.timeout(10)
def test_fields_that_protobuf_does_not_have_are_refused_at_once(folder: Path, data: bytes) -> None:
    with pytest.raises(InferenceError) as caught:
        check(folder, data)
    assert caught.value.code is Code.INVALID_ARG
    assert "its protobuf fields do not end with the file" in caught.value.message
