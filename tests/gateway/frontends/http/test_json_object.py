"""The JSON of a request, as Triton's parser reads it."""

import math
import re
from typing import Any

import pytest

from gateway.errors import Code, InferenceError
from gateway.frontends.http.json_object import parse_json_object, parse_request


def test_a_body_is_a_json_object() -> None:
    assert parse_json_object(b' {"a": [1, "b"]} ') == {"a": [1, "b"]}


@pytest.mark.parametrize("body", [b"", b" ", b"\r\n"])
def test_an_empty_body_is_refused(body: bytes) -> None:
    with pytest.raises(InferenceError) as caught:
        parse_json_object(body)
    assert caught.value.code is Code.INTERNAL
    assert caught.value.message == (
        "failed to parse the request JSON buffer: The document is empty. at 0"
    )


@pytest.mark.parametrize("body", [b"{", b'{"a": 1,}', b'{"a": nope}', b"{a: 1}"])
def test_a_malformed_body_is_refused_with_the_reason_and_the_offset(body: bytes) -> None:
    with pytest.raises(InferenceError) as caught:
        parse_json_object(body)
    assert caught.value.code is Code.INTERNAL
    pattern = r"failed to parse the request JSON buffer: .+ at \d+"
    assert re.fullmatch(pattern, caught.value.message)


@pytest.mark.parametrize(
    ("body", "byte", "place"),
    [
        (b'{"a": "\xff\xfe"}', "ff", 7),
        (b'{"a": "\xc3\xa9\xe2\x82"}', "e2", 9),
        (b'{"a": "\xc0\x80"}', "c0", 7),
        (b'{"a": "\xed\xa0\x80"}', "ed", 7),
        (b'{"a": NaN, "b": "\xff"}', "ff", 17),
        (b'{"\xff": 1}', "ff", 2),
        (b"\xff{}", "ff", 0),
    ],
)
def test_a_body_that_is_not_utf8_is_refused_with_the_byte_and_its_place(
    body: bytes, byte: str, place: int
) -> None:
    for parse in (parse_json_object, parse_request):
        with pytest.raises(InferenceError) as caught:
            parse(body)
        assert caught.value.code is Code.INVALID_ARG
        assert caught.value.message == (
            f"failed to parse the request JSON buffer: found byte 0x{byte} at {place}, expected "
            "UTF-8; what is no text can be sent as binary data"
        )


@pytest.mark.parametrize(
    ("body", "place"),
    [
        (rb'{"a": "\ud800"}', 7),
        (rb'{"a": "\udc00x"}', 7),
        (rb'{"a": "\ud83dx"}', 7),
        (rb'{"\ud800": 1}', 2),
        (rb'{"b": NaN, "a": "\ud800"}', 17),
    ],
)
def test_half_a_surrogate_pair_is_refused(body: bytes, place: int) -> None:
    for parse in (parse_json_object, parse_request):
        with pytest.raises(InferenceError) as caught:
            parse(body)
        assert caught.value.code is Code.INVALID_ARG
        assert caught.value.message == (
            "failed to parse the request JSON buffer: The surrogate pair in string is invalid. "
            f"at {place}"
        )


def test_a_whole_surrogate_pair_is_one_character() -> None:
    for parse in (parse_json_object, parse_request):
        assert parse(rb'{"a": "\ud83d\ude00"}') == {"a": "\U0001f600"}


@pytest.mark.parametrize("body", [b'{"a":1}', b'{"a":NaN,"a":2,"b":":"}'])
def test_a_byte_order_mark_is_passed_over(body: bytes) -> None:
    for parse in (parse_json_object, parse_request):
        assert repr(parse(b"\xef\xbb\xbf" + body)) == repr(parse(body))


@pytest.mark.parametrize("body", [b"[]", b'"text"', b"1", b"null", b"true"])
def test_other_json_than_an_object_is_refused(body: bytes) -> None:
    with pytest.raises(InferenceError, match="non-object as object") as caught:
        parse_json_object(body)
    assert caught.value.code is Code.INTERNAL


def test_nesting_without_end_is_refused() -> None:
    with pytest.raises(InferenceError) as caught:
        parse_json_object(b'{"a":' + b"[" * 100_000)
    assert caught.value.code is Code.INTERNAL


