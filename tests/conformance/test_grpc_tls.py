"""gRPC over TLS, with and without certificates of the clients; a refused client harms no other."""

import socket
import ssl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tritonclient.grpc import InferenceServerClient
from tritonclient.utils import InferenceServerException

from gateway.tls.certificates import LOOK_SECS
from tests.certificates import Authority, Certificate, replace_files
from tests.conformance.models import REPEAT, identity
from tests.conformance.tls import stub
from tests.rpc import connected, infer_request, streaming
from tests.serving import WAIT_SECS, Serving, serving, wait_until, write_model

TRANSPORTS = ("hyper", "grpcio")
LARGE = "x" * (1 << 20)
SOON_SECS = 5.0


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates") / "stranger")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder, "single", identity("BYTES", "1"))
    write_model(folder, "repeat", REPEAT)
    return folder


def flags(own: Certificate, *more: str) -> Sequence[str]:
    return (f"--grpc-server-cert={own.cert}", f"--grpc-server-key={own.key}", *more)


@contextmanager
def ending_well(models: Path, *flags: str) -> Iterator[Serving]:
    with serving(models, *flags) as server:
        yield server
    assert server.process.returncode == 0
    assert "Traceback" not in server.text


@pytest.fixture(scope="module", params=TRANSPORTS)
def server(request: pytest.FixtureRequest, models: Path, own: Certificate) -> Iterator[Serving]:
    """Shows a certificate, and asks for none."""
    transport = f"--grpc-transport={request.param}"
    with ending_well(models, transport, "--grpc-use-ssl=true", *flags(own)) as found:
        yield found


@pytest.fixture(scope="module", params=TRANSPORTS)
def mutual(
    request: pytest.FixtureRequest, models: Path, own: Certificate, authority: Authority
) -> Iterator[Serving]:
    """A server that accepts clients with a certificate of the authority."""
    transport = f"--grpc-transport={request.param}"
    asked = ("--grpc-use-ssl-mutual=true", f"--grpc-root-cert={authority.root}")
    with ending_well(models, transport, *flags(own, *asked)) as found:
        yield found


@contextmanager
def client(
    server: Serving, authority: Authority, mine: Certificate | None = None
) -> Iterator[InferenceServerClient]:
    with InferenceServerClient(
        server.grpc,
        ssl=True,
        root_certificates=str(authority.root),
        private_key=None if mine is None else str(mine.key),
        certificate_chain=None if mine is None else str(mine.cert),
        channel_args=[("grpc.use_local_subchannel_pool", 1)],
    ) as found:
        yield found


def answered(stub: Any, text: str = "x") -> bool:
    answer = stub.ModelInfer(infer_request("single", INPUT=text), timeout=WAIT_SECS)
    return bool(answer.raw_output_contents[0][4:] == text.encode())


def refused(client: InferenceServerClient) -> bool:
    with pytest.raises(InferenceServerException) as caught:
        client.is_server_live(client_timeout=SOON_SECS)
    return caught.value.status() == "StatusCode.UNAVAILABLE"


@contextmanager
def neighbour(
    server: Serving, authority: Authority, mine: Certificate | None = None
) -> Iterator[None]:
    """A client with a stream from before the block, which is still served after it."""
    with stub(server, authority, mine) as found, streaming(found) as rpc:
        rpc.ask(infer_request("single", "before", INPUT="x"))
        assert rpc.answer().infer_response.id == "before"
        yield
        rpc.ask(infer_request("single", "after", INPUT="x"))
        assert rpc.answer().infer_response.id == "after"
        assert answered(found)


def test_clients_that_know_the_authority_are_served(server: Serving, authority: Authority) -> None:
    with client(server, authority) as found:
        assert found.is_server_live()
        assert found.is_model_ready("single")
    with stub(server, authority) as found, streaming(found) as rpc:
        assert answered(found, LARGE)
        rpc.ask(*(infer_request("repeat", str(n), text_input="x", n=3) for n in range(4)))
        assert len(rpc.rest()) == 12


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_the_protocol_that_is_agreed_on_is_http_2(
    server: Serving, authority: Authority, version: ssl.TLSVersion
) -> None:
    context = ssl.create_default_context(cafile=str(authority.root))
    context.set_alpn_protocols(["http/1.1", "h2"])
    context.minimum_version = context.maximum_version = version
    with session(server, context) as found:
        assert found.selected_alpn_protocol() == "h2"
        assert found.version() == version.name.replace("_", ".")


@pytest.mark.parametrize("offered", [[], ["http/1.1"]])
def test_a_client_that_does_not_negotiate_http_2_is_dropped(
    server: Serving, authority: Authority, offered: list[str]
) -> None:
    context = ssl.create_default_context(cafile=str(authority.root))
    if offered:
        context.set_alpn_protocols(offered)
    with neighbour(server, authority), session(server, context) as found:
        found.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        assert ended(found)


