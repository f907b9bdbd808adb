"""Identities of clients: one name of a certificate, with its kind."""

import ssl
from pathlib import Path
from typing import Any

import pytest

from gateway.policy.certificates import identity, identity_of, normal
from tests.certificates import Authority


@pytest.mark.parametrize(
    ("uris", "names", "common_names", "expected"),
    [
        (["spiffe://prod/a", "spiffe://prod/b"], ["a.example"], ["a"], "URI:spiffe://prod/a"),
        ([], ["A.Example", "b.example"], ["a"], "DNS:a.example"),
        ([], [], ["Ana", "Bob"], "CN:Ana"),
        ([], [], ["URI:spiffe://prod/a"], "CN:URI:spiffe://prod/a"),
        ([], [], ["DNS:A"], "CN:DNS:A"),
        (["Spiffe://Prod/A"], [], [], "URI:Spiffe://Prod/A"),
        ([], [], [], ""),
        ([""], ["", "a"], ["b"], "DNS:a"),
        ([], [], [""], ""),
    ],
)
def test_the_first_kind_of_name_that_a_certificate_has_identifies_it(
    uris: list[str], names: list[str], common_names: list[str], expected: str
) -> None:
    assert identity(uris, names, common_names) == expected


@pytest.mark.parametrize(
    ("name", "expected"), [("DNS:A.Example", "DNS:a.example"), ("CN:A", "CN:A"), ("URI:A", "URI:A")]
)
def test_names_of_hosts_have_no_case(name: str, expected: str) -> None:
    assert normal(name) == expected


def test_a_certificate_whose_names_are_no_text_has_no_identity() -> None:
    class Session:
        def getpeercert(self) -> object:
            return b"\xff".decode()

    assert identity_of(Session()) == ""


def session_of(server: ssl.SSLContext, client: ssl.SSLContext) -> Any:
    """The server's end of a session, without a socket."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = server.wrap_bio(to_server, to_client, server_side=True)
    theirs = client.wrap_bio(to_client, to_server, server_hostname="localhost")
    for each in (theirs, ours, theirs, ours):
        try:
            each.do_handshake()
        except ssl.SSLWantReadError:
            continue
    return ours


@pytest.mark.parametrize(
    ("name", "names", "expected"),
    [
        ("a", "URI:spiffe://prod/a,DNS:a.example", "URI:spiffe://prod/a"),
        ("a", "DNS:A.example,URI:spiffe://prod/a", "URI:spiffe://prod/a"),
        ("a", "IP:127.0.0.1,DNS:A.example", "DNS:a.example"),
        ("a", "IP:127.0.0.1,email:a@a.example", "CN:a"),
        ("Ana", "", "CN:Ana"),
        ("", "IP:127.0.0.1", ""),
        ("a/CN=b", "", "CN:a"),
    ],
)
def test_the_identity_of_a_session_is_that_of_the_clients_certificate(
    tmp_path: Path, name: str, names: str, expected: str
) -> None:
    authority = Authority(tmp_path / "authority")
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    own = authority.issue("server")
    server.load_cert_chain(own.cert, own.key)
    server.load_verify_locations(authority.root)
    server.verify_mode = ssl.CERT_REQUIRED
    shown = authority.issue(name, names)
    assert identity_of(session_of(server, authority.client(shown))) == expected