# Numbers that JSON does not have.


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("Infinity", math.inf),
        ("-Infinity", -math.inf),
        ("Inf", math.inf),
        ("-Inf", -math.inf),
        ("NaN", math.nan),
        ("-NaN", math.nan),
    ],
)
def test_a_number_may_be_none_or_infinite(text: str, value: float) -> None:
    for parse in (parse_json_object, parse_request):
        found = parse(f'{{"name":"Inf, NaN \\" Inf","data":[1.5,{text}],"id":"é:"}}'.encode())
        assert found["data"] == pytest.approx([1.5, value], nan_ok=True)
        assert (found["name"], found["id"]) == ('Inf, NaN " Inf', "é:")


@pytest.mark.parametrize(
    "body",
    [
        b'{"data":[NaN,]}',
        b'{"data":[nan]}',
        b'{"data":[Inf',
        b'{"data":["Inf]}',
        b'{"data":[+Inf]}',
        b'{"data":[1NaN]}',
        b'{"data":[1-Inf]}',
        b'{"data":[1.NaN]}',
        b'{"data":[1eInf]}',
        b'{"data":[--NaN]}',
        b'{"data":[NaN, 1e999]}',
        b'{"data":["Inf' + b'\\"' * 100_000,
    ],
)
def test_the_literals_excuse_nothing_else(body: bytes) -> None:
    for parse in (parse_json_object, parse_request):
        with pytest.raises(InferenceError, match="failed to parse the request JSON") as caught:
            parse(body)
        assert caught.value.code is Code.INTERNAL


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("9223372036854775807", 2**63 - 1),
        ("18446744073709551615", 2**64 - 1),
        ("-9223372036854775808", -(2**63)),
        ("18446744073709551616", 2.0**64),
        ("-9223372036854775809", -(2.0**63)),
        ("1" * 100, float("1" * 100)),
        ("1.0", 1.0),
    ],
)
def test_an_integer_of_more_than_64_bits_is_a_double(text: str, value: float) -> None:
    quick = parse_request(b'{"data":[%b]}' % text.encode())
    patient = parse_request(b'{"data":[%b],"x":":"}' % text.encode())
    assert quick["data"] == patient["data"] == [value]
    assert type(quick["data"][0]) is type(patient["data"][0]) is type(value)


# Members of one name.


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"id":"a","id":"b"}', {"id": "a"}),
        ('{"parameters":{"k":1,"k":2}}', {"parameters": {"k": 1}}),
        (
            '{"inputs":[{"name":"a","name":"b","parameters":{"n":1,"n":2}}]}',
            {"inputs": [{"name": "a", "parameters": {"n": 1}}]},
        ),
        (
            '{"outputs":[{"name":"a","parameters":{"n":1,"n":2},"name":"b"}]}',
            {"outputs": [{"name": "a", "parameters": {"n": 1}}]},
        ),
        ('{"unknown":{"k":1,"k":2},"id":"::"}', {"unknown": {"k": 1}, "id": "::"}),
        (
            '{"inputs":[5,{"name":"a"}],"outputs":null}',
            {"inputs": [5, {"name": "a"}], "outputs": None},
        ),
    ],
)
def test_of_members_with_one_name_the_first_counts(text: str, found: dict[str, Any]) -> None:
    assert parse_request(text.encode()) == found


@pytest.mark.parametrize("depth", [2000, 100_000])
def test_a_request_nested_without_end_is_refused(depth: int) -> None:
    with pytest.raises(InferenceError) as caught:
        parse_request(b'{"x":' + b"[" * depth + b"]" * depth + b"}")
    assert caught.value.code is Code.INTERNAL


def test_members_of_one_name_are_not_looked_for_without_end() -> None:
    nested = b'{"x":' * 2 + b"[" * 1000 + b"]" * 1000 + b"}" * 2
    with pytest.raises(InferenceError, match="nested too deep") as caught:
        parse_request(nested)
    assert caught.value.code is Code.INTERNAL


@pytest.mark.parametrize("text", ["a:b", '\\":', "\\\\:", ":::"])
def test_colons_in_strings_are_no_members(text: str) -> None:
    body = f'{{"id":"{text}","inputs":[{{"name":"x","data":["{text}"]}}],"id":"second"}}'.encode()
    assert parse_request(body)["id"] == text.replace('\\"', '"').replace("\\\\", "\\")


@pytest.mark.parametrize("padding", [0, 300_000])
def test_json_nested_deeper_than_calls_may_be_is_read_at_any_size(padding: int) -> None:
    depth = 1000
    nested = '{"a":' * depth + "1" + "}" * depth
    found = parse_json_object(f'{{"pad":"{"x" * padding}","deep":{nested}}}'.encode())["deep"]
    for _ in range(depth):
        found = found["a"]
    assert found == 1
