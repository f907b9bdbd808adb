"""Large JSON texts, parsed in parts, so that no call holds the interpreter lock for long.

Marks replace large arrays and long strings; the rest is parsed as any other text.
"""

import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import orjson

from gateway.errors import Code, InferenceError
from gateway.frontends.http.json_layout import WINDOW_BYTES, Layout, Span

SLICED_BYTES = 1 << 18
"""Texts up to this size are parsed at once."""
PIECE_BYTES = 1 << 18
MOST_LISTED = 1 << 20
"""Values of a large array that becomes a list."""

CHARACTERS = re.compile(
    rb"(?:[^\\]++|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4}"
    rb"|\\u(?![dD][89abAB])[0-9a-fA-F]{4}|\\[^u])*+"
)
"""Whole characters of a string, with both halves of surrogate pairs."""

Where = Callable[[int], int]
"""Maps an offset in a part of a text to the offset in the whole text."""
Parse = Callable[[bytes, Where], Any]
"""Parses a part of a text; InferenceError has the reason and the offset."""
Put = Callable[[dict[str, Any], str, Any], object]
"""Adds a member to an object; it decides whether the first or last of one name counts."""


class LongString:
    """A string as pieces of UTF-8 of at most PIECE_BYTES each."""

    __slots__ = ("pieces",)

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = pieces

    def encode(self, encoding: str = "utf-8", errors: str = "strict") -> bytes:
        """Its UTF-8; the arguments, those of `str.encode`, are ignored."""
        return b"".join(self.pieces)

    def text(self) -> str:
        """The string itself."""
        return self.encode().decode("utf-8", "surrogatepass")


class LargeArray:
    """An array that is parsed part by part when it is read."""

    __slots__ = ("_span", "_text")

    def __init__(self, text: "LargeText", span: Span) -> None:
        self._text = text
        self._span = span

    def parts(self) -> Iterator[list[Any]]:
        """Its values in order; a nested array that is cut in two is in both parts.

        Long strings remain LongString.
        """
        start, opened = self._span.start, 0
        for at, left_open in self._span.cuts:
            yield self._part(start, at, opened, left_open)
            start, opened = at + 1, left_open
        yield self._part(start, self._span.end, opened, 0)

    def whole(self) -> list[Any]:
        """All values; INVALID_ARG beyond MOST_LISTED values, or for a very large one."""
        if any(left_open > 1 for _, left_open in self._span.cuts):
            raise InferenceError(
                Code.INVALID_ARG,
                "an array of the request JSON, which is no tensor data, has an element of more "
                f"than {WINDOW_BYTES} bytes",
            )
        found: list[Any] = []
        for part in self.parts():
            found += plain(part)
            if len(found) > MOST_LISTED:
                raise InferenceError(
                    Code.INVALID_ARG,
                    f"an array of the request JSON has more than {MOST_LISTED} values",
                )
        return found

    def check(self) -> None:
        """Parse it for its errors alone."""
        for _ in self.parts():
            pass

    def _part(self, start: int, end: int, opened: int, left_open: int) -> list[Any]:
        # A value on each side of a cut keeps an extra comma an error.
        before = b"[" * opened + b"0," if opened else b""
        after = b",0" + b"]" * left_open if left_open else b""
        found: list[Any] = self._text.part(start, end, before, after)
        if opened:
            _drop(found, 0)
        if left_open:
            _drop(found, -1)
        return found


def _drop(values: list[Any], end: int) -> None:
    """Drop the first or last value, in nested arrays too."""
    while type(values[end]) is list:
        values = values[end]
    del values[end]


def plain(value: Any) -> Any:
    """The value with lists for LargeArray and strings for LongString, changed in place."""
    return _replaced(value, {LongString, LargeArray}, _plain, dict.__setitem__)


def _plain(value: Any) -> Any:
    if type(value) is LongString:
        return value.text()
    return value.whole() if type(value) is LargeArray else value


