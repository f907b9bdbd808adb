"""Exposure of a server: the areas that strangers read and change, found by harmless requests."""

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.cli import main
from gateway.in_process.server import Server
from gateway.policy.areas import Area
from gateway.policy.control import CHANGES as CHANGED_AREAS
from gateway.policy.keys import Role, new_key
from gateway.tools.doctor import command, exposure
from gateway.tools.doctor.exposure import CHANGES, READS, Openness, Place, described, findings
from gateway.tools.doctor.report import Finding, Health
from tests.certificates import Authority
from tests.conformance.keys import stored, write
from tests.serving import WAIT_SECS

LOCAL: dict[str, Any] = {"http_address": "127.0.0.1", "http_port": 0, "metrics_port": 0}
KEY = new_key()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("exposure")
    (found / "models").mkdir()
    write(found / "keys.toml", stored(KEY, roles=frozenset(Role)))
    return found


def of(server: Server, name: str = "http", **fields: Any) -> Place:
    return Place("127.0.0.1", server.ports[name], **fields)


def asked(server: Server, name: str = "http") -> list[Finding]:
    return list(findings(of(server, name), of(server, "metrics")))


@pytest.fixture(scope="module")
def open_server(folder: Path) -> Iterator[Server]:
    """A server without keys that every machine may change."""
    options = {"open_control": True, "allow_client_shm": True}
    with Server(model_repository=folder / "models", **LOCAL, **options) as found:
        yield found


def test_each_area_has_a_request_and_each_area_of_changes_a_change() -> None:
    assert {*READS, Area.HEALTH, Area.METRICS} == set(Area)
    assert set(CHANGES) == set(CHANGED_AREAS)


def test_an_open_server_is_read_and_changed_by_all(open_server: Server) -> None:
    place = of(open_server).shown
    every = ", ".join((*READS, Area.METRICS))
    assert asked(open_server) == [
        Finding(f"{place}: read by all", every, Health.WARNING, exposure.READ_FIX),
        Finding(
            f"{place}: changed by all", ", ".join(CHANGES), Health.WARNING, exposure.CHANGE_FIX
        ),
    ]


def test_the_examination_changes_nothing(open_server: Server) -> None:
    base = f"http://127.0.0.1:{open_server.ports['http']}"
    with httpx.Client(base_url=base, timeout=WAIT_SECS) as client:

        def state() -> list[Any]:
            paths = ("/v2/logging", "/v2/trace/setting", "/v2/systemsharedmemory/status")
            found = [client.get(path).json() for path in paths]
            return [*found, client.post("/v2/repository/index").json()]

        before = state()
        assert asked(open_server)
        assert state() == before


def test_a_server_with_defaults_is_changed_by_this_machine_only(folder: Path) -> None:
    """The doctor is on this machine, and no stranger."""
    with Server(model_repository=folder / "models", **LOCAL) as server:
        (found,) = asked(server)
    assert found.what.endswith(": read by all")
    reads = [each for each in READS if each is not Area.ADMIN]
    assert found.found == ", ".join((*reads, Area.METRICS))


def test_a_public_server_has_inference_with_a_key_and_nothing_else(folder: Path) -> None:
    public = {"public": True, "behind_proxy": True, "api_keys": folder / "keys.toml"}
    with Server(model_repository=folder / "models", admin_port=0, **LOCAL, **public) as server:
        (found,) = asked(server)
        (at_admin,) = asked(server, "admin")
    assert found.found == "inference with a key; nothing else"
    assert (found.what, found.verdict) == (of_port(server, "http"), Health.OK)
    changes = ", ".join(CHANGES)
    assert at_admin.found == f"inference and changes of {changes} with a key; nothing else"


def of_port(server: Server, name: str) -> str:
    return f"http://127.0.0.1:{server.ports[name]}"


