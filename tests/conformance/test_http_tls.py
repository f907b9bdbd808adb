"""HTTP over TLS: clients of each kind, clients that do not fit, and certificates that change."""

import json
import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
import tritonclient.http

from gateway.tls.certificates import LOOK_SECS
from tests.certificates import Authority, Certificate, replace_files
from tests.conformance.keys import ECHO, INFER
from tests.conformance.models import REPEAT, identity
from tests.conformance.openai_models import contract, piece
from tests.conformance.tls import flags, https, metric, session, stub
from tests.raw import Connection
from tests.rpc import infer_request
from tests.serving import WAIT_SECS, Serving, serving, wait_until, write_model

pytestmark = pytest.mark.runs_on("frontends")

NOTICED_SECS = LOOK_SECS + 1.0
FAILURES = "gateway_certificates_reload_failures_total"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder, "single", identity("BYTES", "1"))
    write_model(folder, "repeat", REPEAT)
    write_model(folder, "talking", contract(piece("a"), piece("b"), piece(reason="stop")))
    return folder


@pytest.fixture(scope="module")
def server(
    models: Path, environment: dict[str, str], server_kind: None, own: Certificate
) -> Iterator[Serving]:
    """Over TLS on both wires; at its end some handshakes have not ended."""
    both = (*flags("http", own), *flags("grpc", own))
    with serving(models, *both, environment=environment) as started:
        yield started
        with Connection(started.ports["http"]) as silent, Connection(started.ports["http"]) as half:
            half.send(b"\x16\x03\x01\x02\x00\x01")
            assert started.stop() == 0
            with suppress(ConnectionResetError):  # the end of a handshake may be a reset
                assert silent.line() == b""
    assert "Traceback" not in started.text


@pytest.fixture(scope="module")
def context(authority: Authority) -> ssl.SSLContext:
    return authority.client()


@pytest.fixture(scope="module")
def http(server: Serving, context: ssl.SSLContext) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=https(server), verify=context, timeout=WAIT_SECS) as client:
        yield client


def test_requests_and_streams_are_answered(http: httpx.Client) -> None:
    for _ in range(3):
        answer = http.post(INFER, json=ECHO)
        assert answer.json()["outputs"][0]["data"] == ["hi"]
    body = {"text_input": "x", "n": 5, "delay_us": 1000}
    with http.stream("POST", "/v2/models/repeat/generate_stream", json=body) as stream:
        events = [line for line in stream.iter_lines() if line.startswith("data: ")]
    assert [json.loads(each[6:])["text_output"] for each in events] == ["x"] * 5
    large = {"inputs": [{**ECHO["inputs"][0], "data": ["y" * (4 << 20)]}]}
    assert http.post(INFER, json=large).json()["outputs"][0]["data"] == large["inputs"][0]["data"]


def test_openais_client_is_served(server: Serving, context: ssl.SSLContext) -> None:
    with (
        httpx.Client(verify=context) as http,
        openai.OpenAI(base_url=f"{https(server)}/v1", api_key="x", http_client=http) as client,
    ):
        chunks = client.chat.completions.create(
            model="talking", messages=[{"role": "user", "content": "hi"}], stream=True
        )
        texts = [each.choices[0].delta.content for each in chunks]
    assert texts[:2] == ["a", "b"]


def test_tritons_client_is_served(server: Serving, authority: Authority) -> None:
    with tritonclient.http.InferenceServerClient(
        f"localhost:{server.ports['http']}", ssl=True, ssl_options={"ca_certs": str(authority.root)}
    ) as client:
        asked = tritonclient.http.InferInput("INPUT", [1], "BYTES")
        asked.set_data_from_numpy(np.array(["hi"], np.object_))
        assert client.infer("single", [asked]).as_numpy("OUTPUT") == [b"hi"]


def test_curl_is_served_and_refuses_another_authority(
    server: Serving, authority: Authority, tmp_path: Path
) -> None:
    other = Authority(tmp_path / "other")
    url = f"https://localhost:{server.ports['http']}/v2/health/ready"
    for root, status in ((authority.root, 0), (other.root, 60)):
        curl = ("curl", "--silent", "--cacert", str(root), url)
        assert subprocess.run(curl, check=False, timeout=WAIT_SECS).returncode == status


def test_the_terminal_shows_the_scheme(server: Serving) -> None:
    for port in ("http", "metrics"):
        place = [port, f"https://localhost:{server.ports[port]}"]
        assert any(line.split() == place for line in server.log)


def test_metrics_are_served_over_tls(server: Serving, context: ssl.SSLContext) -> None:
    assert metric(server, context, FAILURES) >= 0
    with Connection(server.ports["metrics"]) as client:
        client.send(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert client.answer().status == 400


def test_a_client_without_tls_gets_an_error_that_names_the_scheme(
    server: Serving, http: httpx.Client
) -> None:
    with Connection(server.ports["http"]) as client:
        client.send(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = client.answer()
    assert (answer.status, "https://" in answer.json["error"]) == (400, True)
    assert http.get("/v2/health/live").status_code == 200


def test_half_handshakes_hold_up_no_request(server: Serving, http: httpx.Client) -> None:
    halves = [socket.create_connection(("127.0.0.1", server.ports["http"])) for _ in range(100)]
    for each in halves:
        each.sendall(b"\x16\x03\x01\x02\x00\x01")
    assert http.post(INFER, json=ECHO).status_code == 200
    for each in halves:
        each.close()


def test_certificates_are_replaced_without_a_restart(
    server: Serving, own: Certificate, authority: Authority, http: httpx.Client
) -> None:
    """An open connection keeps its session; until the key has come, too, the old pair is used."""
    new, context = authority.issue("replaced"), authority.client()
    before, failures = served(server, context), metric(server, context, FAILURES)
    old = Certificate(own.cert, own.key)
    with stub(server, authority) as open_rpc:
        ask(open_rpc)
        replace_files(old, Certificate(new.cert, old.key))
        wait_until(
            lambda: metric(server, context, FAILURES) == failures + 2, "refused", NOTICED_SECS
        )
        assert served(server, context) == before
        replace_files(old, new)
        # Each connection is one of any frontend process.
        wait_until(
            lambda: not any(before & served(server, context) for _ in range(8)),
            "new certificate",
            NOTICED_SECS,
        )
        assert http.post(INFER, json=ECHO).status_code == 200
        ask(open_rpc)
        with stub(server, authority) as new_rpc:
            ask(new_rpc)
    assert metric(server, context, FAILURES) == failures + 2
    refused = [line for line in server.log if "certificates refused" in line]
    assert all("-server-key" in line and "is not the key of" in line for line in refused)


def served(server: Serving, context: ssl.SSLContext) -> set[str]:
    """The serial numbers of the certificates that new connections get."""
    found = set()
    for port in ("http", "grpc"):
        with session(server, context, port) as connection:
            found.add(str(connection.getpeercert()["serialNumber"]))  # type: ignore[index]
    return found


def ask(stub: object) -> None:
    request = infer_request("single", INPUT="x")
    assert stub.ModelInfer(request, timeout=WAIT_SECS).raw_output_contents  # type: ignore[attr-defined]
