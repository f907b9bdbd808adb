"""Admin ports: with one of them, changes of the server exist there only, also for admin keys."""

import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from tritonclient.grpc import service_pb2

from gateway.policy.areas import (
    AREA_OF_METHOD_CHANGE,
    AREA_OF_ROUTE_CHANGE,
    AREA_OF_SETTINGS,
    Area,
)
from gateway.policy.control import CHANGES
from gateway.policy.keys import Role, new_key
from tests.conformance.keys import ECHO, INFER, bearer, message_of, status_of, stored, write
from tests.conformance.spellings import filled, spellings
from tests.raw import Connection, post
from tests.serving import WAIT_SECS, Serving, serving

pytestmark = pytest.mark.runs_on("grpcio", "frontends")

KEYS = {role: new_key() for role in Role}
ADMIN = bearer(KEYS[Role.ADMIN][0])
OBSERVE = bearer(KEYS[Role.OBSERVE][0])
EVERY = [("x-api-key", KEYS[Role.ADMIN][0])]
OBSERVER = [("x-api-key", KEYS[Role.OBSERVE][0])]
SETTINGS = {area: path for path, area in AREA_OF_SETTINGS.items()}
LOAD, LOGGING = "/v2/repository/models/repeat/load", "/v2/logging"
READY = "/v2/models/repeat/ready"
VERBOSE = b'{"log_verbose_level": 1}'
UNKNOWN = ("no method '{}' is served here", "Method not found!")
"""The texts of both transports for a method that does not exist."""


@pytest.fixture(scope="module")
def socket_path(tmp_path_factory: pytest.TempPathFactory, server_kind: None) -> Path:
    return tmp_path_factory.mktemp("admin") / "grpc.sock"


@pytest.fixture(scope="module")
def server(repository: Path, environment: dict[str, str], socket_path: Path) -> Iterator[Serving]:
    keys = socket_path.with_name("keys.toml")
    write(keys, *(stored(made, roles=frozenset({role})) for role, made in KEYS.items()))
    flags = (
        *("--admin-port=0", f"--grpc-admin-address=unix:{socket_path}", f"--api-keys={keys}"),
        *("--model-control-mode=explicit", "--load-model=single"),
    )
    with serving(repository, *flags, environment=environment) as started:
        yield started
    assert started.process.returncode == 0
    assert "Traceback" not in started.text
    assert not socket_path.exists()


@pytest.fixture(scope="module")
def admin(server: Serving) -> Iterator[httpx.Client]:
    """A client of the admin port, without a key."""
    url = f"http://127.0.0.1:{server.ports['admin']}"
    with httpx.Client(base_url=url, timeout=WAIT_SECS) as client:
        yield client


@pytest.fixture(scope="module")
def channel(server: Serving) -> Iterator[Any]:
    with grpc.insecure_channel(server.grpc) as found:
        yield found


@pytest.fixture(scope="module")
def admin_channel(server: Serving, socket_path: Path) -> Iterator[Any]:
    with grpc.insecure_channel(f"unix:{socket_path}") as found:
        yield found


def test_routes_that_change_the_server_exist_at_the_admin_port_only(
    http: httpx.Client, admin: httpx.Client
) -> None:
    for path, area in AREA_OF_ROUTE_CHANGE.items():
        is_read_too = area in (Area.TRACE, Area.LOGGING) or path.endswith("/labels")
        for headers in ({}, OBSERVE, ADMIN):
            answer = http.post(filled(path), headers=headers, content=b"{")
            of_reading = 405 if headers else 401
            assert answer.status_code == (of_reading if is_read_too else 404), path
            assert answer.headers.get("allow") == ("GET" if is_read_too and headers else None)
        assert admin.post(filled(path), content=b"{").status_code == 401
        assert admin.post(filled(path), headers=OBSERVE, content=b"{").status_code == 403
        answer = admin.post(filled(path), headers=ADMIN, content=b"{")
        assert answer.status_code not in (401, 403, 405), path
        assert answer.json() != {"error": "Not Found"}


@pytest.mark.parametrize("path", ["/", "/v2", LOGGING, "/docs", "/v2/models/single/config"])
def test_requests_that_read_are_answered_at_both_ports(
    http: httpx.Client, admin: httpx.Client, path: str
) -> None:
    for client in (http, admin):
        assert client.get(path, headers=ADMIN).status_code == 200
        assert client.get(path).status_code == (200 if path == "/" else 401)


@pytest.mark.parametrize("target", spellings(LOAD).values())
def test_no_spelling_of_a_path_finds_a_change(server: Serving, target: str) -> None:
    key = f"x-api-key: {KEYS[Role.ADMIN][0]}"
    with Connection(server.ports["http"]) as client:
        client.send(post(target, b"{}", key))
        assert client.answer().status in (400, 404, 405)


