"""Strangers in a fleet: other secrets and certificates, other protocols, nonsense; its neighbours.

While each of them does harm, a neighbour asks a router of the fleet without a pause.
"""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from tests.certificates import Authority
from tests.conformance.models import REPEAT, identity
from tests.conformance.neighbour import Neighbour, neighbour
from tests.serving import (
    WAIT_SECS,
    Serving,
    replica,
    serving,
    static_fleet,
    wait_until,
    write_model,
)

SECRET = "0123456789abcdef" * 4
LARGE = {"name": "INPUT", "datatype": "FP32", "shape": [100_000], "data": [1] * 100_000}
NO_HANDSHAKES = (
    b"GET / HTTP/1.1\r\n\r\n" * 300,
    b"\0" * 64,
    b"\xff\xff\xff\xff\x20\0\0\0\0",
    b"\x04\0\0\0\x20\0\0\0\0none",
)
ATTEMPTS = 20


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("strangers") / "models"
    write_model(folder, "repeat", REPEAT)
    write_model(folder, "sixteen", identity("FP32", "16"))
    write_model(folder, "echo", identity("FP32"))
    return folder


@pytest.fixture(scope="module")
def nothing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository without models."""
    return tmp_path_factory.mktemp("nothing")


@pytest.fixture(scope="module")
def host(models: Path) -> Iterator[Serving]:
    with replica(models, "*") as started:
        yield started
    assert "Traceback" not in started.text


@pytest.fixture(scope="module")
def router(nothing: Path, host: Serving) -> Iterator[Serving]:
    with serving(nothing, static_fleet(host)) as started:
        yield started
    assert "Traceback" not in started.text


@pytest.fixture(scope="module")
def asking(router: Serving) -> Iterator[Neighbour]:
    with neighbour(router.grpc) as found:
        yield found


@contextmanager
def undisturbed(asking: Neighbour) -> Iterator[None]:
    """The neighbour gets answers in the block, and no error."""
    assert asking.served().errors == []
    yield
    served = asking.served()
    assert served.errors == []
    assert served.answers > 0


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--fleet-name=other",), "found fleet 'other', expected 'sluice'"),
        (("--fleet-secret-file={secret}",), "has a secret and"),
    ],
)
def test_a_stranger_is_refused_and_neighbours_are_not_affected(
    host: Serving,
    asking: Neighbour,
    nothing: Path,
    tmp_path: Path,
    flags: tuple[str, ...],
    reason: str,
) -> None:
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    own = [each.format(secret=secret) for each in flags]
    with undisturbed(asking), serving(nothing, static_fleet(host), *own) as server:
        server.wait_logged(reason)
        host.wait_logged("router refused")
        assert httpx.get(f"{server.http}/v2/models/sixteen/ready").status_code == 404


def test_strangers_certificates_are_refused_and_neighbours_are_not_affected(
    models: Path, nothing: Path, tmp_path: Path
) -> None:
    ours, theirs = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")

    def files(authority: Authority, name: str) -> tuple[str, ...]:
        own = authority.issue(name)
        pem = {"server-cert": own.cert, "server-key": own.key, "root-cert": authority.root}
        return tuple(f"--fleet-{option}={path}" for option, path in pem.items())

    with (
        replica(models, "*", "--fleet-address=0.0.0.0", *files(ours, "replica")) as host,
        serving(nothing, static_fleet(host), *files(ours, "router")) as own,
        neighbour(own.grpc) as asking,
    ):
        for strangers in (files(theirs, "stranger"), ()):
            with (
                undisturbed(asking),
                serving(nothing, static_fleet(host), *strangers) as server,
            ):
                server.wait_logged("replica not reached")
                assert httpx.get(f"{server.http}/v2/models/sixteen/ready").status_code == 404
        answer = httpx.post(f"{own.http}/v2/models/echo/infer", json={"inputs": [LARGE]})
        assert answer.status_code == 200


def test_bytes_that_are_no_handshake_drop_their_connection_and_no_other(
    host: Serving, asking: Neighbour
) -> None:
    def send(data: bytes) -> None:
        with socket.create_connection(
            ("127.0.0.1", host.own_ports["fleet"]), timeout=WAIT_SECS
        ) as client:
            client.sendall(data)
            while client.recv(4096):
                pass

    files = host.open_files
    with undisturbed(asking):
        for data in NO_HANDSHAKES * ATTEMPTS:
            send(data)
    wait_until(lambda: host.open_files <= files, "no socket of a stranger")


@contextmanager
def speaking(data: bytes) -> Iterator[tuple[int, Callable[[], int]]]:
    """A port that sends these bytes to each connection, or else closes it; their number."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as owner:
        accepted: list[socket.socket] = []

        def run() -> None:
            while True:
                try:
                    client, _ = listener.accept()
                except OSError:
                    return
                owner.callback(client.close)
                accepted.append(client)
                client.sendall(data)
                if not data:
                    client.close()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield listener.getsockname()[1], lambda: len(accepted)
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(WAIT_SECS)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n", "it speaks another protocol"),
        (b"\0" * 64, "found a frame of kind 0, expected HELLO"),
        (b"\x04\0\0\0\x20\0\0\0\0none", "HELLO cannot be read"),
        (b"", "it has disconnected during the handshake"),
    ],
    ids=["ssh", "zeros", "no hello", "closing"],
)
def test_an_address_that_speaks_something_else_is_logged_once_and_the_other_replica_serves(
    host: Serving, nothing: Path, data: bytes, reason: str
) -> None:
    with speaking(data) as (port, count):
        check_other_serves(nothing, host, port, reason, lambda: count() > 3)


def test_an_address_of_another_server_is_logged_and_the_other_replica_serves(
    host: Serving, router: Serving, nothing: Path
) -> None:
    for wire in ("http", "grpc"):
        check_other_serves(nothing, host, router.own_ports[wire], "reached", lambda: True)


def check_other_serves(
    nothing: Path, host: Serving, port: int, reason: str, is_tried: Callable[[], bool]
) -> None:
    """A router of a strange port and a replica is ready and serves, and says what is wrong."""
    flag = static_fleet(host).replace("static:", f"static:127.0.0.1:{port},")
    with serving(nothing, flag) as server:
        server.wait_logged(reason)
        with neighbour(server.grpc) as asking, undisturbed(asking):
            wait_until(is_tried, "the strange port was tried again")
        (line,) = (each for each in server.log if "replica not reached" in each)
        assert f"address=127.0.0.1:{port}" in line
        assert "connection dropped" not in server.text
        fleet = httpx.get(f"{server.http}/v2/fleet").json()
        states = [(each["address"], each["state"]) for each in fleet["replicas"]]
        assert states[0] == (f"127.0.0.1:{port}", "LOST")
        assert states[1][1] == "READY"
        assert fleet["replicas"][0]["reason"] in line
    assert server.process.returncode == 0
