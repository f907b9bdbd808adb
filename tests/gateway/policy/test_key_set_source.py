"""Sources of key sets: files and URLs, bad sets that change nothing, and the stored set."""

import asyncio
import logging
import os
import socket
import ssl
import stat
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from gateway.policy import key_set_fetch, key_set_source
from gateway.policy.key_file import KeyFileError
from gateway.policy.key_set import MAX_SET_BYTES
from gateway.policy.key_set_source import KeySetFile, KeySetSource, KeySetUrlSource
from gateway.policy.key_set_url import read_url
from tests.builders import soon
from tests.certificates import Authority
from tests.following import followed, until
from tests.issuer import Answer, IssuerServer, SigningKey, answer, issuer_server, key_set

ONE, TWO = SigningKey("one"), SigningKey("two")


@pytest.fixture
def issuer() -> Iterator[IssuerServer]:
    with issuer_server(answer(key_set(ONE))) as server:
        yield server


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store" / "key_sets"


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are looked at, and sets fetched, more often than every second and five minutes."""
    monkeypatch.setattr(key_set_source, "LOOK_SECS", 0.005)
    monkeypatch.setattr(key_set_source, "UNKNOWN_SECS", 0.005)
    monkeypatch.setattr(key_set_source, "REFRESH_SECS", 0.01)


def names(source: KeySetSource) -> set[str | None]:
    return {each.kid for each in source.keys.keys}


def source_of(issuer: IssuerServer, folder: Path) -> KeySetUrlSource:
    return KeySetUrlSource(read_url(issuer.url), folder)


async def nothing() -> None:
    """The function that is called after a change."""


def write(file: Path, text: str, mode: int = 0o644) -> None:
    new = file.with_suffix(".new")
    new.write_text(text)
    new.chmod(mode)
    new.replace(file)


def stored_in(folder: Path) -> Path:
    """The only file of the folder."""
    (found,) = folder.iterdir()
    return found


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def has(path: Path) -> bool:
    return path.exists()


# Files.


@pytest.mark.usefixtures("often")
async def test_a_changed_file_is_read_again_and_a_bad_one_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, changed = tmp_path / "keys.json", asyncio.Event()
    write(file, key_set(ONE))
    source = KeySetFile(file)
    assert names(source) == {"one"}

    async def note() -> None:
        changed.set()

    async with followed(source.follow(note)):
        for failures, (text, mode) in enumerate(
            [("{", 0o644), ('{"keys": []}', 0o644), (" " * (MAX_SET_BYTES + 1), 0o644), ("", 0o666)]
        ):
            write(file, text, mode)
            await soon(until(lambda: source.failures.count > failures))  # noqa: B023
        await soon(asyncio.to_thread(file.unlink))
        await soon(until(lambda: source.failures.count == 5))
        assert (names(source), changed.is_set()) == ({"one"}, False)
        write(file, key_set(ONE, TWO))
        await soon(changed.wait())
        assert names(source) == {"one", "two"}
        await soon(asyncio.to_thread(file.unlink))
        await soon(until(lambda: source.failures.count == 6))
    refused = [vars(each)["reason"] for each in caplog.records if "refused" in each.message]
    assert [each.partition(":")[0] for each in refused] == [
        "it is no JSON",
        "it has no usable key among 0, expected public keys for signatures",
        f"it has {MAX_SET_BYTES + 1} bytes, expected at most {MAX_SET_BYTES}",
        "other users may write it (mode 0666), expected 0644 or stricter",
        "it cannot be read",
        "it cannot be read",
    ]


@pytest.mark.parametrize(("text", "mode"), [(None, 0), ("{", 0o644), (key_set(ONE), 0o646)])
def test_a_file_that_cannot_be_used_ends_the_start(
    tmp_path: Path, text: str | None, mode: int
) -> None:
    if text is not None:
        write(tmp_path / "keys.json", text, mode)
    with pytest.raises(KeyFileError):
        KeySetFile(tmp_path / "keys.json")


# URLs.


async def test_a_set_is_fetched_and_stored_for_this_user_only(
    issuer: IssuerServer, folder: Path
) -> None:
    source = source_of(issuer, folder)
    await source.load()
    assert names(source) == {"one"}
    assert issuer.requests == ["/keys?secret=marker"]
    stored = stored_in(folder)
    assert stored.read_text() == key_set(ONE)
    assert (mode_of(stored), mode_of(folder)) == (0o600, 0o700)


async def test_a_server_starts_with_the_stored_set_without_the_issuer(
    issuer: IssuerServer, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await source_of(issuer, folder).load()
    issuer.answer = answer("gone", 500)
    again = source_of(issuer, folder)
    await again.load()
    assert names(again) == {"one"}
    assert again.failures.count == 1
    messages = [each.message for each in caplog.records if each.levelno >= logging.WARNING]
    assert messages == ["stored key set used", "key set refused"]
    assert "marker" not in caplog.text + repr([vars(each) for each in caplog.records])


async def test_a_stored_set_is_that_of_its_url(issuer: IssuerServer, folder: Path) -> None:
    await source_of(issuer, folder).load()
    issuer.answer = answer("gone", 500)
    with pytest.raises(KeyFileError, match="its server answers with status 500, expected 200"):
        await KeySetUrlSource(read_url(f"{issuer.url}&x"), folder).load()


@pytest.mark.parametrize("mode", [0o606, 0o660, 0o644])
async def test_a_stored_set_that_others_may_change_is_not_used(
    issuer: IssuerServer, folder: Path, mode: int
) -> None:
    await source_of(issuer, folder).load()
    stored = stored_in(folder)
    stored.chmod(mode)
    issuer.answer = answer("gone", 500)
    with pytest.raises(KeyFileError, match="status 500"):
        await source_of(issuer, folder).load()


async def test_a_set_that_cannot_be_stored_is_used(
    issuer: IssuerServer, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.parent.write_text("a file, not a folder")
    source = source_of(issuer, folder)
    await source.load()
    assert names(source) == {"one"}
    assert [each.message for each in caplog.records if each.levelno >= logging.WARNING] == [
        "key set not stored"
    ]


def endless(request: BaseHTTPRequestHandler) -> None:
    """100 MB of a set, in chunks."""
    request.send_response(200)
    request.send_header("Transfer-Encoding", "chunked")
    request.end_headers()
    for _ in range(100):
        request.wfile.write(b"f4240\r\n" + b" " * 1_000_000 + b"\r\n")
    request.wfile.write(b"0\r\n\r\n")


def dripping(request: BaseHTTPRequestHandler) -> None:
    """Headers that never end, a byte at a time."""
    request.wfile.write(b"HTTP/1.1 200 OK\r\nX: ")
    for _ in range(2000):
        request.wfile.write(b"x")
        time.sleep(0.01)


def closing(request: BaseHTTPRequestHandler) -> None:
    request.close_connection = True


def malformed(request: BaseHTTPRequestHandler) -> None:
    request.wfile.write(b"SSH-2.0-OpenSSH_9.2\r\n")
    request.close_connection = True


def cut(request: BaseHTTPRequestHandler) -> None:
    """Half of a set, of which the length is known."""
    text = key_set(ONE)
    request.send_response(200)
    request.send_header("Content-Length", str(len(text)))
    request.end_headers()
    request.wfile.write(text[:40].encode())
    request.close_connection = True


BAD: dict[str, tuple[Answer, str]] = {
    "100 MB": (endless, f"it has more than {MAX_SET_BYTES} bytes"),
    "100 MB of headers": (
        answer(key_set(TWO), 200, X="x" * 60_000_000),
        f"it has more than {MAX_SET_BYTES} bytes",
    ),
    "slow": (dripping, "it was not received within"),
    "closed": (closing, "its server closed the connection before it answered"),
    "no HTTP": (malformed, "the answer is no HTTP response: "),
    "upgrading": (
        answer("", 101, Upgrade="h2c", Connection="Upgrade"),
        "the answer is no HTTP response: ",
    ),
    "cut": (cut, "it is no JSON: "),
    "gone": (answer("", 404), "its server answers with status 404, expected 200"),
    "empty": (answer("", 204), "its server answers with status 204, expected 200"),
    "redirecting": (
        answer("", 302, Location="http://127.0.0.1:1/keys"),
        "its server answers with status 302, expected 200",
    ),
    "no text": (answer(b"\xff"), "it is no UTF-8 text"),
    "no JSON": (answer("<html>"), "it is no JSON: "),
    "no key": (answer('{"keys": []}'), "it has no usable key among 0, expected"),
}


@pytest.mark.parametrize("bad", BAD)
async def test_a_bad_answer_is_refused(
    issuer: IssuerServer, folder: Path, bad: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if bad == "slow":
        monkeypatch.setattr(key_set_fetch, "FETCH_SECS", 0.2)
    issuer.answer, reason = BAD[bad]
    with pytest.raises(KeyFileError) as refused:
        await soon(source_of(issuer, folder).load())
    assert str(refused.value).startswith(reason)
    assert len(issuer.requests) == 1
    assert not has(folder)


async def test_an_issuer_that_is_gone_is_named_by_the_error_of_the_system(folder: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/keys"
        with pytest.raises(KeyFileError, match="it cannot be fetched: "):
            await soon(KeySetUrlSource(read_url(url), folder).load())


@pytest.mark.usefixtures("often")
async def test_a_bad_answer_changes_nothing_and_is_logged_once(
    issuer: IssuerServer, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, changed = source_of(issuer, folder), asyncio.Event()
    await source.load()

    async def note() -> None:
        changed.set()

    async with followed(source.follow(note)):
        issuer.answer = answer("", 404)
        await soon(until(lambda: source.failures.count == 1))
        asked = len(issuer.requests)
        await soon(until(lambda: len(issuer.requests) > asked + 2))
        assert (names(source), source.failures.count) == ({"one"}, 1)
        assert not changed.is_set()
        issuer.answer = answer(key_set(TWO))
        await soon(changed.wait())
        assert names(source) == {"two"}
        issuer.answer = answer("", 404)
        await soon(until(lambda: source.failures.count == 2))
    assert [each.message for each in caplog.records].count("key set refused") == 2
    stored = stored_in(folder)
    assert stored.read_text() == key_set(TWO)


async def test_an_unknown_key_brings_the_next_fetch_forward(
    issuer: IssuerServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_set_source, "UNKNOWN_SECS", 0.05)
    source = source_of(issuer, folder)
    await source.load()
    issuer.answer = answer(key_set(ONE, TWO))
    loaded = time.monotonic()
    async with followed(source.follow(nothing)):
        for _ in range(100):
            source.note_unknown()
        await soon(until(lambda: "two" in names(source)))
        assert time.monotonic() - loaded >= 0.05
        assert len(issuer.requests) == 2
        await asyncio.sleep(0.12)
        assert len(issuer.requests) == 2


async def test_https_needs_a_certificate_of_a_known_authority(
    issuer: IssuerServer, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path / "authority")
    certificate = authority.issue("issuer")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate.cert, certificate.key)
    with issuer_server(answer(key_set(ONE))) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        source = KeySetUrlSource(read_url(f"https://localhost:{server.server_port}/k"), folder)
        with pytest.raises(
            KeyFileError, match=r"it cannot be fetched: .*certificate verify failed"
        ):
            await soon(source.load())
        monkeypatch.setitem(os.environ, "SSL_CERT_FILE", str(authority.root))
        await soon(source.load())
    assert names(source) == {"one"}
