"""Messages of OTLP as bytes (opentelemetry-proto, trace.proto), written without the generated ones.

The generated classes, and those of the SDK in front of them, take six times as long, under the
interpreter lock that the event loop needs.
"""

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum, auto
from functools import lru_cache
from struct import Struct
from typing import Any

from gateway.observability.escaping import replaced
from gateway.tensor import Buffer

fixed64 = Struct("<Q").pack
fixed32 = Struct("<I").pack
double = Struct("<d").pack

OF_BYTES = 2
"""The kind of a field with a length (Protocol Buffers, encoding)."""
INTERNAL, SERVER, CLIENT = 1, 2, 3
"""Kinds of spans."""
HAS_IS_REMOTE, IS_REMOTE, SAMPLED = 0x100, 0x200, 1
FLAGS = tuple(b"\x85\x01" + fixed32(HAS_IS_REMOTE | remote | SAMPLED) for remote in (0, IS_REMOTE))
FAILED = b"\x7a\x02\x18\x02"
"""The status of a span with an error."""
TRACE_ID, SPAN_ID, PARENT_ID = b"\x0a\x10", b"\x12\x08", b"\x22\x08"
START, END = b"\x39", b"\x41"
"""The fields of a span, but for its events, whose values differ and are of one size."""
SPANS = 2
"""The field of a span in the message `ScopeSpans`."""
MOST_UNSIGNED = (1 << 64) - 1


class Parent(Enum):
    """The parent of a span."""

    NONE = auto()
    LOCAL = auto()
    REMOTE = auto()


class SpanForm:
    """The bytes that spans with one name, kind, and row of events have in common.

    They are packed with the ids and the times of each: a third of the time of an encoder that
    writes field by field. Fields of a message may have any order. `fixed` are further fields, and
    `more_size` is the size of those that differ, if all have one size.
    """

    __slots__ = ("_begin", "_template", "pieces", "size")

    def __init__(
        self,
        name: str,
        events: Sequence[str] = (),
        *,
        kind: int = SERVER,
        parent: Parent = Parent.LOCAL,
        fixed: bytes = b"",
        more_size: int = 0,
    ) -> None:
        common = _text(5, name) + b"\x30%c" % kind + FLAGS[parent is Parent.REMOTE] + fixed
        ids = [(TRACE_ID, b"", "16s"), (SPAN_ID, b"", "8s"), (PARENT_ID, b"", "8s")]
        times = [(START, b"", "Q"), (END, b"", "Q"), *[(*_event(each), "Q") for each in events]]
        pieces = []
        for before, behind, code in (*ids[: 2 + (parent is not Parent.NONE)], *times):
            pieces.append((common + before, code))
            common = behind
        pieces += [(common, f"{more_size}s"), (b"", "")] if more_size else [(common, "")]
        size = _size(pieces)
        begin = _begin(SPANS, size)
        self._begin, self.size = len(begin), len(begin) + size
        self.pieces = [(begin + pieces[0][0], pieces[0][1]), *pieces[1:]]
        self._template = ByteTemplate(self.pieces)

    def message(self, values: Sequence[bytes | int], more: bytes = b"") -> bytes:
        """A span as field `spans` of `ScopeSpans`, with `more` fields at its end.

        `values` are the id of its trace, its own and that of its parent, if it has one, then its
        start, its end, and the times of its events, in nanoseconds of the epoch.
        """
        found = self._template.pack(values)
        if not more:
            return found
        size = self.size - self._begin + len(more)
        return b"".join((_begin(SPANS, size), found[self._begin :], more))


class SpanRow:
    """Spans that are packed at once: half the time of one after another.

    `fields` are the offset and the code of each value in the bytes of all its spans.
    """

    __slots__ = ("_parts", "_template", "fields")

    def __init__(self, forms: Sequence[SpanForm]) -> None:
        pieces, common, end = [], b"", 0
        self.fields: list[tuple[int, str]] = []
        self._parts = []
        for form in forms:
            self._parts.append(slice(end, end + form.size))
            end += form.size
            for constant, code in form.pieces[:-1]:
                pieces.append((common + constant, code))
                common = b""
            common = form.pieces[-1][0]
        self._template = ByteTemplate([*pieces, (common, "")])
        offset = 0
        for constant, code in pieces:
            offset += len(constant)
            self.fields.append((offset, code))
            offset += Struct(f"<{code}").size

    def messages(self, values: Sequence[bytes | int]) -> list[bytes]:
        """The spans as of `SpanForm.message`, with the values of each, and its `more`, in turn."""
        found = self._template.pack(values)
        return [found[part] for part in self._parts]


