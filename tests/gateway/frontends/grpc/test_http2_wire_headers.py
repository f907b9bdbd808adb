"""Deadlines, metadata and the text of a status in headers of HTTP/2."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import unquote_to_bytes

import pytest
from httpunk import HeaderMap

from gateway.frontends.grpc.http2_wire import (
    NotGrpc,
    read_metadata,
    require_grpc,
    timeout_secs,
    written_details,
    written_metadata,
)
from gateway.frontends.grpc.status import RpcError, StatusCode

Headers = Sequence[tuple[str, str | bytes]]
USUAL: Headers = (("te", "trailers"), ("content-type", "application/grpc"))


@dataclass
class Request:
    """The head of a request."""

    method: str | None = "POST"
    path: str | None = "/service/Method"
    headers: HeaderMap = field(default_factory=lambda: HeaderMap(USUAL))


def typed(content_type: str | bytes) -> Request:
    return Request(headers=HeaderMap([USUAL[0], ("content-type", content_type)]))


def refused(request: Request) -> RpcError:
    with pytest.raises(RpcError) as caught:
        require_grpc(request)
    return caught.value


@pytest.mark.parametrize(
    ("value", "secs"),
    [
        (b"1H", 3600.0),
        (b"2M", 120.0),
        (b"10S", 10.0),
        (b"250m", 0.25),
        (b"5u", 5e-6),
        (b"7n", 7e-9),
        (b"99999999S", 99999999.0),
        (b"99999999H", 99999999 * 3600.0),
    ],
)
def test_a_timeout_has_a_number_and_a_unit(value: bytes, secs: float) -> None:
    assert timeout_secs(value) == pytest.approx(secs)


@pytest.mark.parametrize(
    "value",
    [
        *(b"", b"S", b"10", b"abc", b"1x", b"1s", b"1h", b"-1S", b"+1S", b"1.5S", b"1e3S", b"0x1S"),
        *(b" 1S", b"1S ", b"1 S", b"1S\n", b"1Sm", b"123456789S", b"00000001Sx", b"\xd9\xa1S"),
        b"9" * 10_000 + b"S",
    ],
)
def test_a_timeout_of_another_form_is_refused(value: bytes) -> None:
    with pytest.raises(RpcError) as caught:
        timeout_secs(value)
    assert caught.value.status is StatusCode.INTERNAL
    assert "expected such as '100m'" in caught.value.details
    assert len(caught.value.details) < 100


def test_a_timeout_has_at_most_eight_digits() -> None:
    for digits in range(1, 9):
        assert timeout_secs(b"1".zfill(digits) + b"S") == 1.0
    with pytest.raises(RpcError, match="'grpc-timeout' is '000000001S'"):
        timeout_secs(b"1".zfill(9) + b"S")


@pytest.mark.parametrize(
    "value", [b"0" * digits + unit for digits in (1, 8) for unit in (b"n", b"H")]
)
def test_a_deadline_that_has_passed_ends_the_rpc_before_it_begins(value: bytes) -> None:
    with pytest.raises(RpcError) as caught:
        timeout_secs(value)
    assert caught.value.status is StatusCode.DEADLINE_EXCEEDED


def test_binary_metadata_of_every_length_is_read_with_and_without_padding() -> None:
    for size in range(64):
        value = bytes(range(255, 255 - size, -1))
        padded = base64.b64encode(value)
        for written in {padded, padded.rstrip(b"=")}:
            assert read_metadata([(b"x-bin", written)]) == [("x-bin", value)], written


@pytest.mark.parametrize("value", [b"!!!", b"aaaaa", b"_-_-", b"a b=", b"aGVsbG8=x", b"a", b"\xff"])
def test_binary_metadata_that_is_no_base64_is_refused(value: bytes) -> None:
    with pytest.raises(RpcError, match="metadata 'x-bin' is not in base64") as caught:
        read_metadata([(b"x-bin", value)])
    assert caught.value.status is StatusCode.INTERNAL


def test_binary_metadata_may_hold_several_values() -> None:
    assert read_metadata([(b"x-bin", b"YQ,Yg==,")]) == [
        ("x-bin", b"a"),
        ("x-bin", b"b"),
        ("x-bin", b""),
    ]


def test_metadata_of_one_name_keeps_all_its_values_in_their_order() -> None:
    sent = [(b"a", b"2"), (b"b", b"x"), (b"a", b"1"), (b"a", b"2")]
    assert read_metadata(sent) == [("a", "2"), ("b", "x"), ("a", "1"), ("a", "2")]


def test_metadata_are_utf_8_or_latin_1() -> None:
    every = bytes(range(0x20, 0x100))
    [(_, text), (_, other)] = read_metadata([(b"x", "\xe4 \N{SNOWMAN}".encode()), (b"x", every)])
    assert text == "\xe4 \N{SNOWMAN}"
    assert isinstance(other, str)
    assert other.encode("latin-1") == every


def test_headers_of_the_protocol_are_not_metadata() -> None:
    own = [b"te", b"content-type", b"content-length", b"host", b"grpc-timeout", b"grpc-x-bin"]
    assert read_metadata([(name, b"!") for name in own]) == []


def test_metadata_that_is_written_can_be_read() -> None:
    sent = [("text", "a, b"), ("x-bin", bytes(range(256))), ("x-bin", b""), ("text", "")]
    written = [(name.encode(), value.encode()) for name, value in written_metadata(sent)]
    assert read_metadata(written) == sent
    assert not any(b"=" in value for _, value in written)


def test_details_are_printable_and_decode_unchanged() -> None:
    every = "".join(map(chr, range(0x300))) + "\u2028 \N{SNOWMAN} \U0001f600 100% %41"
    written = written_details(every)
    assert all(0x20 <= ord(char) <= 0x7E for char in written)
    assert unquote_to_bytes(written).decode() == every


def test_details_that_are_printable_stand_for_themselves() -> None:
    plain = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")
    assert written_details(plain) == plain
    assert written_details("50%") == "50%25"
    assert written_details("a\nb\xe4") == "a%0Ab%C3%A4"


def test_half_a_surrogate_pair_in_details_is_replaced() -> None:
    assert written_details("a\ud800b") == "a?b"


@pytest.mark.parametrize(
    "content_type",
    [
        *("application/grpc", "application/grpc+proto", "application/grpc+json"),
        *("application/grpc;charset=utf-8", "application/grpc+proto; q=1", "Application/GRPC"),
    ],
)
def test_content_types_of_grpc_are_served(content_type: str) -> None:
    require_grpc(typed(content_type))


@pytest.mark.parametrize(
    "content_type",
    ["text/plain", "", "application/json", "application/grpc-web", "application/grpcx", " "],
)
def test_other_content_types_are_refused_with_a_status_of_http(content_type: str) -> None:
    error = refused(typed(content_type))
    assert isinstance(error, NotGrpc)
    assert (error.http_status, error.status) == (415, StatusCode.INVALID_ARGUMENT)
    assert f"'content-type' is '{content_type}'" in error.details


def test_a_missing_content_type_is_refused() -> None:
    error = refused(Request(headers=HeaderMap([USUAL[0]])))
    assert isinstance(error, NotGrpc)
    assert error.http_status == 415


@pytest.mark.parametrize("method", ["GET", "PUT", "OPTIONS", "post", "X" * 1000, None])
def test_other_methods_of_http_are_refused(method: str | None) -> None:
    error = refused(Request(method=method))
    assert isinstance(error, NotGrpc)
    assert (error.http_status, error.status) == (405, StatusCode.INTERNAL)
    assert f"the HTTP method is {(method or 'missing')[:32]}" in error.details
    assert len(error.details) < 100


def test_a_request_without_a_path_is_refused() -> None:
    error = refused(Request(path=None))
    assert isinstance(error, NotGrpc)
    assert (error.http_status, error.status) == (400, StatusCode.INTERNAL)


def test_a_request_through_something_that_may_drop_trailers_is_refused() -> None:
    error = refused(Request(headers=HeaderMap([USUAL[1]])))
    assert not isinstance(error, NotGrpc)
    assert error.status is StatusCode.INTERNAL
    assert "'te: trailers'" in error.details


def test_binary_metadata_is_looked_at_before_the_method_is() -> None:
    require_grpc(Request(headers=HeaderMap([*USUAL, ("x-bin", "aGVsbG8")])))
    error = refused(Request(headers=HeaderMap([*USUAL, ("x-bin", "!!!")])))
    assert error.status is StatusCode.INTERNAL
