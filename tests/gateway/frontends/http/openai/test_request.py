"""Bodies of OpenAI's requests: members that are read, and refusals."""

import gzip
import zlib
from typing import Any

import orjson
import pytest
from starlette.requests import Request
from starlette.types import Message

from gateway.errors import Code, InferenceError
from gateway.frontends.http.large_json import SLICED_BYTES
from gateway.frontends.http.openai.request import MAX_PARTS, OpenAiRequest, read_request
from gateway.openai_contract import Endpoint, OpenAiRefusal
from gateway.threads import request_threads

LIMIT = 1000
THREADS = request_threads()
LARGE = 1 << 20


async def call(
    body: bytes,
    endpoint: Endpoint = Endpoint.CHAT,
    encoding: str | None = None,
    limit: int = LIMIT,
    type_: str | None = "application/json",
) -> OpenAiRequest:
    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    headers = [] if type_ is None else [(b"content-type", type_.encode())]
    if encoding is not None:
        headers.append((b"content-encoding", encoding.encode()))
    scope = {"type": "http", "headers": headers, "path": "/", "method": "POST"}
    return await read_request(Request(scope, receive), endpoint, limit, THREADS)


async def refusal(body: bytes, **options: Any) -> InferenceError:
    with pytest.raises(InferenceError) as caught:
        await call(body, **options)
    return caught.value


async def test_the_body_is_kept_as_it_came() -> None:
    body = b' {"model" : "m", "stream":true, "x":\n[1.0]} '
    found = await call(body)
    assert (found.body, found.model, found.stream) == ((body,), "m", True)
    assert (found.members["x"], found.endpoint) == ([1.0], Endpoint.CHAT)
    assert found.received_ns > 0


@pytest.mark.parametrize(
    "type_", ["application/json; charset=utf-8", "Application/JSON", "application/json ;x=y"]
)
async def test_json_may_be_declared_in_many_ways(type_: str) -> None:
    assert (await call(b'{"model":"m"}', type_=type_)).model == "m"


@pytest.mark.parametrize(
    "type_",
    [
        *(None, "", "text/plain", "text/plain;charset=UTF-8", "application/x-www-form-urlencoded"),
        *("multipart/form-data", "application/jsonl", "text/plain, application/json", "x" * 9000),
    ],
)
async def test_a_body_that_is_not_declared_as_json_is_refused_unread(type_: str | None) -> None:
    error = await refusal(b'{"model":"m"}', type_=type_)
    assert error.code is Code.INVALID_ARG
    assert error.message == (
        "Unsupported Media Type: Only 'application/json' is allowed, found content-type "
        f"'{(type_ or '')[:40]}'"
    )


async def test_of_members_with_one_name_the_last_counts() -> None:
    assert (await call(b'{"model":"a","model":"b"}')).model == "b"


@pytest.mark.parametrize("body", [b"{}", b'{"model":null,"stream":null}', b'{"model":""}'])
async def test_a_body_without_model_and_stream_has_defaults(body: bytes) -> None:
    found = await call(body)
    assert (found.model, found.stream) == ("", False)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the body is empty"),
        (b" \n", "the body is empty"),
        (b"{", "not valid JSON"),
        (b"{'a': 1}", "not valid JSON"),
        (b'{"a":"\xff"}', "not valid JSON"),
        (b'{"a":"\\ud800"}', "not valid JSON"),
        (b'{"a":NaN}', "not valid JSON"),
        (b"\xef\xbb\xbf{}", "not valid JSON"),
        (b'{"a":1}{"a":2}', "not valid JSON"),
        (b"[" * LIMIT, "not valid JSON"),
        (b"[]", "an object is expected"),
        (b'"text"', "an object is expected"),
        (b"null", "an object is expected"),
    ],
)
async def test_a_body_that_is_no_object_is_refused(body: bytes, message: str) -> None:
    error = await refusal(body)
    assert (error.code, message in error.message) == (Code.INVALID_ARG, True)


