"""Listening sockets, their errors, Unix sockets, TLS files."""

import socket
import ssl
from pathlib import Path
from typing import Any

import pytest

from gateway.frontends.grpc.sockets import (
    SocketFile,
    bound,
    peer_name,
    read_certificates,
    require_free,
    unix_path,
)
from gateway.settings import GrpcSettings, GrpcTlsSettings, netloc
from tests.certificates import Authority, Certificate, encrypted


def at(address: str, port: int = 0, *, reuse: bool = False) -> GrpcSettings:
    return GrpcSettings(address=address, port=port, reuse_port=reuse)


def refusal(settings: GrpcSettings) -> str:
    with pytest.raises(OSError, match="cannot listen on") as caught:
        bound(settings)
    return str(caught.value)


@pytest.mark.parametrize(
    ("address", "path", "written"),
    [
        ("127.0.0.1", "", "127.0.0.1:8001"),
        ("::1", "", "[::1]:8001"),
        ("unix:/run/s", "/run/s", "unix:/run/s"),
    ],
)
def test_an_address_is_written_as_grpc_does(address: str, path: str, written: str) -> None:
    assert unix_path(address) == path
    assert netloc(address, 8001) == written


@pytest.mark.parametrize(
    ("address", "listening_at", "peer"),
    [
        (("127.0.0.1", 4000), "0.0.0.0", "ipv4:127.0.0.1:4000"),
        (("::1", 4000, 0, 0), "::", "ipv6:[::1]:4000"),
        (("::ffff:10.0.0.5", 4000, 0, 0), "::", "ipv4:10.0.0.5:4000"),
        (None, "0.0.0.0", ""),
        (None, "unix:/run/s", "unix:"),
        ("", "unix:/run/s", "unix:"),
    ],
)
def test_a_peer_is_written_as_grpc_does(address: Any, listening_at: str, peer: str) -> None:
    """The address of a client that has reset its connection is None."""
    assert peer_name(address, listening_at) == peer


def test_a_port_is_exclusive_unless_every_server_shares_it() -> None:
    with bound(at("127.0.0.1")) as first:
        port = first.getsockname()[1]
        said = f"cannot listen on 127.0.0.1:{port}: Address already in use"
        assert refusal(at("127.0.0.1", port)) == said
        assert refusal(at("127.0.0.1", port, reuse=True)) == said
    with bound(at("127.0.0.1", reuse=True)) as first:
        port = first.getsockname()[1]
        require_free(at("127.0.0.1", port, reuse=True))
        bound(at("127.0.0.1", port, reuse=True)).close()
        said = f"cannot listen on 127.0.0.1:{port}: Address already in use"
        assert refusal(at("127.0.0.1", port)) == said


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_every_address_of_ipv6_is_every_address() -> None:
    with bound(at("::")) as found:
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, found.getsockname()[1]), timeout=5).close()
    with bound(at("::1")) as found, pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", found.getsockname()[1]), timeout=5)


def test_a_unix_socket_in_use_is_refused_also_if_its_queue_is_full(tmp_path: Path) -> None:
    path = tmp_path / "s"
    said = f"cannot listen on unix:{path}: Address already in use"
    with bound(at(f"unix:{path}")):
        assert refusal(at(f"unix:{path}")) == said
    path.unlink()
    with socket.socket(socket.AF_UNIX) as busy:
        busy.bind(str(path))
        busy.listen(0)
        clients = [socket.socket(socket.AF_UNIX) for _ in range(3)]
        for client in clients:
            client.setblocking(False)
            client.connect_ex(str(path))
        assert refusal(at(f"unix:{path}")) == said
        for client in clients:
            client.close()


def test_a_stale_socket_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    bound(at(f"unix:{path}")).close()
    assert path.exists()
    with bound(at(f"unix:{path}")), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_a_file_that_is_not_a_socket_is_not_replaced(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "s"
    if kind == "file":
        path.write_text("precious")
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / "elsewhere")
    said = refusal(at(f"unix:{path}"))
    assert said.endswith("the path exists and is not a socket; remove it")
    assert path.is_symlink() or path.exists()


def test_checking_an_address_leaves_no_socket(tmp_path: Path) -> None:
    require_free(at(f"unix:{tmp_path / 's'}"))
    assert list(tmp_path.iterdir()) == []