def test_a_server_with_keys_over_tls_is_examined_as_such(folder: Path) -> None:
    own = Authority(folder / "authority").issue("server")
    tls = {"http_use_ssl": True, "http_server_cert": own.cert, "http_server_key": own.key}
    options = {"api_keys": folder / "keys.toml", "metrics_open": True, **tls}
    with Server(model_repository=folder / "models", **LOCAL, **options) as server:
        page = of(server, "metrics", tls=True)
        found = list(findings(of(server), page))
        assert list(findings(of(server, tls=True), page)) == found
    keyed, read = found
    assert keyed.what.startswith("https://127.0.0.1:")
    assert keyed.found == f"inference and changes of {', '.join(CHANGES)} with a key"
    assert read.found == "playground, metrics"


def test_a_place_without_a_server_is_one_finding() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    (found,) = findings(Place("127.0.0.1", port))
    assert found == Finding(
        f"http://127.0.0.1:{port}", "no answer; --url URL examines another server"
    )


class Overloaded(BaseHTTPRequestHandler):
    """A server that is live: it answers 503 to what reads, and drops what has a body."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/v2/health/live" else 503)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        """No line of the log."""


def test_an_area_without_an_answer_is_not_taken_for_shut() -> None:
    with (
        ThreadingHTTPServer(("127.0.0.1", 0), Overloaded) as other,
        ThreadPoolExecutor() as threads,
    ):
        serving = threads.submit(other.serve_forever, 0.01)
        place = Place("127.0.0.1", other.server_port)
        found = list(findings(place, replace(place, port=1)))
        other.shutdown()
        serving.result(WAIT_SECS)
    areas = ", ".join(READS)
    name = f"{place.shown}: not examined"
    assert found == [Finding(name, areas, Health.WARNING, exposure.UNKNOWN_FIX)]


def answers(probes: Any, answer: Openness, **others: Openness) -> dict[Area, Openness]:
    return {area: others.get(area.name.lower(), answer) for area in probes}


@pytest.mark.parametrize(
    ("reads", "changes", "texts"),
    [
        (
            answers(READS, Openness.SHUT),
            answers(CHANGES, Openness.SHUT),
            ["nothing else"],
        ),
        (
            answers(READS, Openness.KEY, playground=Openness.OPEN),
            answers(CHANGES, Openness.SHUT),
            ["inference with a key", "playground"],
        ),
        (
            answers(READS, Openness.KEY, trace=Openness.UNKNOWN),
            answers(CHANGES, Openness.SHUT, trace=Openness.UNKNOWN, logging=Openness.UNKNOWN),
            ["inference with a key", "trace, logging"],
        ),
        (
            answers(READS, Openness.KEY),
            answers(CHANGES, Openness.SHUT, trace=Openness.OPEN),
            ["inference with a key", "trace"],
        ),
        (
            answers(READS, Openness.SHUT),
            answers(CHANGES, Openness.SHUT, logging=Openness.KEY),
            ["changes of logging with a key; nothing else"],
        ),
    ],
)
def test_a_finding_has_the_areas_of_each_kind(
    reads: dict[Area, Openness], changes: dict[Area, Openness], texts: list[str]
) -> None:
    assert [each.found for each in described("server", reads, changes)] == texts


@pytest.mark.parametrize("url", ["localhost:1", "http://localhost:1/", "http://localhost:1"])
def test_the_command_has_a_part_on_exposure(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "examine", lambda limit_secs, progress: [])
    main(["doctor", "--json", f"--url={url}"])
    (found,) = json.loads(capsys.readouterr().out)["findings"]
    assert (found["part"], found["what"]) == ("exposure", "http://localhost:1")


@pytest.mark.parametrize("url", ["ftp://localhost", "http://", "localhost:x", "localhost:0"])
def test_a_wrong_url_is_a_usage_error(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["doctor", f"--url={url}"])
    expected = f"'{url}': expected the URL of a port, as in http://localhost:8000"
    assert expected in capsys.readouterr().err
