"""Changes of the server: answered to this machine, refused to others and to foreign pages."""

import os
import signal
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from hpack import Encoder
from hyperframe.frame import DataFrame, HeadersFrame, SettingsFrame
from tritonclient.grpc import service_pb2

from gateway.policy.areas import GRPC_CHANGES, GRPC_SETTINGS, HTTP_CHANGES, Area
from gateway.policy.control import CHANGES
from tests.children import frontends_of
from tests.conformance.spellings import filled, spellings
from tests.http2 import PREFACE
from tests.raw import Connection, post
from tests.serving import WAIT_SECS, Serving, serving

OVER_HTTP = pytest.mark.runs_on("frontends")
OVER_GRPC = pytest.mark.runs_on("grpcio", "frontends")

FLAGS = (
    *("--http-address=0.0.0.0", "--grpc-address=0.0.0.0", "--allow-client-shm=true"),
    *("--model-control-mode=explicit", "--load-model=single", "--allowed-hosts=gateway.example"),
)
LOAD, LOGGING = "/v2/repository/models/repeat/load", "/v2/logging"
ROUTES = [(area, filled(path)) for area, paths in HTTP_CHANGES.items() for path in paths]
SERVICE = "/inference.GRPCInferenceService"
METHODS = [(area, path) for area, paths in GRPC_CHANGES.items() for path in paths]
SETTINGS = [(area, path) for area, paths in GRPC_SETTINGS.items() for path in paths]
STRANGE: Sequence[Mapping[str, str]] = (
    {"X-Forwarded-For": "127.0.0.1"},
    {"Forwarded": "for=127.0.0.1"},
    {"Via": "1.1 proxy"},
    {"Host": "evil.example"},
    {"Host": "evil.example", "Origin": "http://evil.example"},
    {"Host": "gateway.example", "Via": "1.1 proxy"},
)
FOREIGN: Sequence[Mapping[str, str]] = (
    {"Origin": "http://evil.example"},
    {"Origin": "null"},
    {"Origin": "http://localhost:3000", "Host": "localhost:8000"},
    {"Sec-Fetch-Site": "cross-site"},
)
OWN: Sequence[Mapping[str, str]] = (
    {},
    {"Host": "localhost:8000", "Origin": "http://localhost:8000", "Sec-Fetch-Site": "same-origin"},
    {"Host": "[::1]"},
    {"Host": "Gateway.example:8000"},
)
ONLY_HERE = (
    "{} is answered to this machine only; --open-control=true answers every machine, as Triton does"
)
PAGE = "changes are not answered to pages of another origin, found {}"
VERBOSE = b'{"log_verbose_level": 1}'


