"""`--public`: each part that is open to strangers is a line of the refusal, with its remedy."""

import argparse
import logging
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from gateway.cli import main
from gateway.flags import serve
from gateway.in_process.server import Server
from gateway.policy.areas import AREA_OF_METHOD_CHANGE, GRPC, Area
from gateway.policy.keys import Role, new_key
from gateway.policy.public import RULES, PublicRule, left_open
from tests.conformance.keys import bearer, status_of, stored, write
from tests.serving import ROOT, WAIT_SECS

CLOSED = ("--api-keys=keys", "--behind-proxy")
NO_KEY, HTTP_TLS, GRPC_TLS, CONTROL, METRICS, CORS, PAGE, MEMORY, HEADERS, METADATA = RULES


def broken(*arguments: str) -> Sequence[PublicRule]:
    """The rules that options break."""
    parser = argparse.ArgumentParser()
    serve.add_flags(parser)
    return left_open(vars(parser.parse_args(["--model-repository=m", *arguments])))


def test_keys_and_a_proxy_with_tls_are_enough() -> None:
    assert broken(*CLOSED) == []


def test_a_server_with_defaults_has_neither_keys_nor_tls() -> None:
    assert broken() == [NO_KEY, HTTP_TLS, GRPC_TLS]


@pytest.mark.parametrize(
    ("options", "rules"),
    [
        (["--http-use-ssl=true"], [GRPC_TLS]),
        (["--http-use-ssl-mutual=true", "--grpc-use-ssl=true"], []),
        (["--grpc-use-ssl-mutual=true"], [HTTP_TLS]),
        (["--allow-grpc=false"], [HTTP_TLS]),
        (["--allow-grpc=false", "--http-address=127.0.0.1"], [HTTP_TLS]),
        (["--allow-grpc=false", "--allow-http=false"], [HTTP_TLS]),
        (["--allow-grpc=false", "--allow-http=false", "--allow-metrics=false"], []),
        (["--allow-grpc=false", "--allow-http=false", "--metrics-address=::1"], []),
    ],
)
def test_each_wire_has_tls_unless_a_proxy_has_it(
    options: list[str], rules: list[PublicRule]
) -> None:
    assert broken("--api-keys=keys", *options) == rules
    assert broken(*CLOSED, *options) == []


@pytest.mark.parametrize(
    ("address", "rules"), [("10.0.0.5", [HTTP_TLS, GRPC_TLS]), ("[::1]", []), ("127.0.0.1", [])]
)
def test_an_admin_port_at_an_address_of_the_network_has_tls_too(
    address: str, rules: list[PublicRule]
) -> None:
    shut = ("--allow-http=false", "--allow-grpc=false", "--allow-metrics=false")
    places = (f"--admin-address={address}", f"--grpc-admin-address={address}")
    found = broken(*("--api-keys=keys", "--admin-port=0", "--grpc-admin-port=0"), *shut, *places)
    assert found == rules


@pytest.mark.parametrize(
    ("options", "rules"),
    [
        (["--open-control=true"], [CONTROL]),
        (["--metrics-open=true"], [METRICS]),
        (["--metrics-open=true", "--metrics-address=127.0.0.1"], []),
        (["--metrics-open=true", "--http-address=127.0.0.1"], []),
        (["--metrics-open=true", "--allow-metrics=false"], []),
        (["--playground=true"], [PAGE]),
        (["--playground=false"], []),
        (["--allow-client-shm=true"], [MEMORY]),
        (["--http-header-forward-pattern=x-.*"], [HEADERS]),
        (["--grpc-header-forward-pattern=x-.*"], [METADATA]),
    ],
)
def test_an_option_that_opens_a_part_is_refused(
    options: list[str], rules: list[PublicRule]
) -> None:
    assert broken(*CLOSED, *options) == rules


def test_pages_of_all_origins_are_refused() -> None:
    """The values of an option that is given several times."""
    options = {"cors_origin": ["https://app.example", "*"]}
    assert CORS.is_open(options)
    assert not CORS.is_open({"cors_origin": ["https://app.example"]})


