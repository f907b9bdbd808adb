"""Bodies of infer requests: limits, and the end of their JSON (protocol: size limits)."""

import gzip
from collections.abc import Sequence

import pytest
from starlette.types import Message

from gateway.errors import Code, InferenceError
from gateway.frontends.http.body import HEADER_LENGTH, MAX_CHUNKS, header_length, read_infer_body
from gateway.threads import request_threads
from tests.builders import soon

LIMIT = 100
THREADS = request_threads()
JSON_TOO_LARGE = (
    "request JSON size of {} bytes exceeds the maximum allowed input size of 100 bytes. Use "
    "--http-max-input-size to increase the limit."
)
RAW_TOO_LARGE = (
    "Raw input has a byte_size ({} bytes) that exceeds the maximum allowed value of 100 bytes. "
    "Use --http-max-input-size to increase the limit."
)
DECOMPRESSED_TOO_LARGE = (
    "Decompressed data size exceeds the maximum allowed value of 100 bytes. Use "
    "--http-max-input-size to increase the limit."
)


class Upload:
    """A body that comes in chunks; `taken` counts those that have been read."""

    def __init__(self, *chunks: bytes, length: str | None = None, chunked: bool = False) -> None:
        self.taken = 0
        self._chunks: Sequence[bytes] = chunks or (b"",)
        self._headers = {HEADER_LENGTH: length.encode()} if length is not None else {}
        size = b"%d" % sum(map(len, chunks))
        self._headers.update(
            {b"transfer-encoding": b"chunked"} if chunked else {b"content-length": size}
        )

    async def receive(self) -> Message:
        self.taken += 1
        more = self.taken < len(self._chunks)
        return {"type": "http.request", "body": self._chunks[self.taken - 1], "more_body": more}

    async def read(self, encoding: str = "") -> tuple[bytes | None, bytes]:
        reading = read_infer_body(self.receive, self._headers, encoding, LIMIT, THREADS)
        header, rest = await soon(reading)
        assert rest.readonly
        return header, bytes(rest)

    async def refusal(self, encoding: str = "") -> str:
        with pytest.raises(InferenceError) as caught:
            await self.read(encoding)
        assert caught.value.code is Code.INVALID_ARG
        return caught.value.message


CHUNKED = pytest.mark.parametrize("chunked", [False, True])


@CHUNKED
async def test_a_body_without_the_header_is_json(chunked: bool) -> None:
    assert await Upload(b'{"a"', b":1}", chunked=chunked).read() == (b'{"a":1}', b"")


@CHUNKED
async def test_binary_data_follows_the_json(chunked: bool) -> None:
    assert await Upload(b"{}\1\2", length="2", chunked=chunked).read() == (b"{}", b"\1\2")
    assert await Upload(b"{", b"}\1", b"\2", length="2", chunked=chunked).read() == (
        b"{}",
        b"\1\2",
    )
    assert await Upload(b"{}", length="2", chunked=chunked).read() == (b"{}", b"")


@CHUNKED
async def test_a_body_without_json_is_raw(chunked: bool) -> None:
    assert await Upload(b"\1\2", length="0", chunked=chunked).read() == (None, b"\1\2")
    assert await Upload(chunked=chunked).read() == (None, b"")
    assert await Upload(length="0", chunked=chunked).read() == (None, b"")


@CHUNKED
async def test_json_has_a_limit_and_binary_data_has_none(chunked: bool) -> None:
    header = b"x" * LIMIT
    assert await Upload(header, chunked=chunked).read() == (header, b"")
    large = bytes(10 * LIMIT)
    assert await Upload(header, large, length="100", chunked=chunked).read() == (header, large)
    for length, size in ((None, 101), ("101", 101)):
        upload = Upload(header, b"x", b"never read", length=length, chunked=chunked)
        shown = size if chunked or length else 111
        assert await upload.refusal() == JSON_TOO_LARGE.format(shown)
        assert upload.taken < 3


