"""A scope that has gone through a frame is the one that the listener made, but for its state."""

from typing import Any

import pytest
from starlette.requests import Request
from starlette.types import Scope

from gateway.frontends.http.asgi_extensions import HEADER_NAMES
from gateway.frontends.http.request_head import HeaderFilter
from gateway.processes.frames import headed, read_headed
from gateway.processes.scope import read_scope, written_scope

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


def carried(scope: Scope, state: dict[str, Any] | None = None) -> Scope:
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
    found = carried(scope)
    assert {**found, "state": None} == {**scope, "state": None}
    assert found["state"] == {HEADER_NAMES: scope["state"][HEADER_NAMES]}


def test_the_state_is_of_those_who_answer() -> None:
    state = {"watch": len}
    assert carried(listened(), state)["state"] == {"watch": len, HEADER_NAMES: NAMES}
    assert state == {"watch": len}


def test_headers_are_forwarded_by_the_names_that_the_client_wrote() -> None:
    found = HeaderFilter("x-name").of(carried(listened()))
    assert found == [("X-Name", "caf\xe9"), ("x-NAME", "again")]


def test_starlette_takes_it_for_a_scope() -> None:
    request = Request(carried(listened(client=None)))
    assert request.client is None
    assert request.query_params["a"] == "1"
    assert request.headers["x-name"] == "caf\xe9"


@pytest.mark.parametrize("whole", [True, False])
def test_the_head_says_whether_the_body_beside_it_is_whole(whole: bool) -> None:
    assert written_scope(listened(), whole=whole)["whole"] is whole
