"""Certificates of a port: their checks, and the same files again after a change."""

import asyncio
import os
import ssl
from pathlib import Path

import pytest

from gateway.settings import TlsSettings
from gateway.tls import certificates as certificates_module
from gateway.tls.certificates import Certificates, PemFiles, read_certificates
from tests.builders import soon
from tests.certificates import Authority, Certificate, encrypted, replace_files
from tests.following import followed, until


def read(cert: Path, key: Path, root: Path | str = "", *, mutual: bool = False) -> ssl.SSLContext:
    settings = TlsSettings(wire="grpc", cert=str(cert), key=str(key), root=str(root), mutual=mutual)
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
    settings = TlsSettings(
        wire="grpc",
        cert=str(server.cert),
        key=str(server.key),
        root=str(authority.root),
        mutual=True,
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


@pytest.fixture
def own(authority: Authority, tmp_path: Path) -> Certificate:
    """A certificate whose files a test may change."""
    made = authority.issue("own")
    found = Certificate(tmp_path / "cert.pem", tmp_path / "key.pem")
    replace_files(found, made)
    return found


def certificates_of(files: Certificate, root: Path | str = "") -> Certificates:
    settings = TlsSettings(
        wire="http", cert=str(files.cert), key=str(files.key), root=str(root), mutual=bool(root)
    )
    return Certificates(settings)


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """The files are looked at more often than once a second."""
    monkeypatch.setattr(certificates_module, "LOOK_SECS", 0.005)


@pytest.mark.usefixtures("often")
async def test_a_pair_that_is_written_in_two_steps_is_refused_once_and_then_read(
    own: Certificate, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    new, found = authority.issue("new"), certificates_of(own)
    before = found.files
    async with followed(found.follow()):
        replace_files(Certificate(own.cert, own.key), Certificate(new.cert, own.key))
        await soon(until(lambda: found.failures.count == 1))
        await asyncio.sleep(0.05)
        assert found.files is before
        replace_files(Certificate(own.cert, own.key), new)
        await soon(until(lambda: found.files is not before))
        await asyncio.sleep(0.05)  # a pair that was read as it changed is read again
        after = found.files
        await asyncio.sleep(0.05)
        assert found.files is after
    assert found.failures.count == 1
    assert found.files.cert == new.cert.read_bytes()
    assert found.context is not before.context
    (refused,) = [each for each in caplog.records if each.levelname == "ERROR"]
    assert vars(refused)["reason"].startswith("--http-server-key ")
    assert "is not the key of the certificate" in vars(refused)["reason"]


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("damage", ["missing", "cut", "empty", "encrypted", "a pipe"])
async def test_files_that_cannot_be_used_leave_the_certificate_as_it_is(
    own: Certificate, damage: str
) -> None:
    whole, found = own.key.read_bytes(), certificates_of(own)
    before = found.files
    own.key.unlink()
    if damage == "a pipe":
        os.mkfifo(own.key)
    elif damage != "missing":
        own.key.write_bytes(whole)
        texts = {"cut": whole[:60], "empty": b"", "encrypted": encrypted(own.key).read_bytes()}
        own.key.write_bytes(texts[damage])
    async with followed(found.follow()):
        await soon(until(lambda: found.failures.count == 1))
        assert found.files is before
        own.key.unlink(missing_ok=True)
        own.key.write_bytes(whole)
        await soon(until(lambda: found.files is not before))


@pytest.mark.usefixtures("often")
async def test_an_authority_that_is_replaced_is_forgotten(
    own: Certificate, authority: Authority, tmp_path: Path
) -> None:
    """`load_verify_locations` of one context would only add the new one."""
    other = Authority(tmp_path / "other")
    root = tmp_path / "root.pem"
    root.write_bytes(authority.root.read_bytes())
    found = certificates_of(own, root)
    async with followed(found.follow()):
        before = found.files
        root.write_bytes(other.root.read_bytes())
        await soon(until(lambda: found.files is not before))
    assert found.context.cert_store_stats()["x509"] == 1
    assert found.context.get_ca_certs(binary_form=True) == [
        ssl.PEM_cert_to_DER_cert(other.root.read_text())
    ]


@pytest.mark.usefixtures("often")
async def test_an_unforeseen_failure_is_counted_and_tried_again(
    own: Certificate, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, failing = certificates_of(own), True

    def read(settings: TlsSettings) -> PemFiles:
        if failing:
            raise RuntimeError("x")
        return read_certificates(settings)

    monkeypatch.setattr(certificates_module, "read_certificates", read)
    async with followed(found.follow()):
        before = found.files
        replace_files(own, authority.issue("next"))
        await soon(until(lambda: found.failures.count == 1))
        failing = False
        await soon(until(lambda: found.files is not before))
