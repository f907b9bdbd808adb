"""How what stands before a body is written in JSON: names and values of headers, as text."""

from collections.abc import Iterable, Sequence

Pairs = Sequence[Sequence[str]]


def text_pairs(headers: Iterable[tuple[bytes, bytes]]) -> Pairs:
    """Headers of HTTP; each byte becomes a character."""
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]


def byte_pairs(pairs: Pairs) -> list[tuple[bytes, bytes]]:
    """The same headers again."""
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in pairs]


def writable(text: str) -> str:
    """A text without what is no character, as a name of a file may have it."""
    return text.encode("utf-8", "replace").decode()


def written(metadata: Iterable[tuple[str, str | bytes]]) -> Pairs:
    """Metadata of gRPC; of values that are bytes each byte becomes a character."""
    return [
        (name, writable(value) if isinstance(value, str) else value.decode("latin-1"))
        for name, value in metadata
    ]


def read(pairs: Pairs) -> list[tuple[str, str | bytes]]:
    """The same metadata again: values are bytes where the name ends in `-bin`."""
    return [
        (name, value.encode("latin-1") if name.endswith("-bin") else value) for name, value in pairs
    ]
