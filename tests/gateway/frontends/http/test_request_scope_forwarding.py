"""Headers that become parameters (protocol: header forwarding)."""

import pytest
from starlette.types import Scope

from gateway.frontends.http.request_scope import HEADER_NAMES, HeaderFilter

WRITTEN = [(b"X-Tenant", b"a"), (b"x-TENANT", b"b"), (b"Accept", b"\xe9")]
SCOPE: Scope = {
    "type": "http",
    "headers": [(name.lower(), value) for name, value in WRITTEN],
    "state": {HEADER_NAMES: [name for name, _ in WRITTEN]},
}


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("", []),
        ("^x-", [("X-Tenant", "a"), ("x-TENANT", "b")]),
        ("ten", [("X-Tenant", "a"), ("x-TENANT", "b")]),
        ("^TENANT", []),
        ("accept", [("Accept", "é")]),
        (".*", [("X-Tenant", "a"), ("x-TENANT", "b"), ("Accept", "é")]),
    ],
)
def test_headers_are_chosen_by_name_and_keep_it(pattern: str, found: list[tuple[str, str]]) -> None:
    assert list(HeaderFilter(pattern).of(SCOPE)) == found


def test_without_the_names_as_written_they_are_lower_case() -> None:
    scope = {"type": "http", "headers": SCOPE["headers"]}
    assert list(HeaderFilter("x-").of(scope)) == [("x-tenant", "a"), ("x-tenant", "b")]
