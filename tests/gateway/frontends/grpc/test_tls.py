"""PEM files are read and checked before anything is served, and a refusal names the flag."""

import ssl
from pathlib import Path

import pytest

from gateway.frontends.grpc.tls import read_certificates
from gateway.settings import GrpcTlsSettings
from tests.certificates import Authority, Certificate, encrypted


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("pem") / "authority")


@pytest.fixture(scope="module")
def server(authority: Authority) -> Certificate:
    return authority.issue("server")


def read(cert: Path, key: Path, root: Path | str = "", *, mutual: bool = False) -> ssl.SSLContext:
    settings = GrpcTlsSettings(cert=str(cert), key=str(key), root=str(root), mutual=mutual)
    return read_certificates(settings).context


def refusal(cert: Path, key: Path, root: Path | str = "") -> str:
    with pytest.raises(OSError, match="--grpc") as caught:
        read(cert, key, root)
    return str(caught.value)


def test_a_client_certificate_is_demanded_only_if_it_is_mutual(
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
    assert refusal(absent, server.key) == f"--grpc-server-cert {said}"
    assert refusal(server.cert, absent) == f"--grpc-server-key {said}"
    assert refusal(server.cert, server.key, absent) == f"--grpc-root-cert {said}"
    assert refusal(tmp_path, server.key).endswith("cannot be read: Is a directory")


def test_a_file_without_pem_is_refused_with_what_is_missing(
    authority: Authority, server: Certificate, tmp_path: Path
) -> None:
    other = tmp_path / "other.pem"
    other.write_bytes(b"\x30\x82 not PEM")
    for said in (
        refusal(other, server.key),
        refusal(server.key, server.key),
        refusal(server.cert, server.key, other),
    ):
        assert said.endswith("holds no certificate in PEM form (-----BEGIN ...)")
    for said in (refusal(server.cert, other), refusal(server.cert, server.cert)):
        assert said.endswith("holds no private key in PEM form (-----BEGIN ...)")
        assert said.startswith("--grpc-server-key ")


def test_pem_that_is_broken_is_refused(
    authority: Authority, server: Certificate, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.pem"
    broken.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    assert refusal(broken, server.key).startswith(f"--grpc-server-cert '{broken}' and ")
    said = refusal(server.cert, server.key, broken)
    assert said.startswith(f"--grpc-root-cert '{broken}' cannot be used: ")
    broken.write_text("-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n")
    assert f"--grpc-server-key '{broken}' cannot be used: " in refusal(server.cert, broken)


def test_a_key_of_another_certificate_is_refused(authority: Authority, server: Certificate) -> None:
    other = authority.issue("other")
    assert refusal(server.cert, other.key) == (
        f"--grpc-server-key '{other.key}' is not the key of the certificate in --grpc-server-cert "
        f"'{server.cert}'; give the two that were made together"
    )


def test_nobody_is_asked_for_the_pass_phrase_of_a_key(
    authority: Authority, server: Certificate
) -> None:
    said = refusal(server.cert, encrypted(server.key))
    assert said.endswith("is encrypted; decrypt it: openssl pkey -in KEY -out PLAIN")
