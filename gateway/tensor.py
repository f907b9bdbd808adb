"""Tensors: named, typed, shaped data of requests and responses; decorators of such values."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar, dataclass_transform

import numpy as np
import numpy.typing as npt

from gateway.cuda_driver import DeviceMemory
from gateway.errors import Code, InferenceError

Class = TypeVar("Class", bound=type[Any])

Buffer = bytes | bytearray | memoryview
LENGTH_BYTES = 4

RUN_BYTES = 1 << 18
FEWEST_ROWS = 16
LONGEST_PAUSE = 1024
"""Of runs of records: bytes compared at once, the shortest run, the longest pause of the search."""


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def value(cls: Class) -> Class:
    """A dataclass that is frozen for the type checker only.

    A dataclass that is frozen at run time takes four times as long to create.
    """
    return _made(cls, kw_only=False)


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def keyword_value(cls: Class) -> Class:
    """As `value`, with keyword arguments only."""

    return _made(cls, kw_only=True)


def _made(cls: Class, *, kw_only: bool) -> Class:
    made: Any = dataclass(slots=True, unsafe_hash=True, kw_only=kw_only)(cls)
    found: Class = made
    return found


class Datatype(StrEnum):
    """Datatypes by their wire names."""

    BOOL = "BOOL"
    UINT8 = "UINT8"
    UINT16 = "UINT16"
    UINT32 = "UINT32"
    UINT64 = "UINT64"
    INT8 = "INT8"
    INT16 = "INT16"
    INT32 = "INT32"
    INT64 = "INT64"
    FP16 = "FP16"
    FP32 = "FP32"
    FP64 = "FP64"
    BYTES = "BYTES"
    BF16 = "BF16"

    # That of Enum is written in Python, and tables of datatypes are read in each request.
    __hash__ = str.__hash__


NUMPY_TYPES: dict[Datatype, Any] = {
    Datatype.BOOL: np.dtype(np.bool_),
    Datatype.UINT8: np.dtype("<u1"),
    Datatype.UINT16: np.dtype("<u2"),
    Datatype.UINT32: np.dtype("<u4"),
    Datatype.UINT64: np.dtype("<u8"),
    Datatype.INT8: np.dtype("<i1"),
    Datatype.INT16: np.dtype("<i2"),
    Datatype.INT32: np.dtype("<i4"),
    Datatype.INT64: np.dtype("<i8"),
    Datatype.FP16: np.dtype("<f2"),
    Datatype.FP32: np.dtype("<f4"),
    Datatype.FP64: np.dtype("<f8"),
}
"""Datatypes that numpy knows. BYTES is an object; BF16 has no native type and travels as bits."""

BF16_BITS = np.dtype("<u2")
BF16_SHIFT = 16

CONVERTED = (tuple, DeviceMemory)
"""The types of data that `Tensor.raw` converts; it returns other data as it is."""

SIZES = {datatype: dtype.itemsize for datatype, dtype in NUMPY_TYPES.items()} | {Datatype.BF16: 2}
"""Bytes per element; BYTES is absent because its elements vary."""


@value
class Tensor:
    """One named tensor; its data is passed on without copies.

    `data` is the wire form (row-major, little-endian; each BYTES element after its uint32 length)
    or, for BYTES only, a tuple of its elements. Numbers may be in the memory of a GPU; `raw` and
    `array` copy them to the host.
    """

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    data: Buffer | DeviceMemory | tuple[bytes, ...]

    @property
    def count(self) -> int:
        """The number of elements by the shape."""
        return math.prod(self.shape)

    def raw(self) -> Buffer:
        """The wire form on the host; blocks if it is copied from a GPU."""
        data = self.data
        if isinstance(data, tuple):
            return join_elements(data)
        return data.read() if isinstance(data, DeviceMemory) else data

    def elements(self) -> tuple[bytes, ...]:
        """The elements of a BYTES tensor; InferenceError if the wire form is truncated."""
        if isinstance(self.data, tuple):
            return self.data
        return split_elements(self.raw(), self.name)

    def array(self) -> npt.NDArray[Any]:
        """A numpy view in the tensor's shape; BYTES gives objects, BF16 its bits as uint16.

        BOOL is copied if it has bytes other than 0 and 1: some runtimes count true elements by
        adding bytes.
        """
        if self.datatype is Datatype.BYTES:
            objects: npt.NDArray[Any] = np.empty(self.count, dtype=np.object_)
            objects[:] = self.elements()
            return objects.reshape(self.shape)
        dtype = NUMPY_TYPES.get(self.datatype, BF16_BITS)
        data = self.data
        raw = self.raw() if isinstance(data, CONVERTED) else data
        array: npt.NDArray[Any] = np.frombuffer(raw, dtype).reshape(self.shape)
        if self.datatype is Datatype.BOOL and array.view(np.uint8).max(initial=0) > 1:
            array = array.view(np.uint8) != 0
        return array


def text_tensor(name: str, texts: Sequence[str]) -> Tensor:
    """A BYTES tensor of shape [len(texts)]."""
    elements = tuple(map(encoded, texts))
    return Tensor(name, Datatype.BYTES, (len(elements),), elements)


def encoded(text: str) -> bytes:
    """The element of BYTES for a text."""
    return text.encode("utf-8", "surrogatepass")


def unicode_strings(tensor: Tensor, model: str, whose: str) -> npt.NDArray[Any]:
    """The elements of a BYTES input as an array of objects in its shape.

    Raises InferenceError INVALID_ARG for an element that is not UTF-8; `whose` strings are texts.
    """
    strings: npt.NDArray[Any] = np.empty(tensor.count, dtype=np.object_)
    try:
        strings[:] = [element.decode() for element in tensor.elements()]
    except UnicodeDecodeError as error:
        raise InferenceError(
            Code.INVALID_ARG,
            f"input '{tensor.name}' of model '{model}' has an element that is not UTF-8 "
            f"({error.reason} at byte {error.start}), which strings of {whose} are",
        ) from None
    return strings.reshape(tensor.shape)


def bf16_floats(bits: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The float32 of each BF16, given by its bits; exact."""
    widened: npt.NDArray[Any] = (bits.astype("<u4") << BF16_SHIFT).view("<f4")
    return widened


