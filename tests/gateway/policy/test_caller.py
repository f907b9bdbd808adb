"""The caller of a request: this machine, another one, or a page of another origin."""

import time
from collections.abc import Sequence

import pytest

from gateway.policy.caller import Caller, address_of, caller_of, is_this_machine, read_hosts

HOST = ("host", "localhost:8000")
LOCAL, REMOTE = Caller(local=True), Caller(local=False)


def called(
    *headers: tuple[str, str], address: str = "127.0.0.1", hosts: Sequence[str] = ()
) -> Caller:
    return caller_of(address, headers, hosts)


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("127.0.0.1", True),
        ("127.255.255.254", True),
        ("::1", True),
        ("0:0:0:0:0:0:0:1", True),
        ("::ffff:127.0.0.1", True),
        ("::FFFF:7f00:1", True),
        ("unix:", True),
        ("unix:/run/sluice", True),
        ("localhost", True),
        ("", False),
        ("10.0.0.5", False),
        ("128.0.0.1", False),
        ("126.255.255.255", False),
        ("0.0.0.0", False),
        ("::", False),
        ("::2", False),
        ("::ffff:10.0.0.5", False),
        ("::127.0.0.1", False),
        ("fe80::1%eth0", False),
        ("127.0.0.1.example", False),
        ("127.1", False),
        ("2130706433", False),
        ("localhost.example", False),
    ],
)
def test_this_machine_is_loopback_or_a_unix_socket(address: str, *, local: bool) -> None:
    assert is_this_machine(address) is local


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:127.0.0.1:4000", "127.0.0.1"),
        ("ipv6:[::1]:4000", "::1"),
        ("ipv6:%5B::1%5D:4000", "::1"),
        ("ipv6:[::ffff:10.0.0.5]:4000", "::ffff:10.0.0.5"),
        ("ipv6:%5Bfe80::1%25eth0%5D:4000", "fe80::1%eth0"),
        ("unix:", "unix:"),
        ("unix:/run/sluice", "unix:"),
        ("", ""),
        ("127.0.0.1:4000", ""),
        ("ipv4:", ""),
        ("vsock:1:2", ""),
    ],
)
def test_a_peer_of_grpc_has_an_address(peer: str, address: str) -> None:
    assert address_of(peer) == address


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "unix:"])
def test_a_program_of_this_machine_is_local(address: str) -> None:
    assert called(HOST, ("accept", "*/*"), address=address) == LOCAL


@pytest.mark.parametrize("address", ["10.0.0.5", "2001:db8::1", ""])
def test_another_address_is_not(address: str) -> None:
    assert called(HOST, address=address) == REMOTE


@pytest.mark.parametrize(
    "name",
    ["forwarded", "via", "x-real-ip", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto"],
)
@pytest.mark.parametrize("value", ["127.0.0.1", ""])
def test_a_client_behind_a_proxy_is_not_local(name: str, value: str) -> None:
    assert called(HOST, (name, value)) == REMOTE


def test_a_header_that_only_begins_like_one_of_a_proxy_changes_nothing() -> None:
    assert called(HOST, ("via-us", "1"), ("forwarded-by", "2"), ("x-forwarded", "3")) == LOCAL


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("localhost", True),
        ("localhost:8000", True),
        ("LocalHost:8000", True),
        ("localhost:", True),
        ("127.0.0.1:8000", True),
        ("127.9.9.9", True),
        ("[::1]:8000", True),
        ("[::1]", True),
        ("[::FFFF:127.0.0.1]:8000", True),
        ("", False),
        (":8000", False),
        ("evil.example", False),
        ("evil.example:8000", False),
        ("localhost.evil.example", False),
        ("evil.example/localhost", False),
        ("localhost/evil.example", False),
        ("evil@localhost", False),
        ("localhost@evil.example", False),
        ("localhost:8000@evil.example", False),
        ("localhost, evil.example", False),
        ("localhost:8000:8000", False),
        ("localhost:80a", False),
        (" localhost", False),
        ("::1", False),
        ("[::1", False),
        ("[evil.example]", False),
        ("10.0.0.5:8000", False),
        ("0.0.0.0:8000", False),
        ("unix:", False),
        ("unix:8000", False),
    ],
)
def test_a_local_one_names_this_machine(host: str, *, local: bool) -> None:
    assert called(("host", host)).local is local


def test_a_host_is_not_required() -> None:
    """HTTP/1.0 has none, and every browser sends it."""
    assert called() == LOCAL


def test_the_host_at_a_unix_socket_may_be_anything() -> None:
    assert called(("host", "run%2Fsluice"), address="unix:") == LOCAL
    assert called(("host", "run%2Fsluice"), ("via", "a"), address="unix:") == REMOTE


def test_each_of_several_hosts_names_this_machine() -> None:
    assert called(HOST, ("host", "127.0.0.1")) == LOCAL
    assert called(HOST, ("host", "evil.example")) == REMOTE
    assert called(("host", "evil.example"), HOST) == REMOTE


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("gateway.example", True),
        ("Gateway.Example:8000", True),
        ("10.0.0.5:8000", True),
        ("[fd00::2]:8000", True),
        ("localhost", True),
        ("other.example", False),
        ("a.gateway.example", False),
        ("", False),
    ],
)
def test_further_hosts_may_be_allowed(host: str, *, local: bool) -> None:
    hosts = read_hosts(["gateway.example, 10.0.0.5", "fd00::2"])
    assert called(("host", host), hosts=hosts).local is local