class ByteTemplate:
    """Constant bytes with a value behind each but the last one; codes are those of `struct`."""

    __slots__ = ("_arguments", "_pack")

    def __init__(self, pieces: Sequence[tuple[bytes, str]]) -> None:
        codes = "".join([f"{len(constant)}s{code}" for constant, code in pieces])
        self._pack = Struct(f"<{codes}").pack
        self._arguments: list[Any] = [None] * (2 * len(pieces) - 1)
        self._arguments[::2] = [constant for constant, _ in pieces]

    def pack(self, values: Sequence[bytes | int]) -> bytes:
        """The bytes with these values."""
        arguments = self._arguments.copy()
        arguments[1::2] = values
        return self._pack(*arguments)


def _size(pieces: Iterable[tuple[bytes, str]]) -> int:
    return sum([len(constant) + Struct(f"<{code}").size for constant, code in pieces])


def events(names: Sequence[str], times: Iterable[int]) -> bytes:
    """The fields `events` of a span, with times in nanoseconds of the epoch."""
    pieces = [(*_event(name), ns) for name, ns in zip(names, times, strict=True)]
    return b"".join([b"%b%b%b" % (before, fixed64(ns), behind) for before, behind, ns in pieces])


def trace_state(text: str) -> bytes:
    """The field `trace_state` of a span; nothing if it is empty."""
    return _text(3, text) if text else b""


def attributes(found: Mapping[str, Any]) -> bytes:
    """The fields `attributes` of a span."""
    return b"".join([field(9, attribute(name, value)) for name, value in found.items()])


def numbered(name: str, number: int) -> bytes:
    """As `attributes` of one number, which is close to those of the calls before."""
    high = number >> 7
    return _numbered(name, high) % (number & 0x7F | 0x80 if high else number)


@lru_cache(64)
def _numbered(name: str, high: int) -> bytes:
    """An attribute with `%c` in place of the first byte of its number; `high` is the rest."""
    rest = varint(high) if high else b""
    number = b"\x18\x00" + rest
    found = field(9, _key(name) + field(2, number))[: -len(number)]
    return (found + b"\x18").replace(b"%", b"%%") + b"%c" + rest.replace(b"%", b"%%")


class ExportForm:
    """The bytes that all messages `ExportTraceServiceRequest` of one server have in common."""

    def __init__(self, resource: Mapping[str, Any], scope: str) -> None:
        about = b"".join([field(1, attribute(name, value)) for name, value in resource.items()])
        self._resource = field(1, about)
        self._scope = field(1, _text(1, scope))

    def message(self, spans: Sequence[Buffer]) -> bytes:
        """The message with spans of the resource and the scope, one or many in each piece."""
        size = len(self._scope) + sum(map(len, spans))
        scoped = _begin(2, size)
        begin = _begin(1, len(self._resource) + len(scoped) + size)
        return b"".join((begin, self._resource, scoped, self._scope, *spans))


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
    return _begin(number, len(payload)) + payload


@lru_cache(1024)
def _begin(number: int, size: int) -> bytes:
    """The bytes in front of the payload of a field of bytes."""
    return b"%c%b" % (number << 3 | OF_BYTES, varint(size))


def varint(value: int) -> bytes:
    """A number of at most 64 bits, seven bits in each byte."""
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def _text(number: int, text: str) -> bytes:
    found = text.encode(errors="replace")
    return field(number, found if text.isprintable() else replaced(found.decode()).encode())


@lru_cache(1024)
def _key(name: str) -> bytes:
    return _text(1, name)


@lru_cache(64)
def _event(name: str) -> tuple[bytes, bytes]:
    """The bytes of an event in front of its time, and those behind it."""
    text = _text(2, name)
    found = field(11, b"\x09" + fixed64(0) + text)
    return found[: -len(text) - 8], text
