"""Admin ports of a server without keys: their sockets, TLS, log lines, and the drain."""

import logging
import socket
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from gateway.errors import InferenceError
from gateway.in_process.server import Server
from tests.certificates import Authority
from tests.conformance.keys import ECHO, status_of
from tests.conformance.models import HOLD, identity
from tests.serving import WAIT_SECS, held, http_get, wait_until, write_model

LOGGING = "/v2/logging"
LOAD = "/v2/repository/models/single/load"
SERVICE = "/inference.GRPCInferenceService"
IN_FLIGHT = b'gateway_requests_in_flight{model="held",version="1"} 1'
LOCAL = {"http_address": "127.0.0.1", "grpc_address": "127.0.0.1"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("admin")
    (found / "models").mkdir()
    return found


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    """A server with an admin socket of HTTP, and an admin port of gRPC."""
    options: dict[str, Any] = {"http_port": 0, "grpc_port": 0, "grpc_admin_port": 0, **LOCAL}
    with Server(
        model_repository=folder / "models", admin_address=f"unix:{folder}/http.sock", **options
    ) as found:
        yield found


@pytest.fixture
def admin(server: Server, folder: Path) -> Iterator[httpx.Client]:
    with client_of(folder / "http.sock") as found:
        yield found


def client_of(path: Path) -> httpx.Client:
    transport = httpx.HTTPTransport(uds=str(path))
    return httpx.Client(base_url="http://any", transport=transport, timeout=WAIT_SECS)


def test_clients_of_an_admin_socket_are_of_this_machine(admin: httpx.Client) -> None:
    """As for gRPC, their `Host` is not looked at."""
    assert admin.post(LOGGING, json={}).status_code == 200
    for headers in ({"Via": "1.1 proxy"}, {"Origin": "null"}):
        assert admin.post(LOGGING, json={}, headers=headers).status_code == 403


def test_a_socket_of_http_is_for_the_user_of_the_server(server: Server, folder: Path) -> None:
    assert stat.S_IMODE((folder / "http.sock").stat().st_mode) == 0o600
    assert server.ports["admin"] == 0


def test_without_keys_a_change_of_this_machine_is_answered_at_admin_ports_only(
    server: Server,
) -> None:
    http = f"http://127.0.0.1:{server.ports['http']}"
    assert httpx.post(http + LOAD, timeout=WAIT_SECS).status_code == 404
    load = f"{SERVICE}/RepositoryModelLoad"
    statuses = {}
    for name in ("grpc", "grpc-admin"):
        with grpc.insecure_channel(f"127.0.0.1:{server.ports[name]}") as channel:
            statuses[name] = [status_of(channel, load, each)[0] for each in ((), [("via", "a")])]
    assert statuses["grpc"] == ["UNIMPLEMENTED"] * 2
    assert statuses["grpc-admin"] == ["UNAVAILABLE", "PERMISSION_DENIED"]


def test_the_page_offers_loads_at_the_admin_port_only(folder: Path) -> None:
    options: dict[str, Any] = {"http_port": 0, "admin_port": 0, **LOCAL}
    explicit = {"model_control_mode": "explicit"}
    with Server(model_repository=folder / "models", **options, **explicit) as server:
        offered = {
            name: httpx.get(
                f"http://127.0.0.1:{server.ports[name]}/playground/state", timeout=WAIT_SECS
            ).json()["server"]["explicit"]
            for name in ("http", "admin")
        }
    assert offered == {"http": False, "admin": True}


def test_a_socket_in_use_is_refused_at_the_start(server: Server, folder: Path) -> None:
    with pytest.raises(InferenceError, match=f"unix:{folder}/http.sock: Address already in use"):
        Server(model_repository=folder / "models", admin_address=f"unix:{folder}/http.sock").start()


def test_a_port_in_use_is_refused_at_the_start(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        for name in ("admin_port", "grpc_admin_port"):
            with pytest.raises(InferenceError, match=f"cannot listen on 127.0.0.1:{port}: "):
                Server(model_repository=folder / "models", **{name: port}).start()


def test_an_admin_port_has_the_certificate_of_its_wire(folder: Path, tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    own = authority.issue("server")
    options: dict[str, Any] = {"admin_port": 0, "grpc_admin_port": 0}
    for wire in ("http", "grpc"):
        files = {f"{wire}_server_cert": own.cert, f"{wire}_server_key": own.key}
        options |= {f"{wire}_use_ssl": True, **files}
    with Server(model_repository=folder / "models", **options) as server:
        url = f"https://127.0.0.1:{server.ports['admin']}"
        assert httpx.post(url + LOGGING, json={}, verify=authority.client()).status_code == 200
        credentials = grpc.ssl_channel_credentials(authority.root.read_bytes())
        target = f"localhost:{server.ports['grpc-admin']}"
        with grpc.secure_channel(target, credentials) as channel:
            assert status_of(channel, f"{SERVICE}/LogSettings", ()) == ("OK", "")


@pytest.mark.parametrize(
    ("more", "is_open"),
    [({"admin_address": "0.0.0.0"}, True), ({}, False), ({"http_address": "0.0.0.0"}, False)],
)
def test_the_log_names_open_areas_by_the_addresses_of_admin_ports(
    folder: Path, caplog: pytest.LogCaptureFixture, more: dict[str, Any], *, is_open: bool
) -> None:
    options: dict[str, Any] = {"open_control": True, "http_port": 0, "admin_port": 0, **more}
    with (
        caplog.at_level(logging.INFO, "sluice.server"),
        Server(model_repository=folder / "models", **options),
    ):
        assert ("control open" in caplog.text) == is_open


def test_a_request_of_an_admin_socket_ends_before_the_server_does(tmp_path: Path) -> None:
    models, path = tmp_path / "models", tmp_path / "http.sock"
    write_model(models, "held", identity("BYTES", "1", **HOLD))
    address = f"unix:{path}"
    with (
        client_of(path) as admin,
        ThreadPoolExecutor() as threads,
        Server(model_repository=models, admin_address=address, metrics_port=0) as server,
    ):
        with held(models, "held"):
            answer = threads.submit(admin.post, "/v2/models/held/infer", json=ECHO)
            metrics = server.ports["metrics"]
            wait_until(lambda: IN_FLIGHT in http_get(metrics, "/metrics")[1], "it is in flight")
            stopped = threads.submit(server.stop)
            wait_until(lambda: not path.exists(), "the socket is gone")
            assert not stopped.done()
        assert answer.result(WAIT_SECS).json()["outputs"][0]["data"] == ["hi"]
        stopped.result(WAIT_SECS)