@CHUNKED
async def test_raw_data_has_the_limit_too(chunked: bool) -> None:
    body = bytes(LIMIT)
    assert await Upload(body, length="0", chunked=chunked).read() == (None, body)
    upload = Upload(body, b"x", b"never read", length="0", chunked=chunked)
    assert await upload.refusal() == RAW_TOO_LARGE.format(101 if chunked else 111)
    assert upload.taken == (2 if chunked else 0)


@CHUNKED
@pytest.mark.parametrize("length", ["-1", "5", "2147483647", "-2147483648"])
async def test_the_json_ends_inside_the_body(length: str, chunked: bool) -> None:
    upload = Upload(b"{}\1\2", length=length, chunked=chunked)
    if chunked and int(length) > LIMIT:
        assert await upload.refusal() == JSON_TOO_LARGE.format(length)
        return
    assert await upload.refusal() == (
        f"inference header size should be in range (0, 4), got: {length}"
    )
    assert upload.taken == (1 if chunked else 0)


@pytest.mark.parametrize("length", ["abc", "", "1.5", "0x10", "1_0", "5 5", "--1", "٣"])
def test_the_length_of_the_json_is_a_number(length: str) -> None:
    value = length.encode().decode("latin-1")
    with pytest.raises(InferenceError) as caught:
        header_length({HEADER_LENGTH: length.encode()})
    assert (caught.value.code, caught.value.message) == (
        Code.INVALID_ARG,
        f"Unable to parse Inference-Header-Content-Length, got: {value}",
    )


@pytest.mark.parametrize("length", [str(2**31), str(-(2**31) - 1), "9" * 5000])
def test_the_length_of_the_json_has_32_bits(length: str) -> None:
    with pytest.raises(InferenceError) as caught:
        header_length({HEADER_LENGTH: length.encode()})
    assert caught.value.message == (
        "Unable to parse Inference-Header-Content-Length, value is out of range "
        f"[ -2147483648, 2147483647 ], got: {length}"
    )


@pytest.mark.parametrize(("text", "length"), [("12", 12), ("+12", 12), (" 7 ", 7), ("-3", -3)])
def test_the_length_of_the_json_may_have_a_sign(text: str, length: int) -> None:
    assert header_length({HEADER_LENGTH: text.encode()}) == length
    assert header_length({}) is None


# Compressed bodies.


@CHUNKED
async def test_the_length_of_the_json_is_that_of_the_decompressed_body(chunked: bool) -> None:
    body = gzip.compress(b"{}" + bytes(98))
    upload = Upload(body[:9], body[9:], length="2", chunked=chunked)
    assert await upload.read("gzip") == (b"{}", bytes(98))
    assert await Upload(body, length="101").refusal("gzip") == (
        "inference header size should be in range (0, 100), got: 101"
    )
    assert await Upload(gzip.compress(b""), chunked=chunked).read("gzip") == (None, b"")


@CHUNKED
@pytest.mark.parametrize("length", [None, "0", "2"])
async def test_a_decompressed_body_has_the_limit_as_a_whole(
    length: str | None, chunked: bool
) -> None:
    body = gzip.compress(bytes(101))
    assert await Upload(body, length=length, chunked=chunked).refusal("gzip") == (
        DECOMPRESSED_TOO_LARGE
    )


@CHUNKED
async def test_a_compressed_body_that_cannot_fit_is_not_read_to_its_end(chunked: bool) -> None:
    upload = Upload(*[b"x" * 1000] * 50, chunked=chunked)
    assert await upload.refusal("gzip") == DECOMPRESSED_TOO_LARGE
    assert upload.taken < 5


# Chunks.


async def test_only_a_chunked_body_has_a_limit_of_chunks() -> None:
    chunks = [b"{}", *[b"x"] * MAX_CHUNKS]
    assert len((await Upload(*chunks, length="2").read())[1]) == MAX_CHUNKS
    assert await Upload(*chunks, length="2", chunked=True).refusal() == (
        "Chunked request body exceeds maximum of 65536 non-empty chunks. Send fewer or larger "
        "HTTP chunks."
    )
