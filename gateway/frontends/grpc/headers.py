"""Headers of gRPC over HTTP/2: checks, deadlines, metadata, text of a status."""

import base64
import binascii
import re
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import quote

from gateway.frontends.grpc.rpc import Metadata, RpcError, StatusCode

TIMEOUT = re.compile(rb"([0-9]{1,8})([HMSmun])")
SECS = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}

POST = "POST"
CONTENT_TYPES = (b"application/grpc", b"application/grpc+proto")
CONTENT_TYPE = re.compile(rb"application/grpc([+;].*)?", re.IGNORECASE)
"""Accepted content types; as in grpcio the suffix does not select the message format."""

SHOWN_CHARS = 32
NO_TRAILERS = "the request has no 'te: trailers': something on the way may not pass on trailers"
DEADLINE = "grpc-timeout"
DEADLINE_PASSED = "Deadline Exceeded"
"""The text of gRPC's own server, and so of Triton."""

OWN = frozenset({b"te", b"content-type", b"content-length", b"host"})
OWN_PREFIX = b"grpc-"
"""Headers of the protocol, which are not metadata."""

BINARY = "-bin"
PRINTABLE = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")
"""Characters of `grpc-message` without percent-encoding."""


class NotGrpc(RpcError):
    """A request that is not gRPC, answered with an HTTP status for other clients."""

    def __init__(self, http_status: int, status: StatusCode, details: str) -> None:
        super().__init__(status, details)
        self.http_status = http_status


def require_grpc(request: Any) -> None:
    """Raise NotGrpc for a request that is not gRPC, RpcError for invalid headers.

    The request has `method`, `path` and `headers` of httpunk. Source: gRPC over HTTP/2, "Requests";
    the gRPC statuses are those of gRPC for Go.
    """
    headers = request.headers
    if request.method != POST:
        shown = (request.method or "missing")[:SHOWN_CHARS]
        raise NotGrpc(405, StatusCode.INTERNAL, f"the HTTP method is {shown}, expected {POST}")
    if request.path is None:
        raise NotGrpc(400, StatusCode.INTERNAL, "the request has no ':path'")
    if headers.get("content-type") not in CONTENT_TYPES:
        _require_content_type(headers.get("content-type", b""))
    if "te" not in headers:
        raise RpcError(StatusCode.INTERNAL, NO_TRAILERS)
    if BINARY in " ".join(headers.keys()):
        read_metadata(headers.raw_items())


def _require_content_type(found: bytes) -> None:
    if CONTENT_TYPE.fullmatch(found) is None:
        shown = found[:SHOWN_CHARS].decode("latin-1")
        raise NotGrpc(
            415,
            StatusCode.INVALID_ARGUMENT,
            f"'content-type' is '{shown}', expected application/grpc",
        )


def timeout_secs(value: bytes) -> float:
    """The seconds of a `grpc-timeout`; RpcError if it is invalid or zero."""
    found = TIMEOUT.fullmatch(value)
    if found is None:
        shown = value[:SHOWN_CHARS].decode("latin-1")
        raise RpcError(StatusCode.INTERNAL, f"'grpc-timeout' is '{shown}', expected such as '100m'")
    secs = int(found[1]) * SECS[found[2]]
    if not secs:
        raise RpcError(StatusCode.DEADLINE_EXCEEDED, DEADLINE_PASSED)
    return secs


def read_metadata(headers: Iterable[tuple[bytes, bytes]]) -> Metadata:
    """The metadata among the headers of a request; RpcError for invalid base64."""
    return [
        pair
        for name, value in headers
        if name not in OWN and not name.startswith(OWN_PREFIX)
        for pair in _values(name.decode("latin-1"), value)
    ]


def _values(name: str, value: bytes) -> Iterator[tuple[str, str | bytes]]:
    if not name.endswith(BINARY):
        yield name, _text(value)
        return
    for each in value.split(b","):
        try:
            yield name, base64.b64decode(each + b"=" * (-len(each) % 4), validate=True)
        except binascii.Error:
            shown = name[:SHOWN_CHARS]
            raise RpcError(StatusCode.INTERNAL, f"metadata '{shown}' is not in base64") from None


def _text(value: bytes) -> str:
    """A value as UTF-8, else as Latin-1; as grpcio reads metadata."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def written_metadata(metadata: Metadata) -> Iterator[tuple[str, str]]:
    """The headers of metadata."""
    for name, value in metadata:
        text = value if isinstance(value, str) else base64.b64encode(value).decode().rstrip("=")
        yield name, text


def written_details(details: str) -> str:
    """The value of `grpc-message`, percent-encoded UTF-8."""
    return quote(details, safe=PRINTABLE, errors="replace")
