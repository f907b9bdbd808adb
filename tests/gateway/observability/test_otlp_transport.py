"""Connections to a collector, and the environment that configures them."""

import base64
import itertools
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from requests import PreparedRequest, Session
from requests.auth import AuthBase

from gateway.observability.otlp import SpanExporter
from gateway.observability.span_trace import SpanTrace
from gateway.observability.traceparent import SpanIds
from gateway.span_settings import SpanSettings
from tests.certificates import Authority, Certificate
from tests.collector import answered, served

PROXIES = (
    *("HTTPS_PROXY", "https_proxy"),
    "HTTP_PROXY",
    "http_proxy",
    "ALL_PROXY",
    "all_proxy",
    "NO_PROXY",
    "no_proxy",
)
FACTORY = "opentelemetry.exporter.otlp.proto.http.trace_exporter._load_session_from_envvar"


class Requests:
    """The paths and headers of the requests that a server has got, and its connections."""

    def __init__(self) -> None:
        self.port = 0
        self.paths: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.connections: set[Any] = set()


@contextmanager
def listening(context: ssl.SSLContext | None = None, body: bytes = b"") -> Iterator[Requests]:
    """A server that takes all requests and answers each with the same body."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            found.paths.append(self.path)
            found.headers.append({name.lower(): value for name, value in self.headers.items()})
            found.connections.add(self.client_address)
            answered(self, 200, body)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    found = Requests()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.port = server.server_port
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    with served(server):
        yield found


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No proxies, no passwords, no authorities but those of a test."""
    for name in (*PROXIES, "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def send(url: str, batches: int = 1) -> int:
    """Send batches of one span; returns the spans that were dropped."""
    exporter = SpanExporter(
        SpanSettings(url=url, bsp_schedule_delay=600_000, bsp_max_export_batch_size=1)
    )
    for _ in range(batches):
        trace = SpanTrace(1, SpanIds(None), exporter.keep)
        trace.stamp("HTTP_RECV_START", 5)
        trace.refused()
    exporter.close()
    return exporter.dropped


@pytest.mark.parametrize("body", [b"", b"\n\x00"], ids=["empty", "partial success"])
def test_all_batches_are_sent_on_one_connection(body: bytes) -> None:
    with listening(body=body) as collector:
        assert send(f"http://127.0.0.1:{collector.port}/v1/traces", batches=5) == 0
    assert (collector.paths, len(collector.connections)) == (["/v1/traces"] * 5, 1)


def test_headers_are_those_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20a,x-of=b")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    with listening() as collector:
        assert send(f"http://127.0.0.1:{collector.port}/a/b") == 0
    (headers,) = collector.headers
    assert (headers["authorization"], headers["x-of"]) == ("Bearer a", "b")
    assert headers["content-type"] == "application/x-protobuf"
    assert headers["content-encoding"] == "gzip"
    assert int(headers["content-length"]) > 0
    assert collector.paths == ["/a/b"]


def test_spans_are_sent_by_the_proxy_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening() as proxy:
        monkeypatch.setenv("HTTP_PROXY", f"http://user:secret@127.0.0.1:{proxy.port}")
        assert send("http://collector.test:4318/v1/traces") == 0
    assert proxy.paths == ["http://collector.test:4318/v1/traces"]
    password = base64.b64encode(b"user:secret").decode()
    assert proxy.headers[0]["proxy-authorization"] == f"Basic {password}"


def test_a_collector_without_proxy_is_asked_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with listening() as collector:
        assert send(f"http://127.0.0.1:{collector.port}/v1/traces") == 0
    assert collector.paths == ["/v1/traces"]


def test_the_password_of_netrc_is_sent(tmp_path: Path) -> None:
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password p\n")
    with listening() as collector:
        assert send(f"http://127.0.0.1:{collector.port}/") == 0
    password = base64.b64encode(b"me:p").decode()
    assert collector.headers[0]["authorization"] == f"Basic {password}"


def serving(certificate: Certificate, clients: Path | None = None) -> ssl.SSLContext:
    """The context of a collector, which asks its clients for a certificate of an authority."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate.cert, certificate.key)
    if clients is not None:
        context.load_verify_locations(clients)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def test_certificates_are_those_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, authority: Authority, own: Certificate
) -> None:
    client = authority.issue("client")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", str(authority.root))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE", str(client.cert))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CLIENT_KEY", str(client.key))
    with listening(serving(own, authority.root)) as collector:
        assert send(f"https://localhost:{collector.port}/", batches=2) == 0
    assert len(collector.connections) == 1


def test_without_certificates_of_the_environment_those_of_requests_are_trusted(
    monkeypatch: pytest.MonkeyPatch, authority: Authority, own: Certificate
) -> None:
    monkeypatch.setattr("requests.adapters.DEFAULT_CA_BUNDLE_PATH", str(authority.root))
    with listening(serving(own)) as collector:
        assert send(f"https://localhost:{collector.port}/") == 0
    assert collector.paths == ["/"]


@contextmanager
def tunnelling() -> Iterator[tuple[int, list[bytes]]]:
    """The port of a proxy for one connection, and the first line of what it was asked."""
    lines: list[bytes] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def relay(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def serve() -> None:
        client, _ = listener.accept()
        lines.append(client.recv(65536).partition(b"\r\n")[0])
        address = ("127.0.0.1", int(lines[0].split()[1].rpartition(b":")[2]))
        with client, socket.create_connection(address) as server:
            client.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            back = threading.Thread(target=relay, args=(server, client), daemon=True)
            back.start()
            relay(client, server)
            back.join(20)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    with listener:
        yield listener.getsockname()[1], lines
    thread.join(20)


def test_a_collector_with_tls_is_asked_through_the_tunnel_of_a_proxy(
    monkeypatch: pytest.MonkeyPatch, authority: Authority, own: Certificate
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", str(authority.root))
    with listening(serving(own)) as collector, tunnelling() as (port, lines):
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{port}")
        assert send(f"https://localhost:{collector.port}/a", batches=2) == 0
    assert collector.paths == ["/a", "/a"]
    (line,) = lines
    assert line.startswith(b"CONNECT localhost:%d HTTP/1." % collector.port)


@pytest.mark.parametrize("trusted", ["", "root"], ids=["unknown authority", "no certificate"])
def test_a_collector_or_server_without_the_other_ones_trust_gets_nothing(
    monkeypatch: pytest.MonkeyPatch, authority: Authority, own: Certificate, trusted: str
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.3")
    if trusted:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", str(authority.root))
    clients = authority.root if trusted else None
    with listening(serving(own, clients)) as collector:
        assert send(f"https://localhost:{collector.port}/") == 1
    assert collector.paths == []


def test_an_invalid_url_costs_its_spans_only() -> None:
    assert send("http://[::1") == 1


class ProviderSession(Session):
    """The session of a credential provider, with a new token for each request."""

    count = 0

    def request(self, *arguments: Any, headers: Any, **fields: Any) -> Any:
        self.count += 1
        signed = {**headers, "authorization": f"token {self.count}"}
        return super().request(*arguments, headers=signed, **fields)


def session_with_tokens() -> Session:
    """A plain session with an authentication that has a new token for each request."""
    count = itertools.count(1)

    class Tokens(AuthBase):
        def __call__(self, request: PreparedRequest) -> PreparedRequest:
            request.headers["authorization"] = f"token {next(count)}"
            return request

    found = Session()
    found.auth = Tokens()
    return found


@pytest.mark.parametrize("provide", [ProviderSession, session_with_tokens])
def test_the_session_of_a_credential_provider_sends_each_request(
    monkeypatch: pytest.MonkeyPatch, provide: Callable[[], Session]
) -> None:
    monkeypatch.setattr(FACTORY, lambda *_: provide())
    rejected = b"\n\x02\x08\x01"  # partial_success { rejected_spans: 1 }
    with listening(body=rejected) as collector:
        assert send(f"http://127.0.0.1:{collector.port}/", batches=2) == 2
    assert [each["authorization"] for each in collector.headers] == ["token 1", "token 2"]
    assert len(collector.connections) == 1
