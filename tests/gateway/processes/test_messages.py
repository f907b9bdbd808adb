"""Headers and metadata survive their encoding as JSON; numbers of kinds."""

from typing import Any

import pytest
from starlette.requests import Request
from starlette.types import Scope

from backends.vllm.engine_clients.messages import ClientKind
from gateway.frontends.http.request_scope import HEADER_NAMES, HeaderFilter
from gateway.processes.channel import OWN_KINDS, headed, read_headed
from gateway.processes.channel import FrameKind as Common
from gateway.processes.inference_calls import InferenceKind
from gateway.processes.messages import (
    FrontendKind,
    Pairs,
    byte_pairs,
    metadata_pairs,
    read_metadata,
    read_scope,
    text_pairs,
    written_scope,
)

EVERY_BYTE = bytes(range(256))


def carried(pairs: Pairs) -> Pairs:
    """Pairs after a frame has carried them."""
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
    assert read_metadata(carried(metadata_pairs(metadata))) == metadata


def test_bytes_that_happen_to_be_text_are_bytes_again() -> None:
    assert read_metadata(carried(metadata_pairs([("trace-bin", b"text")]))) == [
        ("trace-bin", b"text")
    ]


HEADERS = [(b"host", b"here"), (b"x-name", b"caf\xe9"), (b"x-name", b"again")]
NAMES = [b"Host", b"X-Name", b"x-NAME"]


def listened(**changes: Any) -> Scope:
    """A scope as a listener makes it."""
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/v2/models/café/infer",
        "raw_path": b"/v2/models/caf%C3%A9/infer",
        "query_string": b"a=1&b=%20",
        "root_path": "",
        "headers": HEADERS,
        "client": ("127.0.0.1", 40000),
        "server": ("::1", 8000),
        "state": {HEADER_NAMES: NAMES, "of the connection": object()},
    } | changes


def carried_scope(scope: Scope, state: dict[str, Any] | None = None) -> Scope:
    """The scope that comes out of a frame."""
    head, _ = read_headed(headed(written_scope(scope, whole=True)))
    return read_scope(head, state or {})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"client": None},
        {"server": None},
        {"client": None, "server": ("/run/sluice.sock", None)},
        {"query_string": b"caf\xe9=\xff\x80", "raw_path": b"/\xff%00", "path": "/\ufffd\0"},
        {"http_version": "1.0", "method": "GET", "root_path": "/below"},
        {"headers": [], "state": {HEADER_NAMES: []}},
    ],
)
def test_a_scope_is_the_same_behind_a_frame(changes: dict[str, Any]) -> None:
    scope = listened(**changes)
    found = carried_scope(scope)
    assert {**found, "state": None} == {**scope, "state": None}
    assert found["state"] == {HEADER_NAMES: scope["state"][HEADER_NAMES]}


def test_the_state_is_that_of_the_server() -> None:
    state = {"watch": len}
    assert carried_scope(listened(), state)["state"] == {"watch": len, HEADER_NAMES: NAMES}
    assert state == {"watch": len}


def test_headers_are_forwarded_by_the_names_that_the_client_wrote() -> None:
    found = HeaderFilter("x-name").of(carried_scope(listened()))
    assert found == [("X-Name", "caf\xe9"), ("x-NAME", "again")]


def test_starlette_accepts_the_scope() -> None:
    request = Request(carried_scope(listened(client=None)))
    assert request.client is None
    assert request.query_params["a"] == "1"
    assert request.headers["x-name"] == "caf\xe9"


@pytest.mark.parametrize("whole", [True, False])
def test_the_head_marks_a_complete_body(whole: bool) -> None:
    assert written_scope(listened(), whole=whole)["whole"] is whole


def numbers(kinds: type) -> dict[str, int]:
    """The kinds that a class adds, by name."""
    return {name: value for name, value in vars(kinds).items() if name.isupper()}


COMMON = numbers(Common) | numbers(InferenceKind)


@pytest.mark.parametrize("kinds", [FrontendKind, ClientKind])
def test_kinds_are_distinct_and_fit_into_their_byte(kinds: type) -> None:
    added = [numbers(each) for each in (Common, InferenceKind, kinds)]
    found = [number for each in added for number in each.values()]
    assert len(set(found)) == len(found)
    assert all(0 <= number < 256 for number in found)


@pytest.mark.parametrize(
    ("name", "number"), [*numbers(FrontendKind).items(), *numbers(ClientKind).items()]
)
def test_kinds_of_one_channel_begin_where_their_own_may(name: str, number: int) -> None:
    assert number >= OWN_KINDS, name


@pytest.mark.parametrize(("name", "number"), COMMON.items())
def test_kinds_of_all_channels_end_before(name: str, number: int) -> None:
    assert number < OWN_KINDS, name
