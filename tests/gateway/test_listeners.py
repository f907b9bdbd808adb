"""Listeners: keys, tokens and certificates that cannot be used end the start, with the reason."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.errors import InferenceError
from gateway.in_process.server import Server
from tests.certificates import Authority, Certificate
from tests.issuer import AUDIENCE, ISSUER, SigningKey, answer, issuer_server, key_set

KEY = SigningKey()
IMPORTING_THEM = ("gateway.policy.json_web_tokens", "gateway.policy.key_set")


def options(repository: Path, jwks: str) -> Mapping[str, Any]:
    repository.mkdir(exist_ok=True)
    return {
        "model_repository": repository,
        "model_store_path": repository.parent / "store",
        "http_port": 0,
        "http_address": "127.0.0.1",
        "jwt_jwks": jwks,
        "jwt_issuer": ISSUER,
        "jwt_audience": AUDIENCE,
    }


def refusal(repository: Path, jwks: str) -> str:
    """The reason why a server with these keys does not start."""
    return reason(**options(repository, jwks))


def reason(**given: Any) -> str:
    """The reason why a server with these options does not start."""
    with pytest.raises(InferenceError) as refused:
        Server(**given).start()
    return refused.value.message.removeprefix("the server cannot start: ")


def test_a_key_set_that_cannot_be_read_ends_the_start(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    expected = f"--jwt-jwks {file}: it cannot be read: No such file or directory"
    assert refusal(tmp_path / "models", str(file)) == expected


def test_a_key_set_that_cannot_be_fetched_ends_the_start(tmp_path: Path) -> None:
    with issuer_server(answer("", 404)) as issuer:
        shown = issuer.url.partition("?")[0]
        expected = f"--jwt-jwks {shown}: its server answers with status 404, expected 200"
        assert refusal(tmp_path / "models", issuer.url) == expected


@pytest.mark.parametrize("package", ["jwt", "cryptography"])
def test_a_missing_package_ends_the_start_with_what_installs_it(
    tmp_path: Path, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in list(sys.modules):
        if name.partition(".")[0] == package or name in IMPORTING_THEM:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    assert refusal(tmp_path / "models", "keys.json") == (
        f"--jwt-jwks needs the package '{package}', which is not installed: "
        "pip install 'sluice[jwt]'"
    )


def test_a_server_without_api_keys_needs_tokens(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    file.write_text(key_set(KEY))
    with Server(**options(tmp_path / "models", str(file))) as server:
        url = f"http://127.0.0.1:{server.ports['http']}/v2"
        refused = httpx.get(url)
        assert (refused.status_code, refused.json()["error"]) == (
            401,
            "the token is missing, expected 'Authorization: Bearer TOKEN'",
        )
        answered = httpx.get(url, headers={"Authorization": f"Bearer {KEY.token()}"})
        assert answered.status_code == 200


@pytest.mark.parametrize("more", [{}, {"frontends": 1}], ids=str)
@pytest.mark.parametrize("wire", ["http", "grpc"])
def test_a_server_with_another_key_does_not_start(
    tmp_path: Path, authority: Authority, own: Certificate, wire: str, more: dict[str, Any]
) -> None:
    other = authority.issue("other")
    files = {f"{wire}_server_cert": str(own.cert), f"{wire}_server_key": str(other.key)}
    asked = {f"{wire}_port": 0, f"{wire}_use_ssl": True}
    said = reason(model_repository=tmp_path, **asked, **files, **more)
    assert f"--{wire}-server-key '{other.key}' is not the key of the certificate" in said


def test_the_metrics_page_has_the_certificate_of_http(tmp_path: Path, own: Certificate) -> None:
    files = {"http_server_cert": str(own.cert), "http_server_key": str(tmp_path / "absent")}
    said = reason(model_repository=tmp_path, metrics_port=0, http_use_ssl=True, **files)
    assert f"--http-server-key '{tmp_path / 'absent'}' cannot be read: No such file" in said