@pytest.mark.parametrize(
    ("member", "value", "message"),
    [
        ("model", 5, "`model` is no text"),
        ("model", ["m"], "`model` is no text"),
        ("stream", "true", '`stream` is "true", expected true or false'),
        ("stream", 1, "`stream` is 1, expected"),
        ("stream", [], "`stream` is [], expected"),
        ("stream", "x" * 500, '`stream` is "xxx'),
    ],
)
async def test_a_member_of_another_kind_is_refused_by_name(
    member: str, value: Any, message: str
) -> None:
    error = await refusal(orjson.dumps({member: value}))
    assert isinstance(error, OpenAiRefusal)
    assert error.message.startswith(message)
    assert len(error.message) < 100
    assert orjson.loads(error.body)["error"]["param"] == member


@pytest.mark.parametrize("endpoint", [Endpoint.EMBEDDINGS, Endpoint.SCORE, Endpoint.TOKENIZE])
async def test_stream_means_nothing_where_nothing_streams(endpoint: Endpoint) -> None:
    assert not (await call(b'{"stream":true}', endpoint)).stream
    assert not (await call(b'{"stream":"x"}', endpoint)).stream


@pytest.mark.parametrize("size", [LIMIT, LIMIT + 1])
async def test_a_body_may_be_as_large_as_the_limit(size: int) -> None:
    body = b'{"m":"%b"}' % (b"x" * (size - 8))
    if size == LIMIT:
        assert (await call(body)).body == (body,)
    else:
        assert f"size of {size} bytes exceeds" in (await refusal(body)).message


async def test_a_model_may_take_the_parsed_members_of_a_body_that_is_parsed_whole() -> None:
    small, large = b'{"x":[1]}', b'{"x":[%b]}' % b",".join([b"1"] * SLICED_BYTES)
    assert (await call(small)).body.take() == {"x": [1]}
    assert (await call(large, limit=LARGE)).body.take() is None


async def test_a_body_with_too_many_parts_is_refused_unparsed() -> None:
    def body(parts: int) -> bytes:
        return b'{"x":[%b]}' % b",".join([b"{}"] * (parts - 2))

    accepted = (await call(body(MAX_PARTS), limit=LARGE)).members["x"]
    assert sum(map(len, accepted.parts())) == MAX_PARTS - 2
    error = await refusal(body(MAX_PARTS + 1), limit=LARGE)
    assert error.code is Code.INVALID_ARG
    assert error.message == "the body has 262145 objects and lists, expected at most 262144"


@pytest.mark.parametrize(
    ("encoding", "compress"), [("gzip", gzip.compress), ("deflate", zlib.compress)]
)
async def test_a_compressed_body_is_read(encoding: str, compress: Any) -> None:
    found = await call(compress(b'{"model":"m"}'), encoding=encoding)
    assert (found.body, found.model) == ((b'{"model":"m"}',), "m")


@pytest.mark.parametrize("encoding", ["", "identity"])
async def test_identity_is_no_compression(encoding: str) -> None:
    assert (await call(b'{"model":"m"}', encoding=encoding)).model == "m"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (gzip.compress(b" " * (LIMIT + 1)), "Decompressed data size exceeds"),
        (b"x" * (3 * LIMIT), "Decompressed data size exceeds"),
        (b"{}", "failed to decompress"),
        (gzip.compress(b"{}")[:-4], "it ends before its end marker"),
        (gzip.compress(b"{}") + b"{}", "something follows its end marker"),
    ],
    ids=["bomb", "too large as it is", "not compressed", "cut short", "more behind it"],
)
async def test_a_compressed_body_has_the_same_limits(body: bytes, message: str) -> None:
    error = await refusal(body, encoding="gzip")
    assert (error.code, message in error.message) == (Code.INVALID_ARG, True)


async def test_another_encoding_is_not_supported() -> None:
    error = await refusal(b"{}", encoding="br")
    assert (error.code, "'br', expected one of gzip, deflate" in error.message) == (
        Code.UNSUPPORTED,
        True,
    )
