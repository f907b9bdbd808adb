"""Layout of a large JSON text: long strings, large arrays, and places to cut those.

numpy scans the text window by window and releases the interpreter lock.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gateway.errors import Code, InferenceError

WINDOW_BYTES = 1 << 16
LARGE_ARRAY = 4096
"""Bytes of an array that is parsed apart from the rest."""
LONG_STRING = 1 << 19
"""Bytes of a string that is parsed in pieces."""
MOST_VALUES = 1 << 20
"""Members, objects, arrays and values outside of large arrays, or in one part of a large array."""

QUOTE, BACKSLASH, BLANK = 0x22, b"\\", 0x20
OPEN_ARRAY, OPEN_OBJECT, CLOSE_ARRAY, CLOSE_OBJECT, COMMA, COLON = range(1, 7)
KINDS = np.zeros(256, np.uint8)
KINDS[list(b"[{]},:")] = range(1, 7)
STEPS = np.array([0, 1, 1, -1, -1, 0, 0], np.int8)

Ints = npt.NDArray[np.int64]
Kinds = npt.NDArray[np.uint8]


class Cut(NamedTuple):
    """A comma at which an array may be cut, and the number of nested arrays open there."""

    at: int
    open: int


class Span(NamedTuple):
    """A value in the text: offsets of its first byte and of the byte behind it; its cuts."""

    start: int
    end: int
    cuts: Sequence[Cut] = ()


@dataclass(slots=True)
class Layout:
    """`arrays` and `strings` in the order of the text; `colons` outside of both.

    `has_objects`: an array at that depth, large or small, has an object in it.
    """

    arrays: list[Span] = field(default_factory=list)
    strings: list[Span] = field(default_factory=list)
    colons: int = 0
    has_objects: bool = False


class _Events(NamedTuple):
    """Brackets, commas and colons of a window outside of strings, with the depth behind each."""

    at: Ints
    kind: Kinds
    depth: Ints


def scan(body: memoryview, depth: int, *, nested: bool) -> Layout:
    """The layout of a text, with the arrays at `depth` (the outermost object has depth 1).

    With `nested`, cuts may lie in nested arrays. If the text is not valid JSON, neither are the
    parts of its layout. INVALID_ARG beyond MOST_VALUES.
    """
    scanner = _Scanner(body, depth, nested=nested)
    at = 0
    while at < len(body):
        at = scanner.take(at)
    scanner.end(at)
    return scanner.found


class _Scanner:
    """Scans windows in order. `_start`: the offset of an open container at the depth of arrays."""

    def __init__(self, body: memoryview, depth: int, *, nested: bool) -> None:
        self.found = Layout()
        self._body = body
        self._depth = depth
        self._nested = nested
        self._level = 0
        self._string = -1
        self._start = -1
        self._is_array = False
        self._has_object = False
        self._cuts: list[Cut] = []
        self._values = 0
        self._in_part = 0

    def take(self, at: int) -> int:
        """Scan the window at that offset, and return the offset of the next one."""
        text = bytes(self._body[at : at + WINDOW_BYTES])
        if (len(text) - len(text.rstrip(BACKSLASH))) % 2:
            text = bytes(self._body[at : at + len(text) + 1])
        found = np.frombuffer(text, np.uint8)
        shown = _without_escapes(found) if BACKSLASH in text else found
        self._containers(self._events(shown, at))
        return at + len(text)

    def end(self, at: int) -> None:
        """Note the value that is open at the end: the rest is parsed for the error without it."""
        if self._level and self._string >= 0:
            self._end_string(self._string, at)
        if self._start >= 0:
            self._close(at)

    def _events(self, text: Kinds, at: int) -> _Events:
        quotes = np.flatnonzero(text == QUOTE)
        kinds = KINDS[text]
        if quotes.size or self._string >= 0:
            kinds[self._inside(text, at, quotes)] = 0
        found = np.flatnonzero(kinds)
        kind = kinds[found]
        depth = np.cumsum(STEPS[kind], dtype=np.int64) + self._level
        if depth.size:
            self._level = int(depth[-1])
        return _Events(found + at, kind, depth)

    def _inside(self, text: Kinds, at: int, quotes: Ints) -> npt.NDArray[np.bool_]:
        """A mask of the bytes in strings; notes a long string that ends."""
        begun = self._string
        marks = (text == QUOTE).view(np.uint8)
        inside = np.bitwise_xor.accumulate(marks) ^ np.uint8(begun >= 0)
        if begun >= 0 and quotes.size:
            self._end_string(begun, at + int(quotes[0]) + 1)
        if inside[-1]:
            self._string = at + int(quotes[-1]) if quotes.size else begun
        else:
            self._string = -1
        return inside.view(np.bool_)

    def _end_string(self, start: int, end: int) -> None:
        if end - start >= LONG_STRING:
            self.found.strings.append(Span(start, end))

    def _containers(self, events: _Events) -> None:
        """Note the arrays that end, and cut the one that remains open."""
        at, kind, depth = events
        begins = np.flatnonzero((depth == self._depth) & (kind <= OPEN_OBJECT))
        is_end = (kind >= CLOSE_ARRAY) & (kind <= CLOSE_OBJECT)
        ends = np.flatnonzero((depth == self._depth - 1) & is_end)
        if kind.size:
            self._count(events, begins)
        if self._start >= 0 and ends.size:
            self._close(int(at[ends[0]]) + 1)
            ends = ends[1:]
        self._whole(events, begins[: ends.size], ends[: begins.size])
        if begins.size > ends.size:
            last = begins[ends.size]
            self._open(int(at[last]), is_array=bool(kind[last] == OPEN_ARRAY))
        if self._start >= 0 and self._is_array:
            self._cut(events)

    def _count(self, events: _Events, begins: Ints) -> None:
        """Count values and colons outside of arrays."""
        _, kind, depth = events
        order = np.arange(kind.size)
        latest = np.searchsorted(begins, order, "right") - 1
        opened = kind[begins[latest]] if begins.size else kind
        in_array = np.where(latest >= 0, opened == OPEN_ARRAY, self._is_array)
        outside = (depth < self._depth) | ~in_array
        counted = outside & ((kind <= OPEN_OBJECT) | (kind == COMMA))
        self._add(int(np.count_nonzero(counted)))
        self.found.colons += int(np.count_nonzero(outside & (kind == COLON)))
        self.found.has_objects |= bool((~outside & (kind == OPEN_OBJECT)).any())

    def _whole(self, events: _Events, begins: Ints, ends: Ints) -> None:
        """Note the large arrays of this window, and count the values of small ones."""
        at, kind, _ = events
        arrays = kind[begins] == OPEN_ARRAY
        large = arrays & (at[ends] + 1 - at[begins] >= LARGE_ARRAY)
        for start, stop in zip(at[begins[large]], at[ends[large]], strict=True):
            self.found.arrays.append(Span(int(start), int(stop) + 1))
        small = arrays & ~large
        self._add(int((ends[small] - begins[small]).sum()))

    def _add(self, values: int) -> None:
        self._values += values
        if self._values > MOST_VALUES:
            raise _too_many("outside of large arrays")

    def _open(self, start: int, *, is_array: bool) -> None:
        self._start, self._is_array = start, is_array
        self._cuts, self._has_object, self._in_part = [], False, 0

    def _close(self, end: int) -> None:
        if self._is_array and end - self._start >= LARGE_ARRAY:
            self.found.arrays.append(Span(self._start, end, self._cuts))
        self._start, self._is_array = -1, False

    def _cut(self, events: _Events) -> None:
        """Cut the open array at its last comma in this window."""
        at, kind, depth = events
        own = slice(int(np.searchsorted(at, self._start)), None)
        at, kind, depth = at[own], kind[own], depth[own]
        self._has_object = self._has_object or bool((kind == OPEN_OBJECT).any())
        commas = np.flatnonzero((kind == COMMA) & (depth == self._depth))
        if not commas.size and self._nested and not self._has_object:
            commas = np.flatnonzero(kind == COMMA)
        if commas.size:
            last = commas[-1]
            self._cuts.append(Cut(int(at[last]), int(depth[last]) - self._depth + 1))
            self._in_part = kind.size - int(last)
        else:
            self._in_part += kind.size
        if self._in_part > MOST_VALUES:
            raise _too_many("in one element of an array")


def _without_escapes(text: Kinds) -> Kinds:
    """The text with a blank for each escaped byte."""
    others = np.flatnonzero(text != BACKSLASH[0])
    shown = text.copy()
    shown[others[np.diff(others, prepend=-1) % 2 == 0]] = BLANK
    return shown


def _too_many(where: str) -> InferenceError:
    return InferenceError(
        Code.INVALID_ARG,
        f"the request JSON has too many values {where}, expected at most {MOST_VALUES}",
    )
