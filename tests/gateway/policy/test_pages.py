"""Pages in browsers: their origins, the types of their bodies, the names that they use."""

from collections.abc import Sequence

import pytest

from gateway.policy.pages import BINARY, JSON, read_origins, unfit_type, unknown_name

HOST = ("host", "localhost:8000")
FOREIGN = ("origin", "https://app.example")


@pytest.mark.parametrize(
    ("text", "origin"),
    [
        ("https://app.example", "https://app.example"),
        ("HTTPS://App.Example:8443", "https://app.example:8443"),
        ("https://app.example:443", "https://app.example"),
        ("http://app.example:80", "http://app.example"),
        ("http://app.example:443", "http://app.example:443"),
        ("http://[::1]:3000", "http://[::1]:3000"),
        ("http://10.0.0.5", "http://10.0.0.5"),
        ("tauri://localhost", "tauri://localhost"),
        ("chrome-extension://abc", "chrome-extension://abc"),
        ("*", "*"),
    ],
)
def test_an_origin_is_read_as_browsers_send_it(text: str, origin: str) -> None:
    assert read_origins([text], with_keys=False) == {origin}


@pytest.mark.parametrize(
    "text",
    [
        *("", "null", "app.example", "app.example:80", "//app.example", "https://"),
        *("https://app.example/", "https://app.example/path", "https://app.example?x"),
        *("https://u@app.example", "https://a.example,https://b.example", "https://*.example"),
        *("https://app.example:", "https://app.example:x", "https://app.example:123456"),
        *("https://m\xfcnchen.example", " https://app.example", "https://app.example\n"),
    ],
)
def test_an_origin_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected SCHEME://HOST"):
        read_origins([text], with_keys=False)


def test_all_origins_are_refused_with_api_keys() -> None:
    assert read_origins(["https://a.example"], with_keys=True) == {"https://a.example"}
    with pytest.raises(ValueError, match=r"with --api-keys or --jwt-jwks name each origin"):
        read_origins(["https://a.example", "*"], with_keys=True)


def refusal(*types: str, page: tuple[str, str] = FOREIGN) -> str | None:
    given = [("content-type", each) for each in types]
    return unfit_type([HOST, page, *given], [JSON])


@pytest.mark.parametrize(
    "given",
    [
        *("application/json", "Application/JSON", " application/json ; charset=utf-8"),
        *("application/ld+json", "application/vnd.api+JSON;version=1"),
    ],
)
def test_a_page_of_another_origin_sends_json(given: str) -> None:
    assert refusal(given) is None
    assert refusal(given, given) is None


@pytest.mark.parametrize(
    "given",
    [
        *("text/plain", "text/plain;charset=UTF-8", "text/plain;application/json", ""),
        *("application/x-www-form-urlencoded", "multipart/form-data; boundary=x+json"),
        *("text/plain, application/json", "application/octet-stream", "json"),
    ],
)
def test_a_type_that_browsers_send_without_a_preflight_is_refused(given: str) -> None:
    expected = "expected the content-type application/json from a page of another origin, found"
    shown = f"{expected} '{given}'; Origin 'https://app.example'"
    assert refusal(given) == shown
    assert refusal("application/json", given)
    assert refusal(given, "application/json")


def test_a_body_without_a_type_is_refused() -> None:
    """A script that sends bytes gives them no type, and its browser asks nothing."""
    assert "found none; Origin" in (refusal() or "")


def test_binary_tensors_are_taken_where_they_are_expected() -> None:
    headers = [HOST, FOREIGN, ("content-type", BINARY)]
    assert unfit_type(headers, [JSON, BINARY]) is None
    assert "json or application/octet-stream from" in (unfit_type([FOREIGN], [BINARY, JSON]) or "")


@pytest.mark.parametrize(
    "page", [("origin", "http://localhost:8000"), ("accept", "*/*"), ("sec-fetch-site", "none")]
)
def test_programs_and_pages_of_the_server_send_any_type(page: tuple[str, str]) -> None:
    assert refusal("text/plain", page=page) is None
    assert refusal(page=page) is None


@pytest.mark.parametrize(
    "page",
    [
        *(("origin", "null"), ("origin", ""), ("origin", "https://localhost:8000/path")),
        ("sec-fetch-site", "cross-site"),
    ],
)
def test_a_page_without_a_usual_origin_is_another_one(page: tuple[str, str]) -> None:
    assert refusal("text/plain", page=page)
    assert refusal("application/json", page=page) is None


def test_one_foreign_origin_of_two_is_enough() -> None:
    headers = [HOST, ("origin", "http://localhost:8000"), FOREIGN]
    assert unfit_type(headers, [JSON])


def test_long_values_are_shown_short() -> None:
    text = refusal("text/plain" + "x" * 60_000, page=("origin", "h" * 60_000)) or ""
    assert len(text) < 300


PAGE = "evil.example:8000"


def name_refusal(
    host: str = PAGE,
    origin: str | None = None,
    *,
    address: str = "127.0.0.1",
    hosts: Sequence[str] = (),
    more: Sequence[tuple[str, str]] = (),
) -> str | None:
    page = ("origin", f"http://{host}" if origin is None else origin)
    return unknown_name(address, 8000, [("host", host), page, *more], hosts)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "::ffff:127.0.0.1"])
@pytest.mark.parametrize("host", [PAGE, "Evil.Example:8000", "evil.example.:8000"])
def test_a_page_that_bound_its_name_to_this_machine_is_refused(address: str, host: str) -> None:
    text = name_refusal(host, address=address) or ""
    assert text.startswith(
        f"pages of this machine are answered under its own names, found Host '{host.lower()}'"
    )


def test_it_cannot_name_a_proxy() -> None:
    """A script may set this header."""
    assert name_refusal(more=[("x-forwarded-for", "10.0.0.5")])


@pytest.mark.parametrize(
    "host",
    [
        *("localhost:8000", "app.localhost:8000", "127.0.0.1:8000", "10.0.0.5:8000"),
        *("[::1]:8000", "gateway:8000", "gateway.example:8000", "Gateway.Example:8000"),
        *("localhost.:8000", "gateway.example.:8000"),
    ],
)
def test_a_name_of_this_machine_is_none_of_another_site(host: str) -> None:
    assert name_refusal(host, hosts=["gateway.example"]) is None


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("llm.example", "https://llm.example"),
        ("llm.example", "http://llm.example"),
        ("llm.example:8443", "https://llm.example:8443"),
        ("llm.example:8000", "https://llm.example:8000"),
        ("localhost:8000", "https://llm.example"),
        ("evil.example:8000", "http://other.example:8000"),
        ("evil.example:80000000000000000000", "http://evil.example:80000000000000000000"),
        ("evil.example/x:8000", "http://evil.example/x:8000"),
    ],
)
def test_a_page_behind_a_proxy_on_this_machine_is_answered(host: str, origin: str) -> None:
    """It has the port of the proxy, or its scheme."""
    assert name_refusal(host, origin) is None


@pytest.mark.parametrize("address", ["10.0.0.5", ""])
def test_a_page_that_reached_another_address_is_answered(address: str) -> None:
    assert name_refusal(address=address) is None


def test_port_80_needs_no_mention() -> None:
    headers = [("host", "evil.example"), ("origin", "http://evil.example")]
    assert unknown_name("127.0.0.1", 80, headers, [])
    assert unknown_name("127.0.0.1", 8080, headers, []) is None


def test_two_hosts_or_two_origins_are_no_single_name() -> None:
    other = "http://other.example:8000"
    assert name_refusal(more=[("host", "other.example:8000")]) is None
    assert name_refusal(more=[("origin", other)]) is None
