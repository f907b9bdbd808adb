"""URLs of key sets: https everywhere, http on this machine only."""

import re

import pytest

from gateway.policy.key_set_url import is_url, read_url


@pytest.mark.parametrize(
    ("text", "authority", "target"),
    [
        ("https://a.example", "a.example", "/"),
        ("https://a.example:8443/keys.json", "a.example:8443", "/keys.json"),
        ("HTTPS://A.example/keys?app=1#part", "a.example", "/keys?app=1"),
        ("http://localhost:80/k", "localhost", "/k"),
        ("http://127.0.0.1/k", "127.0.0.1", "/k"),
        ("http://[::1]:443/k", "[::1]:443", "/k"),
        ("https://a.example:80/k", "a.example:80", "/k"),
    ],
)
def test_a_url_has_a_host_and_a_target(text: str, authority: str, target: str) -> None:
    assert is_url(text)
    found = read_url(text)
    assert (found.authority, found.target) == (authority, target)
    assert found.is_secure is text.lower().startswith("https")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("http://a.example/k", "its scheme is http and its host 'a.example', expected https"),
        ("http://127.0.0.1.a.example/k", "its scheme is http"),
        ("http://0.0.0.0/k", "its scheme is http"),
        ("http://unix:/k", "its scheme is http"),
        ("file:///etc/passwd", "it is no URL"),
        ("file://a/etc/passwd", "its scheme is 'file', expected https"),
        ("ftp://a.example/k", "its scheme is 'ftp'"),
        ("https://", "it is no URL"),
        ("https://a.example:99999/k", "it is no URL: "),
        ("https://[::1/k", "it is no URL: "),
        (f"https://{'a' * 64}.example/k", "it is no URL: "),
        ("https://a..example/k", "it is no URL: "),
        ("https://a.example/k\r\nX: y", "it is no URL"),
        ("https://a.example/k y", "it is no URL"),
        ("https://caf\xe9.example/k", "it is no URL"),
        ("https://user:marker@a.example/k", "it has a user or a password"),
    ],
)
def test_another_url_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(reason)}") as refused:
        read_url(text)
    assert "marker" not in str(refused.value)


def test_a_path_is_no_url() -> None:
    assert not is_url("/etc/sluice/keys.json")
    assert not is_url("keys.json")


def test_a_query_is_never_shown() -> None:
    found = read_url("https://a.example/keys?secret=marker")
    assert str(found) == "https://a.example/keys"
    assert "marker" not in repr(found)