def test_methods_that_change_the_server_exist_at_the_admin_port_only(
    channel: Any, admin_channel: Any
) -> None:
    for path in AREA_OF_METHOD_CHANGE:
        for metadata in ((), EVERY):
            status, text = status_of(channel, path, metadata)
            assert status == "UNIMPLEMENTED"
            assert text in (UNKNOWN[0].format(path), UNKNOWN[1])
        assert status_of(admin_channel, path, ())[0] == "UNAUTHENTICATED"
        assert status_of(admin_channel, path, OBSERVER)[0] == "PERMISSION_DENIED"
        status, text = status_of(admin_channel, path, EVERY)
        assert status not in ("UNAUTHENTICATED", "PERMISSION_DENIED")
        assert text not in (UNKNOWN[0].format(path), UNKNOWN[1])


@pytest.mark.parametrize(("area", "path"), SETTINGS.items())
def test_a_method_with_settings_changes_them_at_the_admin_port_only(
    channel: Any, admin_channel: Any, area: Area, path: str
) -> None:
    message = settings_of(path)
    absent = ("UNIMPLEMENTED", f"{CHANGES[area]} is not offered at this port")
    assert sent(channel, path, message, EVERY) == absent
    assert sent(channel, path, message, ())[0] == "UNAUTHENTICATED"
    assert sent(channel, path, b"", EVERY)[0] == "OK"
    assert sent(admin_channel, path, message, EVERY)[0] == "OK"
    assert sent(admin_channel, path, message, OBSERVER)[0] == "PERMISSION_DENIED"
    assert sent(admin_channel, path, b"", OBSERVER)[0] == "OK"


def settings_of(path: str) -> bytes:
    """A message that sets a setting of that method to its default."""
    if path.endswith("TraceSetting"):
        traces = service_pb2.TraceSettingRequest()
        traces.settings["trace_rate"].value.append("1000")
        return traces.SerializeToString()
    logs = service_pb2.LogSettingsRequest()
    logs.settings["log_verbose_level"].uint32_param = 0
    return logs.SerializeToString()


def sent(channel: Any, path: str, message: bytes, metadata: Any) -> tuple[str, str]:
    """The status of an RPC with that message, and its text."""
    try:
        channel.unary_unary(path)(message, metadata=metadata, timeout=WAIT_SECS)
    except grpc.RpcError as error:
        return error.code().name, error.details()
    return "OK", ""


@pytest.mark.parametrize("name", ["ServerLive", "RepositoryIndex", "ModelStatistics"])
def test_methods_that_read_are_answered_at_both_ports(
    channel: Any, admin_channel: Any, name: str
) -> None:
    for each in (channel, admin_channel):
        assert status_of(each, f"/inference.GRPCInferenceService/{name}", EVERY) == ("OK", "")


def test_the_health_service_of_grpc_is_ready_at_the_admin_socket(admin_channel: Any) -> None:
    answer = HealthStub(admin_channel).Check(HealthCheckRequest(), timeout=WAIT_SECS)
    assert answer.status == HealthCheckResponse.SERVING


def test_a_change_at_the_admin_port_holds_at_the_other_ports(
    http: httpx.Client, admin: httpx.Client
) -> None:
    assert http.get(READY).status_code == 404
    assert admin.post(LOAD, headers=ADMIN).status_code == 200
    assert http.get(READY).status_code == 200
    assert admin.post(LOAD.replace("load", "unload"), headers=ADMIN).status_code == 200
    assert admin.post(LOGGING, content=VERBOSE, headers=ADMIN).status_code == 200
    assert http.get(LOGGING, headers=ADMIN).json()["log_verbose_level"] == 1
    assert admin.post(LOGGING, content=VERBOSE.replace(b"1", b"0"), headers=ADMIN).is_success


def test_the_admin_port_serves_inference_and_refuses_foreign_pages(admin: httpx.Client) -> None:
    answer = admin.post(INFER, json=ECHO, headers=bearer(KEYS[Role.INFER][0]))
    assert answer.json()["outputs"][0]["data"] == ["hi"]
    refused = admin.post(LOAD, headers={**ADMIN, "Origin": "null"})
    assert refused.status_code == 403
    assert message_of(refused).startswith("changes are not answered to pages of another origin")


def test_only_the_user_of_the_server_connects_to_an_admin_socket(
    server: Serving, socket_path: Path
) -> None:
    assert stat.S_IMODE(socket_path.stat().st_mode) == 0o600
    assert server.ports["grpc-admin"] == 0
    assert f"grpc-admin  unix:{socket_path}" in server.log
