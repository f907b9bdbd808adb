"""Checks of a GGUF file before the library reads it: the library crashes on files cut short."""

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sluice_llm.request import Mistake

MAGIC = b"GGUF"
VERSIONS = (2, 3)
STRING, ARRAY = 8, 9
SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
"""Types of values, as `struct` spells them."""
BLOCKS = {
    0: (1, 4),
    1: (1, 2),
    2: (32, 18),
    3: (32, 20),
    6: (32, 22),
    7: (32, 24),
    8: (32, 34),
    10: (256, 84),
    11: (256, 110),
    12: (256, 144),
    13: (256, 176),
    14: (256, 210),
    30: (1, 2),
}
"""Types of tensors: values and bytes of a block."""
INACCURATE = {3: "Q4_1", 12: "Q4_K"}
"""Types of tensors whose offsets the library rounds to whole numbers."""
SERVED = ("llama", "qwen2", "qwen3")
ALIGNMENT = 32
MOST_DIMS = 8


@dataclass(frozen=True)
class GgufHeader:
    """`architecture`, `context_length` (None if unknown), and the types of tensors."""

    architecture: str
    context_length: int | None
    tensor_types: frozenset[int]

    @property
    def inaccurate(self) -> tuple[str, ...]:
        """The names of types that the library reads with an error."""
        return tuple(name for kind, name in INACCURATE.items() if kind in self.tensor_types)


def read_header(path: Path) -> GgufHeader:
    """The header of a file that is complete; Mistake says what is wrong with it."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data, path.name).header()
    except _DamagedError as error:
        raise Mistake(f"its {path.name} is damaged: {error}") from None
    except (struct.error, ValueError, UnicodeDecodeError):
        raise Mistake(
            f"its {path.name} is no complete GGUF file: its header is cut short"
        ) from None
    except OSError as error:
        raise Mistake(f"its {path.name} cannot be read: {error.strerror}") from None


class _DamagedError(Exception):
    """The text names the wrong value."""


class _Reader:
    def __init__(self, data: mmap.mmap, name: str) -> None:
        self._data, self._name, self._at = data, name, 0

    def header(self) -> GgufHeader:
        if self._data[:4] != MAGIC:
            raise Mistake(
                f"its {self._name} is no GGUF file: it begins with {self._data[:4]!r}, expected "
                f"{MAGIC!r}"
            )
        self._at = 4
        version, tensors, entries = self._unpack("<IQQ")
        if version not in VERSIONS:
            raise Mistake(f"its {self._name} has GGUF version {version}, expected 2 or 3")
        found = {}
        for _ in range(entries):
            name = self._text()
            found[name] = self._value(self._scalar("I"))
        architecture = found.get("general.architecture")
        if architecture not in SERVED:
            raise Mistake(
                f"its {self._name} has the architecture '{architecture}', expected one of "
                f"{', '.join(SERVED)}; export other models by `optimum-cli export openvino`"
            )
        kinds = self._tensors(tensors, found)
        length = found.get(f"{architecture}.context_length")
        return GgufHeader(architecture, length if isinstance(length, int) else None, kinds)

    def _tensors(self, count: int, found: Mapping[str, Any]) -> frozenset[int]:
        """The types of all tensors, whose data must be in the file."""
        kinds, end = set(), 0
        for _ in range(count):
            self._text()
            dims = self._scalar("I")
            if dims > MOST_DIMS:
                raise ValueError
            values = 1
            for size in self._unpack(f"<{dims}Q"):
                values *= size
            kind, offset = self._unpack("<IQ")
            per_block, block_bytes = BLOCKS.get(kind, (1, 0))
            kinds.add(kind)
            end = max(end, offset + values // per_block * block_bytes)
        alignment = found.get("general.alignment", ALIGNMENT)
        if type(alignment) is not int or alignment < 1:
            raise _DamagedError(
                f"general.alignment is {alignment!r}, expected a whole number of at least 1"
            )
        expected = -(-self._at // alignment) * alignment + end
        if len(self._data) < expected:
            raise Mistake(
                f"its {self._name} is cut short: it has {len(self._data)} bytes, expected at least "
                f"{expected}"
            )
        return frozenset(kinds)

    def _value(self, kind: int) -> Any:
        """The value of an entry; None in place of an array."""
        if kind == STRING:
            return self._text()
        if kind in SCALARS:
            return self._scalar(SCALARS[kind])
        if kind != ARRAY:
            raise _DamagedError(f"a value has the type {kind}, expected 0 to 12")
        inner, count = self._unpack("<IQ")
        if inner == STRING:
            for _ in range(count):
                self._skip(self._scalar("Q"))
        elif inner in SCALARS:
            self._skip(count * struct.calcsize(SCALARS[inner]))
        else:
            raise _DamagedError(
                f"an array has values of the type {inner}, expected 0 to 8, 10 to 12"
            )
        return None

    def _text(self) -> str:
        begin, size = self._at + 8, self._scalar("Q")
        self._skip(size)
        return self._data[begin : begin + size].decode()

    def _scalar(self, form: str) -> Any:
        return self._unpack(f"<{form}")[0]

    def _unpack(self, form: str) -> tuple[Any, ...]:
        found = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return found

    def _skip(self, size: int) -> None:
        self._at += size
        if self._at > len(self._data):
            raise ValueError
