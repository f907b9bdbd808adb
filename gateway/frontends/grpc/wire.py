"""Messages in bytes: what protobuf would copy is taken out of them, and put into them, by hand.

A message is the concatenation of its fields (protocol buffers encoding), so a large field can be
cut out of a message, and the rest parsed by protobuf; and a message can be put together of parts.
"""

from collections.abc import Sequence

from gateway.protos import grpc_service_pb2 as pb
from gateway.tensor import Buffer

Message = tuple[pb.ModelInferRequest, Sequence[Buffer]]
"""A ModelInferRequest and its raw contents, which may be views of what it was parsed from."""

LENGTH_DELIMITED = 2
LARGE_BYTES = 16384
"""Below, copying costs less than looking for what need not be copied."""

MAX_FIELDS = 256
"""A message of more fields than that is left to protobuf, which is faster with many."""

MAX_SHIFT = 63
"""Where the last byte of a varint begins; what goes on behind it is left to protobuf."""


def _tag(message: type, field: str) -> int:
    number: int = message.DESCRIPTOR.fields_by_name[field].number  # type: ignore[attr-defined]
    return number << 3 | LENGTH_DELIMITED


RAW_INPUT = _tag(pb.ModelInferRequest, "raw_input_contents")
RAW_OUTPUT = bytes([_tag(pb.ModelInferResponse, "raw_output_contents")])
INFER_RESPONSE = bytes([_tag(pb.ModelStreamInferResponse, "infer_response")])


def parse_request(data: bytes) -> Message:
    """A ModelInferRequest; large raw contents are views of `data`. DecodeError if it is none."""
    split = _split(data) if len(data) >= LARGE_BYTES else None
    if split is None:
        message = pb.ModelInferRequest.FromString(data)
        return message, message.raw_input_contents
    rest, raw = split
    return pb.ModelInferRequest.FromString(rest), raw


def _split(data: bytes) -> tuple[bytes, list[memoryview]] | None:
    """The message without its raw contents, and those; None for what protobuf should look at."""
    view, end, at = memoryview(data), len(data), 0
    rest: list[memoryview] = []
    raw: list[memoryview] = []
    try:
        while at < end:
            start = at
            tag, at = _read_varint(data, at)
            size, at = _read_varint(data, at)
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


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """The number that begins there, and where it ends; IndexError if it is cut or too long."""
    value = shift = 0
    while (byte := data[at]) & 0x80:
        if shift == MAX_SHIFT:
            raise IndexError(at)
        value |= (byte & 0x7F) << shift
        shift, at = shift + 7, at + 1
    return value | byte << shift, at + 1


def sized(tag: bytes, size: int) -> bytes:
    """What stands before `size` bytes of a field."""
    found = bytearray(tag)
    while size > 0x7F:
        found.append(size & 0x7F | 0x80)
        size >>= 7
    found.append(size)
    return bytes(found)