def test_the_page_has_the_rules() -> None:
    page = (ROOT / "gateway" / "policy" / "README.md").read_text()
    rows = "".join(f"| {rule.part} | {shown(rule.fix)} |\n" for rule in RULES)
    assert f"| open part | closed by |\n|---|---|\n{rows}\n" in page


def shown(fix: str) -> str:
    """A remedy with its options as code."""
    return re.sub(r"--[\w-]+(=[\w.]+)?", r"`\g<0>`", fix)


def test_the_command_lists_what_is_open_and_starts_no_server(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--model-repository=m", "--public", "--open-control=true"])
    assert ended.value.code == 1
    expected = [NO_KEY, HTTP_TLS, GRPC_TLS, CONTROL]
    lines = "".join(f"  {rule.part}: {rule.fix}\n" for rule in expected)
    text = "the server does not start, since these parts are open"
    assert capsys.readouterr().err == f"sluice: --public: {text}:\n{lines}"


KEY = new_key()
EVERY = [("x-api-key", KEY[0])]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A public server without models, and without an admin port."""
    folder = tmp_path_factory.mktemp("public")
    write(folder / "keys.toml", stored(KEY, roles=frozenset(Role)))
    ports = {"http_port": 0, "grpc_port": 0, "metrics_port": 0, "http_address": "127.0.0.1"}
    options: dict[str, Any] = {"public": True, "behind_proxy": True, **ports}
    with Server(model_repository=folder, api_keys=folder / "keys.toml", **options) as found:
        yield found


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    url = f"http://127.0.0.1:{server.ports['http']}"
    with httpx.Client(base_url=url, timeout=WAIT_SECS, headers=bearer(KEY[0])) as client:
        yield client


@pytest.mark.parametrize("path", ["/", "/playground/main.js", "/docs", "/redoc", "/openapi.json"])
def test_a_public_server_has_no_pages(http: httpx.Client, path: str) -> None:
    assert http.get(path).status_code == 404


def test_a_public_server_answers_changes_at_no_port(http: httpx.Client, server: Server) -> None:
    assert http.post("/v2/repository/models/m/load").status_code == 404
    assert http.get("/v2/logging").status_code == 200
    assert http.post("/v2/logging", json={}).status_code == 405
    with grpc.insecure_channel(f"127.0.0.1:{server.ports['grpc']}") as channel:
        for path in AREA_OF_METHOD_CHANGE:
            assert status_of(channel, path, EVERY)[0] == "UNIMPLEMENTED"


def test_a_public_server_has_no_reflection(server: Server) -> None:
    reflection = [path for path in GRPC[Area.METADATA] if "Reflection" in path]
    assert len(reflection) == 2
    with grpc.insecure_channel(f"127.0.0.1:{server.ports['grpc']}") as channel:
        for path in reflection:
            assert status_of(channel, path, EVERY)[0] == "UNIMPLEMENTED"


@pytest.mark.parametrize(
    ("more", "changes", "metrics"),
    [
        ({}, "none", ",metrics"),
        ({"admin_port": 0, "grpc_admin_port": 0}, "admin,grpc-admin", ",metrics"),
        ({"metrics_open": True, "metrics_address": "127.0.0.1"}, "none", ""),
    ],
)
def test_the_log_has_what_a_public_server_exposes(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    more: dict[str, Any],
    changes: str,
    metrics: str,
) -> None:
    write(tmp_path / "keys.toml", stored(KEY))
    options = {"public": True, "behind_proxy": True, "metrics_port": 0, **more}
    with (
        caplog.at_level(logging.INFO, "sluice.server"),
        Server(model_repository=tmp_path, api_keys=tmp_path / "keys.toml", **options),
    ):
        (line,) = [each for each in caplog.records if each.message == "server exposed"]
    found = vars(line)
    assert found["without_key"] == "health"
    assert found["with_key"].startswith("metadata,inference,")
    assert found["with_key"].endswith(f",logging{metrics}")
    assert found["changes_at"] == changes


def test_the_log_of_other_servers_has_no_such_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.INFO, "sluice.server"),
        Server(model_repository=tmp_path, metrics_port=0),
    ):
        assert "listening" in caplog.text
        assert "server exposed" not in caplog.text
