"""Headers and metadata are the same behind the JSON that carries them."""

import pytest

from gateway.processes.frames import headed, read_headed
from gateway.processes.messages import Pairs, byte_pairs, read, text_pairs, written

EVERY_BYTE = bytes(range(256))


def carried(pairs: Pairs) -> Pairs:
    """What comes out of a frame that such pairs were put into."""
    found: Pairs = read_headed(headed(pairs))[0]
    return found


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"content-type", b"application/json")],
        [(b"x", b""), (b"x", b"twice"), (b"x", b"")],
        [(b"x-name", "café".encode()), (b"x-latin", b"caf\xe9")],
        [(EVERY_BYTE, EVERY_BYTE)],
    ],
)
def test_headers_keep_every_byte_and_their_order(headers: list[tuple[bytes, bytes]]) -> None:
    assert byte_pairs(carried(text_pairs(headers))) == headers


@pytest.mark.parametrize(
    "metadata",
    [
        [],
        [("x-request", "1"), ("x-request", "2")],
        [("trace-bin", EVERY_BYTE), ("empty-bin", b"")],
        [("name", "café \N{SNOWMAN}"), ("latin", "\x80\xff"), ("empty", "")],
    ],
)
def test_metadata_is_text_or_bytes_as_its_name_says(
    metadata: list[tuple[str, str | bytes]],
) -> None:
    assert read(carried(written(metadata))) == metadata


def test_bytes_that_happen_to_be_text_are_bytes_again() -> None:
    assert read(carried(written([("trace-bin", b"text")]))) == [("trace-bin", b"text")]