def test_a_socket_file_is_removed_only_by_its_own_server(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with bound(at(f"unix:{path}")):
        SocketFile(str(path)).remove()
    assert not path.exists()
    with bound(at(f"unix:{path}")):
        old = SocketFile(str(path))
        path.rename(tmp_path / "moved")
        old.remove()  # nothing is there
        with bound(at(f"unix:{path}")):
            old.remove()
            assert path.exists()


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("pem") / "authority")


@pytest.fixture(scope="module")
def server(authority: Authority) -> Certificate:
    return authority.issue("server")


def read(cert: Path, key: Path, root: Path | str = "", *, mutual: bool = False) -> ssl.SSLContext:
    settings = GrpcTlsSettings(cert=str(cert), key=str(key), root=str(root), mutual=mutual)
    return read_certificates(settings).context


def tls_refusal(cert: Path, key: Path, root: Path | str = "") -> str:
    with pytest.raises(OSError, match="--grpc") as caught:
        read(cert, key, root)
    return str(caught.value)


def test_a_client_certificate_is_required_only_with_mutual_tls(
    authority: Authority, server: Certificate
) -> None:
    assert read(server.cert, server.key).verify_mode is ssl.CERT_NONE
    assert read(server.cert, server.key, authority.root).verify_mode is ssl.CERT_NONE
    mutual = read(server.cert, server.key, authority.root, mutual=True)
    assert mutual.verify_mode is ssl.CERT_REQUIRED
    assert mutual.minimum_version is ssl.TLSVersion.TLSv1_2


def test_files_are_given_on_as_they_are(authority: Authority, server: Certificate) -> None:
    settings = GrpcTlsSettings(
        cert=str(server.cert), key=str(server.key), root=str(authority.root), mutual=True
    )
    found = read_certificates(settings)
    paths = (server.cert, server.key, authority.root)
    assert (found.cert, found.key, found.root) == tuple(path.read_bytes() for path in paths)


def test_a_file_that_is_not_there_is_named_with_its_flag(
    authority: Authority, server: Certificate, tmp_path: Path
) -> None:
    absent = tmp_path / "absent.pem"
    said = f"'{absent}' cannot be read: No such file or directory"
    assert tls_refusal(absent, server.key) == f"--grpc-server-cert {said}"
    assert tls_refusal(server.cert, absent) == f"--grpc-server-key {said}"
    assert tls_refusal(server.cert, server.key, absent) == f"--grpc-root-cert {said}"
    assert tls_refusal(tmp_path, server.key).endswith("cannot be read: Is a directory")


def test_a_file_without_pem_is_refused_with_the_missing_kind(
    authority: Authority, server: Certificate, tmp_path: Path
) -> None:
    other = tmp_path / "other.pem"
    other.write_bytes(b"\x30\x82 not PEM")
    for said in (
        tls_refusal(other, server.key),
        tls_refusal(server.key, server.key),
        tls_refusal(server.cert, server.key, other),
    ):
        assert said.endswith("holds no certificate in PEM form (-----BEGIN ...)")
    for said in (tls_refusal(server.cert, other), tls_refusal(server.cert, server.cert)):
        assert said.endswith("holds no private key in PEM form (-----BEGIN ...)")
        assert said.startswith("--grpc-server-key ")


def test_pem_that_is_broken_is_refused(
    authority: Authority, server: Certificate, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.pem"
    broken.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    assert tls_refusal(broken, server.key).startswith(f"--grpc-server-cert '{broken}' and ")
    said = tls_refusal(server.cert, server.key, broken)
    assert said.startswith(f"--grpc-root-cert '{broken}' cannot be used: ")
    broken.write_text("-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n")
    assert f"--grpc-server-key '{broken}' cannot be used: " in tls_refusal(server.cert, broken)


def test_a_key_of_another_certificate_is_refused(authority: Authority, server: Certificate) -> None:
    other = authority.issue("other")
    assert tls_refusal(server.cert, other.key) == (
        f"--grpc-server-key '{other.key}' is not the key of the certificate in --grpc-server-cert "
        f"'{server.cert}'; give the two that were made together"
    )


def test_an_encrypted_key_is_refused_without_a_prompt(
    authority: Authority, server: Certificate
) -> None:
    said = tls_refusal(server.cert, encrypted(server.key))
    assert said.endswith("is encrypted; decrypt it: openssl pkey -in KEY -out PLAIN")