def array_tensor(name: str, datatype: Datatype, array: npt.NDArray[Any]) -> Tensor:
    """A tensor over the array's memory; copied only if the layout or type differs from the wire."""
    if datatype is Datatype.BYTES:
        elements = tuple(_element(value) for value in array.reshape(-1))
        return Tensor(name, datatype, array.shape, elements)
    contiguous = np.ascontiguousarray(array, dtype=NUMPY_TYPES.get(datatype, array.dtype))
    # An empty view cannot be cast.
    data = contiguous.data.cast("B") if contiguous.size else memoryview(b"")
    return Tensor(name, datatype, array.shape, data)


def _element(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


def join_elements(elements: Sequence[bytes]) -> bytes:
    """BYTES elements to the wire form."""
    parts: list[bytes] = []
    for element in elements:
        parts.append(len(element).to_bytes(LENGTH_BYTES, "little"))
        parts.append(element)
    return b"".join(parts)


def split_elements(data: Buffer, name: str) -> tuple[bytes, ...]:
    """The wire form of BYTES to its elements; InferenceError if it is truncated."""
    return next(batched_elements(data, name, len(data) + 1), ())


def batched_elements(data: Buffer, name: str, most: int) -> Iterator[tuple[bytes, ...]]:
    """As `split_elements`, in tuples of at most `most` elements."""
    view = memoryview(data)
    elements: list[bytes] = []
    for start, end in element_spans(view):
        if start > len(view):
            raise InferenceError(Code.INVALID_ARG, cut_length(f"'{name}'", start, len(view)))
        if end > len(view):
            raise InferenceError(Code.INVALID_ARG, cut_element(f"'{name}'", start, end, len(view)))
        elements.append(bytes(view[start:end]))
        if len(elements) == most:
            yield tuple(elements)
            elements = []
    if elements:
        yield tuple(elements)


def element_spans(data: Buffer) -> Iterator[tuple[int, int]]:
    """The start and end of each element in the wire form of BYTES.

    If the form is truncated, the last element ends after it, and may start after it.
    """
    view = memoryview(data)
    end = 0
    while end < len(view):
        start = end + LENGTH_BYTES
        end = start + int.from_bytes(view[end:start], "little")
        yield start, end


class Runs:
    """Finds runs of records that begin with the same bytes, by numpy.

    `count` is called before each record. While records differ it searches ever more rarely.
    """

    __slots__ = ("_pause", "_wait")

    def __init__(self) -> None:
        self._pause = self._wait = 0

    def count(self, view: memoryview, at: int, head: int, stride: int) -> int:
        """The number of complete records of `stride` bytes with the same `head` bytes, or 1."""
        if self._wait:
            self._wait -= 1
            return 1
        rows = min((len(view) - at) // stride, 1 + RUN_BYTES // stride)
        if rows < FEWEST_ROWS:
            return 1
        probe = self._same(view, at, head, stride, FEWEST_ROWS)
        if probe < FEWEST_ROWS:
            self._pause = min(2 * self._pause + FEWEST_ROWS, LONGEST_PAUSE)
            self._wait = self._pause
            return max(probe, 1)
        self._pause = 0
        return self._same(view, at, head, stride, rows)

    def _same(self, view: memoryview, at: int, head: int, stride: int, rows: int) -> int:
        records = np.frombuffer(view[at : at + rows * stride], np.uint8).reshape(rows, stride)
        differs = (records[:, :head] != records[0, :head]).any(axis=1)
        return int(differs.argmax()) if differs.any() else rows


def element_runs(data: Buffer) -> Iterator[tuple[int, int, int]]:
    """The start and end of elements in the wire form of BYTES, with the length of the run.

    Consecutive elements of one size are one run, given by its first element. If the form is
    truncated, the last element ends after it, and may start after it.
    """
    view, runs = memoryview(data), Runs()
    at, size = 0, len(view)
    while at < size:
        start = at + LENGTH_BYTES
        length = int.from_bytes(view[at:start], "little")
        count = runs.count(view, at, LENGTH_BYTES, LENGTH_BYTES + length)
        yield start, start + length, count
        at += count * (LENGTH_BYTES + length)


def cut_length(name: str, start: int, size: int) -> str:
    """Triton's error for a wire form of `size` bytes that ends before an element starts."""
    return (
        f"incomplete string length indicator for inference input {name}, expecting {LENGTH_BYTES} "
        f"bytes but only {size - start + LENGTH_BYTES} bytes available. Please make sure the "
        "string length indicator is in one buffer."
    )


def cut_element(name: str, start: int, end: int, size: int) -> str:
    """Triton's error for a wire form of `size` bytes that ends inside an element."""
    return (
        f"incomplete string data for inference input {name}, expecting string of length "
        f"{end - start} but only {size - start} bytes available"
    )


def format_shape(shape: Sequence[int]) -> str:
    """A shape in Triton's form: `[1,16]`."""

    return f"[{','.join(map(str, shape))}]"
