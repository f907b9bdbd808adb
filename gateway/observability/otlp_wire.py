"""Messages of OTLP as bytes (opentelemetry-proto, trace.proto), written without the generated ones.

The generated classes, and those of the SDK in front of them, take six times as long, under the
interpreter lock that the event loop needs.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from struct import Struct
from typing import Any, NamedTuple

fixed64 = Struct("<Q").pack
fixed32 = Struct("<I").pack
double = Struct("<d").pack

OF_BYTES = 2
"""The kind of a field with a length (Protocol Buffers, encoding)."""
INTERNAL, SERVER, CLIENT = 1, 2, 3
"""Kinds of spans."""
HAS_IS_REMOTE, IS_REMOTE, SAMPLED = 0x100, 0x200, 1
BETWEEN = b"\x30%c\x39%b\x41%b"
"""The fields of the kind and of both times."""
FLAGS = tuple(b"\x85\x01" + fixed32(HAS_IS_REMOTE | remote | SAMPLED) for remote in (0, IS_REMOTE))
FAILED = b"\x7a\x02\x18\x02"
"""The status of a span with an error."""
MOST_UNSIGNED = (1 << 64) - 1


class WireSpan(NamedTuple):
    """A span: ids as numbers, times in nanoseconds of the epoch."""

    name: str
    trace_id: int
    span_id: int
    parent_id: int
    start_ns: int
    end_ns: int
    kind: int = SERVER
    state: str = ""
    is_parent_remote: bool = False
    is_failed: bool = False


def span_message(
    span: WireSpan,
    attributes: Mapping[str, Any],
    events: Iterable[tuple[str, int]],
    offset_ns: int = 0,
) -> bytes:
    """The message `Span`; all times are `offset_ns` before those of the epoch."""
    name, trace_id, span_id, parent_id, start_ns, end_ns, kind, state, is_remote, is_failed = span
    parts = [
        b"\x0a\x10%b\x12\x08%b" % (trace_id.to_bytes(16, "big"), span_id.to_bytes(8, "big")),
        _name(name),
        BETWEEN % (kind, fixed64(start_ns + offset_ns), fixed64(end_ns + offset_ns)),
        FLAGS[is_remote],
    ]
    if state:
        parts.append(_text(3, state))
    if parent_id:
        parts.append(b"\x22\x08%b" % parent_id.to_bytes(8, "big"))
    for each, value in attributes.items():
        parts.append(field(9, attribute(each, value)))
    for each, ns in events:
        parts.append(_event(each) % fixed64(ns + offset_ns))
    if is_failed:
        parts.append(FAILED)
    return b"".join(parts)


def export_message(resource: Mapping[str, Any], scope: str, spans: Sequence[bytes]) -> bytes:
    """The message `ExportTraceServiceRequest` with spans of one resource and one scope."""
    about = b"".join([field(1, attribute(name, value)) for name, value in resource.items()])
    scoped = field(1, _text(1, scope)) + b"".join([field(2, each) for each in spans])
    return field(1, field(1, about) + field(2, scoped))


def attribute(name: str, value: Any) -> bytes:
    """The message `KeyValue` of a truth, a number, a text, or a sequence of them."""
    return _key(name) + field(2, _any_value(value))


def _any_value(value: Any) -> bytes:
    if isinstance(value, str):
        return _text(1, value)
    if isinstance(value, bool):
        return b"\x10\x01" if value else b"\x10\x00"
    if isinstance(value, int):
        return b"\x18" + varint(value & MOST_UNSIGNED)
    if isinstance(value, float):
        return b"\x21" + double(value)
    return field(5, b"".join([field(1, _any_value(each)) for each in value]))


def field(number: int, payload: bytes) -> bytes:
    """A field of bytes with a number below 16."""
    size = len(payload)
    if size < 0x80:
        return b"%c%c%b" % (number << 3 | OF_BYTES, size, payload)
    return b"%c%b%b" % (number << 3 | OF_BYTES, varint(size), payload)


def varint(value: int) -> bytes:
    """A number of at most 64 bits, seven bits in each byte."""
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def _text(number: int, text: str) -> bytes:
    return field(number, text.encode(errors="replace"))


@lru_cache(1024)
def _key(name: str) -> bytes:
    return _text(1, name)


@lru_cache(1024)
def _name(name: str) -> bytes:
    return _text(5, name)


@lru_cache(256)
def _event(name: str) -> bytes:
    """An event with `%b` in place of its time."""
    text = _text(2, name)
    begin = field(11, b"\x09" + fixed64(0) + text)[: -len(text) - 8]
    return begin.replace(b"%", b"%%") + b"%b" + text.replace(b"%", b"%%")
