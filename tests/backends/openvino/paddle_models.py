"""A model in Paddle's format, written field by field: Paddle itself takes a gigabyte."""

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

FP32, LOD_TENSOR, FEED, FETCH = 5, 7, 9, 10
"""Values of VarType.Type in Paddle's framework.proto."""
INT = 0
"""Its AttrType."""
VERSION = 2_005_000

Value = int | str | bytes


def message(*fields: tuple[int, Value]) -> bytes:
    """A message of protobuf: numbers of fields and their values."""
    return b"".join(_field(number, value) for number, value in fields)


def _field(number: int, value: Value) -> bytes:
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    data = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def _tensor(dims: Sequence[int]) -> bytes:
    return message((1, FP32), *((2, size) for size in dims))


def _variable(name: str, dims: Sequence[int], *, stored: bool = False) -> bytes:
    kind = message((1, LOD_TENSOR), (3, message((1, _tensor(dims)), (2, 0))))
    return message((1, name), (2, kind), (3, int(stored)))


def _port(name: str, kind: int) -> bytes:
    return message((1, name), (2, message((1, kind))), (3, 1))


def _operator(kind: str, inputs: dict[str, str], outputs: dict[str, str], *more: bytes) -> bytes:
    named = [
        (number, message((1, role), (2, name)))
        for number, side in ((1, inputs), (2, outputs))
        for role, name in side.items()
    ]
    return message(*named, (3, kind), *((4, each) for each in more))


def _number(name: str, value: int) -> bytes:
    return message((1, name), (2, INT), (3, value))


def save_products(folder: Path, factors: Sequence[float], rows: int = -1) -> Path:
    """Write a model whose y is x of two columns, times the stored factors; returns the folder.

    -1 rows are any number.
    """
    column = _number("col", 0)
    product = {"X": "x", "Y": "factors"}
    block = message(
        (1, 0),
        (2, -1),
        (3, _port("feed", FEED)),
        (3, _port("fetch", FETCH)),
        (3, _variable("x", (rows, 2))),
        (3, _variable("factors", (2,), stored=True)),
        (3, _variable("y", (rows, 2))),
        (4, _operator("feed", {"X": "feed"}, {"Out": "x"}, column)),
        (4, _operator("elementwise_mul", product, {"Out": "y"}, _number("axis", -1))),
        (4, _operator("fetch", {"X": "y"}, {"Out": "fetch"}, column)),
    )
    folder.mkdir(parents=True, exist_ok=True)
    program = message((1, block), (4, message((1, VERSION))))
    (folder / "model.pdmodel").write_bytes(program)
    (folder / "model.pdiparams").write_bytes(_stored(np.array(factors, np.float32)))
    return folder


def _stored(values: npt.NDArray[np.float32]) -> bytes:
    """A tensor in the file of parameters."""
    about = _tensor(values.shape)
    return struct.pack("<IQIi", 0, 0, 0, len(about)) + about + values.tobytes()
