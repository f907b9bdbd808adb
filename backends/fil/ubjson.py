"""Checks that a file of UBJSON is whole: on a part of one XGBoost may hang."""

import struct

JSON_BEGIN = b"{"
"""UBJSON begins with it, too."""
UBJSON_SIZES = {b"i": 1, b"U": 1, b"C": 1, b"I": 2, b"l": 4, b"d": 4, b"L": 8, b"D": 8}
UBJSON_INTEGERS = {b"i": ">b", b"U": ">B", b"I": ">h", b"l": ">i", b"L": ">q"}
UBJSON_CONSTANTS = b"TFZN"
ENDS = {b"{": b"}", b"[": b"]"}
UNCOUNTED = -1


def is_ubjson(data: bytes) -> bool:
    """Whether a file that begins with `{` is UBJSON: a length follows instead of a name."""
    return data[:1] == JSON_BEGIN and data[1:2] in UBJSON_INTEGERS


def require_whole_ubjson(data: bytes) -> None:
    """Raise ValueError if the values of a file in UBJSON do not end within it."""
    try:
        _Walk(data).over_all()
    except (struct.error, IndexError, KeyError):
        raise ValueError("the values of UBJSON do not end within the file") from None


class _Walk:
    """A position that moves over values; arrays of one type are passed at once."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0
        self._open: list[tuple[bytes, int]] = []
        """The containers around the position: their marks, and the values left, or UNCOUNTED."""

    def over_all(self) -> None:
        self._value()
        while self._open:
            mark, left = self._open.pop()
            if left == 0:
                continue
            if left == UNCOUNTED and self._peek() == ENDS[mark]:
                self._skip(1)
                continue
            self._open.append((mark, left if left == UNCOUNTED else left - 1))
            if mark == JSON_BEGIN:
                self._skip(self._length())  # the name
            self._value()

    def _value(self) -> None:
        kind = self._take()
        if kind in ENDS:
            self._container(kind)
        elif kind == b"S":
            self._skip(self._length())
        elif kind not in UBJSON_CONSTANTS:
            self._skip(UBJSON_SIZES[kind])

    def _container(self, mark: bytes) -> None:
        after = self._peek()
        if after == b"$":
            self._skip(1)
            size = UBJSON_SIZES[self._take()]
            if self._take() != b"#":
                raise KeyError("#")
            self._skip(self._length() * size)
        elif after == b"#":
            self._skip(1)
            self._open.append((mark, self._length()))
        else:
            self._open.append((mark, UNCOUNTED))

    def _length(self) -> int:
        kind = self._take()
        (length,) = struct.unpack_from(UBJSON_INTEGERS[kind], self._data, self._at)
        self._skip(UBJSON_SIZES[kind])
        if length < 0:
            raise IndexError(length)
        return int(length)

    def _peek(self) -> bytes:
        if self._at >= len(self._data):
            raise IndexError(self._at)
        return self._data[self._at : self._at + 1]

    def _take(self) -> bytes:
        found = self._peek()
        self._at += 1
        return found

    def _skip(self, count: int) -> None:
        self._at += count
        if self._at > len(self._data):
            raise IndexError(self._at)
