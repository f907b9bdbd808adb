"""The key file of a running server: it is read again, and a wrong one changes nothing."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from gateway.policy.keys import Role, new_key
from tests.conformance.keys import ECHO, INFER, NOTICED_SECS, bearer, stored, write
from tests.raw import Connection, post
from tests.serving import Serving, serving, wait_until

OVER_HTTP = pytest.mark.runs_on("frontends")

KEYS = {role: new_key() for role in (Role.INFER, Role.OBSERVE)}


def text_of(role: Role) -> str:
    """The part of a key file for the key of that role."""
    return stored(KEYS[role], roles=frozenset({role}))


@pytest.fixture
def own(
    repository: Path, environment: dict[str, str], server_kind: None, tmp_path: Path
) -> Iterator[tuple[Serving, Path]]:
    """A server, and its key file, with a key for inference."""
    file = tmp_path / "keys.toml"
    write(file, text_of(Role.INFER))
    flags = (f"--api-keys={file}", "--metrics-open=true")
    with serving(repository, *flags, environment=environment) as started:
        yield started, file


def wait_page(server: Serving, name: str, wanted: float) -> None:
    wait_until(lambda: server.metrics()[name] == wanted, f"{name} is {wanted:g}", NOTICED_SECS)


@OVER_HTTP
def test_a_repeated_request_is_refused_once_its_key_is_revoked(own: tuple[Serving, Path]) -> None:
    """On one connection, with the head of the request before."""
    server, file = own
    body = b'{"inputs":[{"name":"INPUT","datatype":"BYTES","shape":[1],"data":["hi"]}]}'
    asked = post(INFER, body, f"x-api-key: {KEYS[Role.INFER][0]}")
    with Connection(server.ports["http"]) as client:

        def is_refused() -> bool:
            client.send(asked)
            return client.answer().status == 401

        assert [is_refused() for _ in range(3)] == [False] * 3
        write(file, text_of(Role.OBSERVE))
        wait_until(is_refused, "the key is revoked", NOTICED_SECS)


def answers(server: Serving, role: Role) -> bool:
    headers = bearer(KEYS[role][0])
    path = INFER if role is Role.INFER else "/v2/models/stats"
    method = "POST" if role is Role.INFER else "GET"
    answer = httpx.request(method, f"{server.http}{path}", json=ECHO, headers=headers)
    assert answer.status_code in (200, 401)
    return answer.status_code == 200


@OVER_HTTP
def test_a_changed_key_file_is_read_again(own: tuple[Serving, Path]) -> None:
    server, file = own
    failures = server.metrics()["gateway_keys_reload_failures_total"]
    assert (answers(server, Role.INFER), answers(server, Role.OBSERVE)) == (True, False)
    observe = text_of(Role.OBSERVE)
    write(file, observe, text_of(Role.INFER))
    wait_until(lambda: answers(server, Role.OBSERVE), "a new key holds", NOTICED_SECS)
    write(file, observe)
    wait_until(lambda: not answers(server, Role.INFER), "a key is revoked", NOTICED_SECS)
    for number, (text, mode) in enumerate((("[[keys", 0o600), ("", 0o644)), 1):
        write(file, text, mode=mode)
        wait_page(server, "gateway_keys_reload_failures_total", failures + number)
        assert answers(server, Role.OBSERVE)
    file.unlink()
    wait_page(server, "gateway_keys_reload_failures_total", failures + 3)
    assert answers(server, Role.OBSERVE)
    other = file.with_name("other.toml")
    write(other, text_of(Role.INFER))
    file.symlink_to(other)
    wait_until(lambda: answers(server, Role.INFER), "a linked file holds", NOTICED_SECS)
    assert not answers(server, Role.OBSERVE)
    assert next(line for line in server.log if "key file refused" in line).startswith("E")


@pytest.mark.parametrize(
    ("text", "mode", "says"),
    [
        (None, 0, "it cannot be read: No such file or directory"),
        (
            "",
            0o644,
            "other users may read or write it (mode 0644), expected 0640 or stricter: chmod",
        ),
        ("[[keys", 0o600, "it is no TOML: "),
        ("[[keys]]\nid = 3\n", 0o600, "key 1: 'hash' is missing"),
    ],
)
def test_a_server_without_a_usable_key_file_does_not_start(
    repository: Path, tmp_path: Path, text: str | None, mode: int, says: str
) -> None:
    file = tmp_path / "keys.toml"
    if text is not None:
        write(file, text, mode=mode)
    server = Serving(repository, [f"--api-keys={file}"])
    assert server.wait_ended() == 1
    assert any(line.startswith(f"sluice: --api-keys {file}: {says}") for line in server.log)