def _replaced(value: Any, kinds: set[type], replace: Callable[[Any], Any], put: Put) -> Any:
    """The value with `replace` applied to names and to values of these types, changed in place.

    Without recursion, since JSON may be nested deeper than Python's stack.
    """
    taken = kinds | {dict, list}
    root = [value]
    nodes: list[Any] = [root]

    def replaced(value: Any) -> Any:
        if type(value) is dict or type(value) is list:
            nodes.append(value)
            return value
        return replace(value)

    while nodes:
        node = nodes.pop()
        if type(node) is dict:
            items = list(node.items())
            node.clear()
            for key, each in items:
                put(node, _plain(replace(key)), replaced(each))
        elif not taken.isdisjoint(map(type, node)):
            node[:] = map(replaced, node)
    return root[0]


class LargeText:
    """A text with its layout. `parse` parses parts of it, `put` adds a member to an object."""

    def __init__(self, body: memoryview, layout: Layout, parse: Parse, put: Put) -> None:
        self._body = body
        self._parse = parse
        self._put = put
        self._mark = f"\x7f{secrets.token_hex(16)}:"
        self._values: dict[str, LongString | LargeArray] = {}
        self._arrays = layout.arrays
        self._strings = layout.strings

    def parsed(self, parse: Parse) -> Any:
        """The value of the text; `parse` parses it with marks for large values."""
        spans = sorted([*self._arrays, *_outside(self._strings, self._arrays)])
        text, where = self._marked(0, len(self._body), spans)
        try:
            return self._resolved(parse(text, where))
        finally:
            self._values.clear()  # arrays refer to this object: a cycle with the whole body

    def part(self, start: int, end: int, before: bytes, after: bytes) -> Any:
        """A part of an array, with these bytes before and after it."""
        spans = [each for each in self._strings if start <= each.start < end]
        text, where = self._marked(start, end, spans)
        found = self._parse(before + text + after, lambda at: where(max(at - len(before), 0)))
        return self._resolved(found) if spans else found

    def _marked(self, start: int, end: int, spans: Sequence[Span]) -> tuple[bytes, Where]:
        """A part of the text with marks for these values."""
        pieces: list[bytes] = []
        moved, size, at = [(0, start)], 0, start
        for span in spans:
            mark = f"{self._mark}{len(self._values)}"
            self._values[mark] = self._value(span)
            pieces += (bytes(self._body[at : span.start]), orjson.dumps(mark))
            size += len(pieces[-2]) + len(pieces[-1])
            at = span.end
            moved.append((size, at))
        pieces.append(bytes(self._body[at:end]))

        def where(found: int) -> int:
            known, place = max(each for each in moved if each[0] <= found)
            return place + found - known

        return b"".join(pieces), where

    def _value(self, span: Span) -> LongString | LargeArray:
        if self._body[span.start] == ord("["):
            return LargeArray(self, span)
        return LongString(list(self._pieces(span)))

    def _pieces(self, span: Span) -> Iterator[bytes]:
        """The UTF-8 of a string; the span has its quotes."""
        at, end = span.start + 1, span.end - 1
        while at < end:
            piece = bytes(self._body[at : min(at + PIECE_BYTES, end)])
            piece = _characters(piece) or bytes(self._body[at:end])
            text: str = self._parse(b'"%b"' % piece, partial(_add, at - 1))
            yield text.encode("utf-8", "surrogatepass")
            at += len(piece)

    def _resolved(self, value: Any) -> Any:
        """The value without marks, changed in place."""
        return _replaced(value, {str}, self._unmarked, self._put)

    def _unmarked(self, value: Any) -> Any:
        return self._values.get(value, value) if type(value) is str else value


def _add(start: int, found: int) -> int:
    return start + found


def _outside(strings: Sequence[Span], arrays: Sequence[Span]) -> Iterator[Span]:
    """The strings outside of all arrays; both are in the order of the text."""
    following = iter(arrays)
    array = next(following, None)
    for each in strings:
        while array is not None and array.end <= each.start:
            array = next(following, None)
        if array is None or each.start < array.start:
            yield each


def _characters(piece: bytes) -> bytes:
    """The whole characters at the beginning of a piece of a string."""
    if b"\\" in piece:
        found = CHARACTERS.match(piece)
        piece = found[0] if found is not None else b""
    end = len(piece)
    while end and piece[end - 1] & 0xC0 == 0x80:
        end -= 1
    # The first byte of the last character has its length.
    first = piece[end - 1] if end else 0
    length = 1 if first < 0xC0 else 2 if first < 0xE0 else 3 if first < 0xF0 else 4
    return piece if len(piece) - end + 1 >= length else piece[: end - 1]