def own_address() -> str:
    """An address of this machine that is not loopback; "" without one. No packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return ""
        found: str = probe.getsockname()[0]
    return "" if found.startswith("127.") else found


ADDRESS = own_address()
needs_address = pytest.mark.skipif(not ADDRESS, reason="needs an address that is not loopback")


@pytest.fixture(scope="module")
def open_server(
    repository: Path, environment: dict[str, str], server_kind: None
) -> Iterator[Serving]:
    flags = (*FLAGS, "--open-control=true")
    with serving(repository, *flags, environment=environment) as started:
        yield started


def client_of(server: Serving, host: str = "127.0.0.1") -> httpx.Client:
    return httpx.Client(base_url=f"http://{host}:{server.ports['http']}", timeout=WAIT_SECS)


def state_of(client: httpx.Client) -> list[Any]:
    """The parts of the server that changes would change."""
    paths = ("/v2/logging", "/v2/trace/setting", "/v2/models/single/trace/setting")
    shared = ("/v2/systemsharedmemory/status", "/v2/cudasharedmemory/status")
    found = [client.get(path) for path in (*paths, *shared)]
    found.append(client.post("/v2/repository/index", headers=STRANGE[0]))
    assert all(each.status_code == 200 for each in found)
    return [each.json() for each in found]


@pytest.fixture
def unchanged(http: httpx.Client) -> Iterator[None]:
    """The state of the server is the same after the test."""
    before = state_of(http)
    yield
    assert state_of(http) == before


def assert_refused(answer: httpx.Response, text: str) -> None:
    assert (answer.status_code, answer.json()) == (403, {"error": text})


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize(("area", "path"), ROUTES)
@OVER_HTTP
def test_a_change_by_a_stranger_is_refused_before_its_body_is_read(
    http: httpx.Client, area: Area, path: str
) -> None:
    for headers in STRANGE:
        answer = http.post(path, headers=headers, content=b"{")
        assert_refused(answer, ONLY_HERE.format(CHANGES[area]))
    for headers in FOREIGN:
        answer = http.post(path, headers=headers, content=b"{")
        assert_refused(answer, PAGE.format(shown(headers)))
    for headers in OWN:
        assert http.post(path, headers=headers, content=b"{").status_code != 403


def shown(headers: Mapping[str, str]) -> str:
    name = "Origin" if "Origin" in headers else "Sec-Fetch-Site"
    return f"{name} '{headers[name]}'"


@needs_address
@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("headers", [{}, {"Host": "localhost:8000"}, {"Host": "gateway.example"}])
@OVER_HTTP
def test_a_change_by_another_address_is_refused_over_http(
    server: Serving, headers: dict[str, str]
) -> None:
    with client_of(server, ADDRESS) as remote:
        for area, path in ROUTES:
            answer = remote.post(path, headers=headers, content=VERBOSE)
            assert_refused(answer, ONLY_HERE.format(CHANGES[area]))


@pytest.mark.parametrize("headers", [*STRANGE, *FOREIGN])
@OVER_HTTP
def test_a_stranger_may_read(http: httpx.Client, headers: Mapping[str, str]) -> None:
    for path in ("/v2/logging", "/v2/trace/setting", "/v2/cudasharedmemory/status"):
        assert http.get(path, headers=headers).status_code == 200
    assert http.post("/v2/repository/index", json={}, headers=headers).status_code == 200
    echo = {"inputs": [{"name": "INPUT", "datatype": "BYTES", "shape": [1], "data": ["hi"]}]}
    assert http.post("/v2/models/single/infer", json=echo, headers=headers).status_code == 200


@pytest.mark.parametrize("headers", OWN)
@OVER_HTTP
def test_changes_of_this_machine_are_answered(
    http: httpx.Client, headers: Mapping[str, str]
) -> None:
    assert http.post(LOGGING, content=VERBOSE, headers=headers).json()["log_verbose_level"] == 1
    assert http.post(LOGGING, json={"log_verbose_level": 0}, headers=headers).status_code == 200
    assert http.post(LOAD, headers=headers).status_code == 200
    unload = LOAD.replace("load", "unload")
    assert http.post(unload, headers=headers).status_code == 200


@OVER_HTTP
def test_a_client_of_http_1_0_needs_no_host(server: Serving) -> None:
    for more, status in (("", 200), ("Via: 1.1 a\r\n", 403)):
        with Connection(server.ports["http"]) as client:
            client.send(f"POST {LOAD} HTTP/1.0\r\nContent-Length: 0\r\n{more}\r\n".encode())
            assert client.answer().status == status


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("path", [LOAD, LOGGING])
@pytest.mark.parametrize("header", ["Via: 1.1 proxy", "Origin: null"])
@OVER_HTTP
def test_no_spelling_of_a_path_passes(server: Serving, path: str, header: str) -> None:
    for target in (path, *spellings(path).values()):
        with Connection(server.ports["http"]) as client:
            client.send(post(target, VERBOSE, header))
            assert client.answer().status in (400, 403, 404, 405), target


@pytest.mark.usefixtures("unchanged")
@OVER_HTTP
def test_a_change_is_refused_before_its_body_arrives(server: Serving) -> None:
    with Connection(server.ports["http"]) as client:
        client.send(post(LOAD, b"x" * 100_000, "Via: 1.1 proxy")[:-90_000])
        assert client.answer().status == 403


@contextmanager
def channel_to(server: Serving, host: str = "127.0.0.1", authority: str = "") -> Iterator[Any]:
    options = [("grpc.default_authority", authority)] if authority else []
    with grpc.insecure_channel(f"{host}:{server.ports['grpc']}", options) as found:
        yield found


def settings_of(path: str) -> bytes:
    """A message that changes the settings of that method."""
    if path.endswith("TraceSetting"):
        traces = service_pb2.TraceSettingRequest()
        traces.settings["trace_rate"].value.append("7")
        return traces.SerializeToString()
    logs = service_pb2.LogSettingsRequest()
    logs.settings["log_verbose_level"].uint32_param = 1
    return logs.SerializeToString()


def status_of(
    channel: Any, path: str, message: bytes = b"", metadata: Mapping[str, str] | None = None
) -> tuple[str, str]:
    """The status of an RPC, and its text."""
    pairs = [(name.lower(), value) for name, value in (metadata or {}).items()]
    try:
        channel.unary_unary(path)(message, metadata=pairs, timeout=WAIT_SECS)
    except grpc.RpcError as error:
        return error.code().name, error.details()
    return "OK", ""


CALLS = [
    *((area, path, b"") for area, path in METHODS),
    *((area, path, settings_of(path)) for area, path in SETTINGS),
]


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize(("area", "path", "message"), CALLS)
@OVER_GRPC
def test_an_rpc_of_a_stranger_that_changes_is_refused(
    server: Serving, area: Area, path: str, message: bytes
) -> None:
    expected = ("PERMISSION_DENIED", ONLY_HERE.format(CHANGES[area]))
    with channel_to(server) as channel:
        for headers in STRANGE[:3]:
            assert status_of(channel, path, message, headers) == expected
        for headers in (FOREIGN[0], FOREIGN[1], FOREIGN[3]):
            found = status_of(channel, path, message, headers)
            assert found == ("PERMISSION_DENIED", PAGE.format(shown(headers)))
    if not is_grpcio(server):
        with channel_to(server, authority="evil.example") as channel:
            assert status_of(channel, path, message) == expected
    if ADDRESS:
        with channel_to(server, ADDRESS, "localhost:8001") as channel:
            assert status_of(channel, path, message) == expected


def is_grpcio(server: Serving) -> bool:
    """Whether the transport does not know the authority of an RPC."""
    return "--grpc-transport=grpcio" in server.process.args


@pytest.mark.parametrize("authority", ["", "localhost:1", "[::1]:1", "gateway.example"])
@OVER_GRPC
def test_an_rpc_of_this_machine_that_changes_is_answered(server: Serving, authority: str) -> None:
    load = service_pb2.RepositoryModelLoadRequest(model_name="repeat").SerializeToString()
    with channel_to(server, authority=authority) as channel:
        assert status_of(channel, f"{SERVICE}/RepositoryModelLoad", load)[0] == "OK"
        assert status_of(channel, f"{SERVICE}/RepositoryModelUnload", load)[0] == "OK"
        for _, path in SETTINGS:
            assert status_of(channel, path, settings_of(path))[0] == "OK"
    reset = {"log_verbose_level": 0}
    assert httpx.post(f"{server.http}{LOGGING}", json=reset).status_code == 200
    assert httpx.post(f"{server.http}/v2/trace/setting", json={"trace_rate": None}).is_success


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param(ADDRESS, marks=needs_address)])
@OVER_GRPC
def test_an_rpc_of_a_stranger_may_read_settings(server: Serving, host: str) -> None:
    with channel_to(server, host) as channel:
        for headers in (*STRANGE[:3], *FOREIGN[:2]):
            for _, path in SETTINGS:
                assert status_of(channel, path, metadata=headers)[0] == "OK"
            assert status_of(channel, f"{SERVICE}/RepositoryIndex", b"", headers)[0] == "OK"


def preface_and_rpc(path: str, message: bytes) -> bytes:
    """A connection with one RPC, as a client sends it."""
    fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "localhost"}
    more = {"te": "trailers", "content-type": "application/grpc"}
    block = Encoder().encode(list((fields | more).items()))
    framed = struct.pack(">BL", 0, len(message)) + message
    frames = (
        SettingsFrame(0),
        HeadersFrame(1, block, flags=("END_HEADERS",)),
        DataFrame(1, framed, flags=("END_STREAM",)),
    )
    return PREFACE + b"".join(frame.serialize() for frame in frames)


@needs_address
@pytest.mark.usefixtures("unchanged")
@OVER_GRPC
def test_a_stranger_that_resets_its_connection_is_no_client_of_this_machine(
    server: Serving,
) -> None:
    """The server accepts a connection that has no address any more, and reads its request."""
    sent = {
        "http": post(LOGGING, VERBOSE),
        "grpc": preface_and_rpc(f"{SERVICE}/LogSettings", settings_of("LogSettings")),
    }
    processes = [server.process.pid, *frontends_of(server.process.pid)]
    for pid in processes:
        os.kill(pid, signal.SIGSTOP)
    try:
        for wire, data in sent.items():
            client = socket.create_connection((ADDRESS, server.ports[wire]), WAIT_SECS)
            client.sendall(data)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()
    finally:
        for pid in processes:
            os.kill(pid, signal.SIGCONT)
    assert httpx.get(f"{server.http}/v2/health/live").status_code == 200


@OVER_GRPC
def test_an_open_server_answers_every_machine_but_no_foreign_page(open_server: Serving) -> None:
    hosts = ["127.0.0.1", *([ADDRESS] if ADDRESS else [])]
    for host in hosts:
        with client_of(open_server, host) as client:
            for headers in ({}, *STRANGE):
                assert client.post(LOGGING, content=VERBOSE, headers=headers).status_code == 200
                assert client.post(LOAD, headers=headers).status_code == 200
            for headers in FOREIGN:
                assert_refused(client.post(LOAD, headers=headers), PAGE.format(shown(headers)))
        with channel_to(open_server, host, "other.example") as channel:
            for _, path, message in CALLS:
                assert status_of(channel, path, message, STRANGE[0])[0] != "PERMISSION_DENIED"
                refused = status_of(channel, path, message, FOREIGN[0])
                assert refused == ("PERMISSION_DENIED", PAGE.format(shown(FOREIGN[0])))


@OVER_HTTP
def test_the_log_names_the_open_areas(server: Serving, open_server: Serving) -> None:
    assert "control open" not in server.text
    areas = "shared-memory,model-repository,trace,logging"
    (line,) = [each for each in open_server.log if "control open" in each]
    assert f"control open areas={areas}" in line
