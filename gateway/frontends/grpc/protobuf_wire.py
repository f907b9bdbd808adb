"""Protobuf wire format of large fields, which protobuf would copy or convert slowly.

A message is the concatenation of its fields (protocol buffers encoding). So a large field can be
cut out before protobuf parses the rest, and a message can be joined from parts.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from gateway.protos import grpc_service_pb2 as pb
from gateway.tensor import LENGTH_BYTES, Buffer, Datatype, Runs

Message = tuple[pb.ModelInferRequest, Any]
"""A ModelInferRequest and its raw contents, which may be views of the received bytes."""

LENGTH_DELIMITED = 2
SMALL_BYTES = 64 * 1024
"""Size up to which protobuf parses on the event loop."""
LARGE_BYTES = 16384
"""Size from which large fields are cut out; below it copying is cheaper."""

MAX_FIELDS = 256
"""Maximum number of fields for cutting; protobuf is faster with more."""

MAX_SHIFT = 63
"""Bit offset of the last byte of a varint; protobuf handles longer ones."""


def _tag(message: type, field: str) -> int:
    number: int = message.DESCRIPTOR.fields_by_name[field].number  # type: ignore[attr-defined]
    return number << 3 | LENGTH_DELIMITED


INPUT = _tag(pb.ModelInferRequest, "inputs")
CONTENTS = _tag(pb.ModelInferRequest.InferInputTensor, "contents")
EMPTY_CONTENTS = bytes([CONTENTS, 0])
RAW_INPUT = _tag(pb.ModelInferRequest, "raw_input_contents")
RAW_OUTPUT = bytes([_tag(pb.ModelInferResponse, "raw_output_contents")])
INFER_RESPONSE = bytes([_tag(pb.ModelStreamInferResponse, "infer_response")])


def parse_request(data: bytes) -> Message:
    """A ModelInferRequest; large raw contents are views of `data`. Raises DecodeError."""
    split = _split(data) if len(data) >= LARGE_BYTES else None
    if split is None:
        message = pb.ModelInferRequest.FromString(data)
        return message, message.raw_input_contents
    rest, raw = split
    return pb.ModelInferRequest.FromString(rest), raw


class LargeMessage(NamedTuple):
    """A ModelInferRequest, its raw contents, and typed contents by index of input."""

    message: pb.ModelInferRequest
    raw: Sequence[Buffer]
    contents: Mapping[int, memoryview]


def parse_head(data: bytes) -> pb.ModelInferRequest | None:
    """A ModelInferRequest without its inputs, None if the rest is large; raises DecodeError."""
    kept: list[memoryview] = []
    size_bytes = 0
    try:
        for index, (tag, field, _) in enumerate(_fields(data)):
            if tag not in (INPUT, RAW_INPUT):
                kept.append(field)
                size_bytes += len(field)
            if index > MAX_FIELDS or size_bytes > SMALL_BYTES:
                return None
    except IndexError:
        return None
    return pb.ModelInferRequest.FromString(b"".join(kept))


def takes_long(data: bytes) -> bool:
    """Whether parsing a message would block the event loop; raw contents do not count."""
    split = _split(data)
    return split is None or len(split[0]) > SMALL_BYTES


def parse_large(data: bytes) -> LargeMessage:
    """As `parse_request`, but large typed contents are views of `data` too."""
    split = _split(data)
    if split is None:
        return LargeMessage(*parse_request(data), {})
    rest, raw = split
    contents: dict[int, memoryview] = {}
    kept = b"".join(_without_contents(rest, contents))
    return LargeMessage(pb.ModelInferRequest.FromString(kept), raw, contents)


def _without_contents(rest: bytes, contents: dict[int, memoryview]) -> Iterator[Buffer]:
    """The fields of a message; large typed contents are moved into `contents`."""
    index = 0
    for tag, field, start in _fields(rest):
        if tag == INPUT:
            found = _cut_out(field[start:])
            index += 1
            if found is not None:
                left, contents[index - 1] = found
                yield sized(bytes([INPUT]), len(left))
                yield left
                continue
        yield field


def _cut_out(tensor: memoryview) -> tuple[bytes, memoryview] | None:
    """An input without its typed contents, and these; None for a small input."""
    if len(tensor) < LARGE_BYTES:
        return None
    left: list[Buffer] = []
    contents: list[memoryview] = []
    try:
        for tag, field, start in _fields(tensor):
            if tag == CONTENTS:
                contents.append(field[start:])
            else:
                left.append(field)
    except IndexError:
        return None
    if len(contents) != 1:
        return None
    return b"".join([*left, EMPTY_CONTENTS]), contents[0]


def _fields(data: Buffer) -> Iterator[tuple[int, memoryview, int]]:
    """Each field: tag, bytes, and offset of the value in these bytes."""
    view, end, at = memoryview(data), len(data), 0
    while at < end:
        start = at
        tag, at = read_varint(data, at)
        size, at = read_varint(data, at)
        if tag & 7 != LENGTH_DELIMITED:
            raise IndexError(at)
        yield tag, view[start : at + size], at - start
        at += size
        if at > end:
            raise IndexError(at)


def _split(data: bytes) -> tuple[bytes, list[memoryview]] | None:
    """The message without its raw contents, and these; None if protobuf must parse all of it."""
    view, end, at = memoryview(data), len(data), 0
    rest: list[memoryview] = []
    raw: list[memoryview] = []
    try:
        while at < end:
            start = at
            tag, at = read_varint(data, at)
            size, at = read_varint(data, at)
            at += size
            if tag & 7 != LENGTH_DELIMITED or at > end or len(rest) + len(raw) > MAX_FIELDS:
                return None
            if tag == RAW_INPUT:
                raw.append(view[at - size : at])
            else:
                rest.append(view[start:at])
    except IndexError:
        return None
    return b"".join(rest), raw


def read_varint(data: Buffer, at: int) -> tuple[int, int]:
    """The varint at an offset, and the offset of its end; IndexError if it is invalid."""
    value = shift = 0
    while (byte := data[at]) & 0x80:
        if shift == MAX_SHIFT:
            raise IndexError(at)
        value |= (byte & 0x7F) << shift
        shift, at = shift + 7, at + 1
    return value | byte << shift, at + 1


def sized(tag: bytes, size: int) -> bytes:
    """The tag and the length before `size` bytes of a field."""
    found = bytearray(tag)
    while size > 0x7F:
        found.append(size & 0x7F | 0x80)
        size >>= 7
    found.append(size)
    return bytes(found)


FIELDS: dict[int, str] = {
    field.number: field.name for field in pb.InferTensorContents.DESCRIPTOR.fields
}
FIXED = {"fp32_contents": 4, "fp64_contents": 8}
"""Sizes of the elements of fields with a fixed size, in bytes."""
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
"""The significant bits of each varint; the others are cut off (protocol buffers encoding)."""


class TypedContents(NamedTuple):
    """The names of the populated fields, and the data if there is exactly one."""

    populated: list[str]
    data: Buffer = b""

    def as_datatype(self, datatype: Datatype, dtype: Any) -> Buffer:
        """The data in the layout of a datatype; numbers keep their lowest bytes."""
        (name,) = self.populated
        if name in FIXED or datatype is Datatype.BYTES:
            return self.data
        values: Any = np.frombuffer(self.data, UNSIGNED[name])
        found = values != 0 if datatype is Datatype.BOOL else values.astype(dtype, copy=False)
        return memoryview(found).cast("B") if found.size else b""


def read_contents(view: memoryview) -> TypedContents:
    """Parse InferTensorContents with numpy, without an object per element; thread-safe.

    protobuf creates a Python object per element, and holds the interpreter lock meanwhile.
    Raises DecodeError.
    """
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
    """Strings of equal size, with the length of the BYTES format instead of their heads."""
    size = len(records) // count - head
    length = size.to_bytes(LENGTH_BYTES, "little")
    if count == 1:
        return length + records[head:]
    found = np.empty((count, LENGTH_BYTES + size), np.uint8)
    found[:, :LENGTH_BYTES] = np.frombuffer(length, np.uint8)
    found[:, LENGTH_BYTES:] = np.frombuffer(records, np.uint8).reshape(count, -1)[:, head:]
    return found.tobytes()


def _add(found: dict[str, Buffer], name: str, chunk: Buffer) -> None:
    """Append a chunk of a field; a single chunk stays a view."""
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
    """The start and the end of the value of a field."""
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