def test_a_client_of_another_authority_refuses_the_server(
    server: Serving, authority: Authority, stranger: Authority
) -> None:
    with neighbour(server, authority), client(server, stranger) as found:
        assert refused(found)


def test_a_client_without_tls_is_refused(server: Serving, authority: Authority) -> None:
    with neighbour(server, authority), InferenceServerClient(server.grpc) as found:
        assert refused(found)


@pytest.mark.parametrize(
    "nonsense",
    [b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)), b"\x16\x03\x01\xff\xff" + b"x" * 70_000],
)
def test_bytes_that_are_no_tls_end_their_connection(
    server: Serving, authority: Authority, nonsense: bytes
) -> None:
    with neighbour(server, authority), connection(server) as found:
        found.sendall(nonsense)
        assert ended(found)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_client_with_tls_is_refused_where_there_is_none(
    models: Path, authority: Authority, transport: str
) -> None:
    with (
        ending_well(models, f"--grpc-transport={transport}") as server,
        connected(server.grpc) as plain,
        client(server, authority) as found,
    ):
        assert refused(found)
        assert answered(plain)


def test_clients_with_a_certificate_are_served(mutual: Serving, authority: Authority) -> None:
    mine = authority.issue("mine")
    with client(mutual, authority, mine) as found:
        assert found.is_server_live()
    with neighbour(mutual, authority, mine):
        pass


def test_clients_without_a_certificate_are_refused(mutual: Serving, authority: Authority) -> None:
    mine = authority.issue("mine")
    with neighbour(mutual, authority, mine), client(mutual, authority) as found:
        assert refused(found)


def test_a_certificate_of_another_authority_is_refused(
    mutual: Serving, authority: Authority, stranger: Authority
) -> None:
    mine, other = authority.issue("mine"), stranger.issue("other")
    with neighbour(mutual, authority, mine), client(mutual, authority, other) as found:
        assert refused(found)


def test_a_certificate_is_replaced_without_a_restart(
    server: Serving, own: Certificate, authority: Authority
) -> None:
    context = authority.client()
    context.set_alpn_protocols(["h2"])

    def serial() -> str:
        with session(server, context) as found:
            return str(found.getpeercert()["serialNumber"])  # type: ignore[index]

    before = serial()
    with neighbour(server, authority):
        replace_files(own, authority.issue("replaced"))
        wait_until(lambda: serial() != before, "new certificate", LOOK_SECS + 1.0)
        with stub(server, authority) as found:
            assert answered(found)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_half_a_handshake_does_not_hold_up_the_end(
    models: Path, own: Certificate, authority: Authority, transport: str
) -> None:
    asked = (f"--grpc-transport={transport}", "--grpc-use-ssl=true", *flags(own))
    context = ssl.create_default_context(cafile=str(authority.root))
    context.set_alpn_protocols(["h2"])
    with ending_well(models, *asked) as server, stub(server, authority) as idle:
        assert answered(idle)
        with connection(server) as silent, connection(server) as half:
            half.sendall(b"\x16\x03\x01\x02\x00\x01")
            with session(server, context):
                server.begin_stop()
                assert server.wait_ended(WAIT_SECS) == 0
            assert ended(silent)
            assert ended(half)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_files_that_do_not_fit_are_one_clear_line(
    models: Path, own: Certificate, authority: Authority, transport: str
) -> None:
    other = authority.issue("another")
    asked = ("--grpc-use-ssl=true", f"--grpc-server-cert={own.cert}")
    server = Serving(
        models, (f"--grpc-transport={transport}", *asked, f"--grpc-server-key={other.key}")
    )
    assert server.wait_ended() == 1
    assert server.log[-1].startswith(f"sluice: --grpc-server-key '{other.key}' is not the key of ")
    assert "Traceback" not in server.text


def test_mutual_tls_without_an_authority_is_one_clear_line(models: Path, own: Certificate) -> None:
    server = Serving(models, ("--grpc-use-ssl-mutual=true", *flags(own)))
    assert server.wait_ended() == 1
    needed = "--grpc-use-ssl-mutual needs --grpc-root-cert, the path of a PEM file; none is given"
    assert server.said == [f"sluice: {needed}"]


@contextmanager
def connection(server: Serving) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", server.ports["grpc"]), WAIT_SECS) as found:
        yield found


@contextmanager
def session(server: Serving, context: ssl.SSLContext) -> Iterator[ssl.SSLSocket]:
    plain = connection(server)
    with plain as wire, context.wrap_socket(wire, server_hostname="localhost") as found:
        yield found


def ended(found: socket.socket) -> bool:
    """Whether the server ends the connection, possibly after some bytes."""
    try:
        while found.recv(65536):
            pass
    except (ConnectionResetError, ssl.SSLError):
        pass
    return True