def test_an_allowed_host_does_not_make_another_machine_local() -> None:
    assert called(("host", "a.example"), address="10.0.0.5", hosts=["a.example"]) == REMOTE
    assert called(("host", "a.example"), ("via", "b"), hosts=["a.example"]) == REMOTE


OWN = [
    ("http://localhost:8000", "localhost:8000"),
    ("http://LOCALHOST:8000", "localhost:8000"),
    ("http://localhost:8000", "LocalHost:8000"),
    ("https://localhost", "localhost"),
    ("http://[::1]:8000", "[::1]:8000"),
]
FOREIGN = [
    ("null", "localhost:8000"),
    ("null", "null"),
    ("", "localhost:8000"),
    ("http://localhost:3000", "localhost:8000"),
    ("http://localhost", "localhost:8000"),
    ("http://127.0.0.1:8000", "localhost:8000"),
    ("https://evil.example", "localhost:8000"),
    ("http://localhost:8000.evil.example", "localhost:8000"),
    ("http://evil.example/localhost:8000", "localhost:8000"),
    ("http://localhost:8000 http://evil.example", "localhost:8000"),
    ("chrome-extension://abc", "localhost:8000"),
    ("localhost:8000", "localhost:8000"),
]


@pytest.mark.parametrize(("origin", "host"), OWN)
def test_the_origin_of_the_servers_own_page_is_the_host(origin: str, host: str) -> None:
    assert called(("host", host), ("origin", origin)) == LOCAL


@pytest.mark.parametrize(("origin", "host"), FOREIGN)
def test_the_page_of_another_origin_is_foreign_and_not_local(origin: str, host: str) -> None:
    expected = Caller(local=False, foreign=f"Origin '{origin}'")
    assert called(("host", host), ("origin", origin)) == expected
    assert called(("host", host), ("origin", origin), hosts=["evil.example"]) == expected


def test_one_foreign_origin_of_several_is_enough() -> None:
    own, foreign = ("origin", "http://localhost:8000"), ("origin", "http://evil.example")
    for origins in ((own, foreign), (foreign, own)):
        assert called(HOST, *origins).foreign == "Origin 'http://evil.example'"


def test_an_origin_is_foreign_without_a_host_and_with_two() -> None:
    origin = ("origin", "http://localhost:8000")
    assert called(origin).foreign
    assert called(HOST, ("host", "127.0.0.1"), origin).foreign
    assert not called(HOST, HOST, origin).foreign


def test_a_page_with_a_name_of_its_own_for_this_machine_is_not_local() -> None:
    """DNS rebinding: its origin is the host."""
    host, origin = ("host", "evil.example:8000"), ("origin", "http://evil.example:8000")
    assert called(host, origin) == REMOTE


@pytest.mark.parametrize(
    ("site", "foreign"),
    [
        ("same-origin", ""),
        ("none", ""),
        ("same-site", "Sec-Fetch-Site 'same-site'"),
        ("cross-site", "Sec-Fetch-Site 'cross-site'"),
        ("", "Sec-Fetch-Site ''"),
    ],
)
def test_the_browser_says_whether_the_page_is_the_servers_own(site: str, foreign: str) -> None:
    assert called(HOST, ("sec-fetch-site", site)) == Caller(not foreign, foreign)


def test_an_own_site_does_not_make_a_foreign_origin_own() -> None:
    origin = ("origin", "http://evil.example")
    assert called(HOST, ("sec-fetch-site", "same-origin"), origin).foreign


def test_the_shown_origin_is_short_and_printable() -> None:
    found = called(HOST, ("origin", "http://\x1b[31m\xfc\u202e\n" + "a" * 5000)).foreign
    assert found == "Origin '" + ("http://?[31m???" + "a" * 64)[:64] + "'"


@pytest.mark.parametrize(
    ("texts", "hosts"),
    [
        ([], set()),
        (["a"], {"a"}),
        (["A.example,b , 10.0.0.5", "C"], {"a.example", "b", "10.0.0.5", "c"}),
        (["[FD00::2],fd00::3"], {"fd00::2", "fd00::3"}),
    ],
)
def test_hosts_are_read_from_lists(texts: list[str], hosts: set[str]) -> None:
    assert read_hosts(texts) == hosts


@pytest.mark.parametrize(
    "text", ["", "a,", "a:80", "http://a", "a/b", "a b", "[a", "[::1]:80", "u@a", "[]"]
)
def test_a_host_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected the name or the address of a host"):
        read_hosts([text])


def test_a_caller_remains_permitted_until_its_credential_ends() -> None:
    infer, change = frozenset({"infer"}), frozenset({"admin"})
    for caller in (Caller(roles=infer), Caller(roles=infer, expires=time.time() + 60)):
        assert caller.remains_permitted(infer | change)
        assert not caller.remains_permitted(change)
        caller.valid = False
        assert not caller.remains_permitted(infer)
    assert not Caller(roles=infer, expires=time.time()).remains_permitted(infer)
