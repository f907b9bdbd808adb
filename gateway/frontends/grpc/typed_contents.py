"""Large typed contents (InferTensorContents) in bytes: read by numpy, part by part.

protobuf makes a Python object of each element, and holds the interpreter lock for all of them.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from gateway.frontends.grpc.protobuf_wire import read_varint
from gateway.protos import grpc_service_pb2 as pb
from gateway.tensor import LENGTH_BYTES, Buffer, Datatype, Runs

FIELDS: dict[int, str] = {
    field.number: field.name for field in pb.InferTensorContents.DESCRIPTOR.fields
}
FIXED = {"fp32_contents": 4, "fp64_contents": 8}
"""The fields whose elements have a fixed size."""
STRINGS = "bytes_contents"

VARINT, FIXED_64, LENGTH_DELIMITED, FIXED_32 = 0, 1, 2, 5
WINDOW_BYTES = 1 << 18
LONGEST_VARINT = 10

UNSIGNED: dict[str, Any] = {
    "bool_contents": np.dtype(np.uint64),
    "int_contents": np.dtype("<u4"),
    "uint_contents": np.dtype("<u4"),
    "int64_contents": np.dtype("<u8"),
    "uint64_contents": np.dtype("<u8"),
}
"""The part of each varint that counts: what follows is cut off (protocol buffers encoding)."""


class TypedContents(NamedTuple):
    """The populated fields, and the data of the only one."""

    populated: list[str]
    data: Buffer = b""

    def as_datatype(self, datatype: Datatype, dtype: Any) -> Buffer:
        """The data as that datatype has it; of numbers the lowest bytes."""
        (name,) = self.populated
        if name in FIXED or datatype is Datatype.BYTES:
            return self.data
        values: Any = np.frombuffer(self.data, UNSIGNED[name])
        found = values != 0 if datatype is Datatype.BOOL else values.astype(dtype, copy=False)
        return memoryview(found).cast("B") if found.size else b""


def read_contents(view: memoryview) -> TypedContents:
    """An InferTensorContents; DecodeError if it is none. Any thread may call this."""
    found: dict[str, Buffer] = {}
    at, end, runs = 0, len(view), Runs()
    try:
        while at < end:
            tag, head = read_varint(view, at)
            start, stop = _span(view, head, tag & 7)
            if stop > end or not tag >> 3:
                raise DecodeError("a field is cut short, or has no number")
            name = FIELDS.get(tag >> 3)
            if name == STRINGS:
                count = runs.count(view, at, start - at, stop - at)
                stop = at + count * (stop - at)
                _add(found, name, _wire_form(view[at:stop], count, start - at))
            elif name is not None and stop > start:
                _add(found, name, view[start:stop])
            at = stop
    except IndexError:
        raise DecodeError("a varint is cut short or too long") from None
    populated = [name for name in FIELDS.values() if name in found]
    if len(populated) != 1:
        return TypedContents(populated)
    (name,) = populated
    return TypedContents(populated, _data(name, found[name]))


def _wire_form(records: memoryview, count: int, head: int) -> bytes:
    """So many strings of one size, each with its length instead of its head."""
    size = len(records) // count - head
    length = size.to_bytes(LENGTH_BYTES, "little")
    if count == 1:
        return length + records[head:]
    found = np.empty((count, LENGTH_BYTES + size), np.uint8)
    found[:, :LENGTH_BYTES] = np.frombuffer(length, np.uint8)
    found[:, LENGTH_BYTES:] = np.frombuffer(records, np.uint8).reshape(count, -1)[:, head:]
    return found.tobytes()


def _add(found: dict[str, Buffer], name: str, chunk: Buffer) -> None:
    """Put a chunk behind those before it; an only one stays a view."""
    known = found.setdefault(name, chunk)
    if isinstance(known, bytearray):
        known += chunk
    elif known is not chunk:
        found[name] = bytearray(known) + chunk


def _data(name: str, packed: Buffer) -> Buffer:
    if name in FIXED:
        if len(packed) % FIXED[name]:
            raise DecodeError(f"{name} has {len(packed)} bytes")
        return packed
    if name == STRINGS:
        return packed
    dtype = UNSIGNED[name]
    return b"".join([part.astype(dtype).tobytes() for part in _varints(memoryview(packed))])


def _span(view: memoryview, at: int, kind: int) -> tuple[int, int]:
    """Where the value of a field begins and ends."""
    if kind == LENGTH_DELIMITED:
        size, at = read_varint(view, at)
        return at, at + size
    if kind == VARINT:
        return at, read_varint(view, at)[1]
    if kind in (FIXED_32, FIXED_64):
        return at, at + (4 if kind == FIXED_32 else 8)
    raise DecodeError(f"a field has the wire type {kind}")


def _varints(packed: memoryview) -> Iterator[npt.NDArray[np.uint64]]:
    at = 0
    while at < len(packed):
        window: Any = np.frombuffer(packed[at : at + WINDOW_BYTES], np.uint8)
        ends = np.flatnonzero(window < 0x80)
        if not ends.size:
            raise DecodeError("a varint is cut short")
        starts = np.concatenate(([0], ends[:-1] + 1))
        lengths = ends - starts + 1
        if lengths.max() > LONGEST_VARINT:
            raise DecodeError("a varint is too long")
        yield _values(window, starts, lengths)
        at += int(ends[-1]) + 1


def _values(window: Any, starts: Any, lengths: Any) -> npt.NDArray[np.uint64]:
    found: npt.NDArray[np.uint64] = (window[starts] & 0x7F).astype(np.uint64)
    for more in range(1, int(lengths.max())):
        longer = lengths > more
        bits = (window[starts[longer] + more] & 0x7F).astype(np.uint64)
        found[longer] |= bits << np.uint64(7 * more)
    return found
