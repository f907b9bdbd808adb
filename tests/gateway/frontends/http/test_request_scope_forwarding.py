"""Headers that become parameters (protocol: header forwarding)."""

import pytest
from starlette.types import Scope

from gateway.frontends.http.request_scope import HEADER_NAMES, HeaderFilter
from gateway.policy.areas import Area
from gateway.policy.restrictions import Restriction

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


SECRETS = [
    *((b"Authorization", b"Bearer K"), (b"X-API-Key", b"K"), (b"Api-Key", b"K")),
    *((b"Cookie", b"k=K"), (b"Proxy-Authorization", b"K"), (b"Admin-Key", b"K")),
]


@pytest.mark.parametrize("written", [True, False])
def test_secrets_are_never_forwarded(written: bool) -> None:
    headers = [*SECRETS, *WRITTEN]
    state = {HEADER_NAMES: [name for name, _ in headers]} if written else {}
    scope = {"headers": [(name.lower(), value) for name, value in headers], "state": state}
    restrictions = {Area.LOGGING: Restriction.of("Admin-KEY", "K")}
    found = HeaderFilter(".*", restrictions).of(scope)
    assert [value for _, value in found] == ["a", "b", "é"]
