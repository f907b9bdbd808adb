"""Addresses of gRPC: IPv6, Unix sockets, shared and taken ports, and their log lines."""

import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from tritonclient.grpc import InferenceServerClient

from tests.chatting import CHATTING
from tests.conformance.models import identity
from tests.rpc import connected, infer_request
from tests.serving import ROOT, WAIT_SECS, Serving, serving, wait_until, write_model

IN_USE = "Address already in use"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder, "single", identity("BYTES", "1"))
    return folder


@pytest.fixture(params=["hyper", "grpcio"])
def transport(request: pytest.FixtureRequest) -> str:
    return f"--grpc-transport={request.param}"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "grpc.sock"


@contextmanager
def ending_well(
    models: Path, *flags: str, environment: Mapping[str, str] | None = None
) -> Iterator[Serving]:
    with serving(models, *flags, environment=environment) as server:
        yield server
    assert server.process.returncode == 0
    assert "Traceback" not in server.text


def refused(models: Path, *flags: str) -> str:
    """The last line of a server that cannot start."""
    server = Serving(models, flags)
    assert server.wait_ended() == 1
    assert "Traceback" not in server.text
    return server.log[-1]


def answered(target: str) -> bool:
    with connected(target) as stub:
        answer = stub.ModelInfer(infer_request("single", INPUT="x"), timeout=WAIT_SECS)
    return bool(answer.raw_output_contents[0][4:] == b"x")


def announced(server: Serving) -> str:
    """The lines on gRPC that it prints."""
    return next(line.split()[1] for line in server.log if line.startswith("    grpc  "))


def test_a_unix_socket_is_there_while_the_server_is_and_its_clients_are_of_this_machine(
    models: Path, path: Path, transport: str
) -> None:
    with ending_well(models, transport, f"--grpc-address=unix:{path}") as server:
        assert stat.S_ISSOCK(path.stat().st_mode)
        assert answered(f"unix:{path}")
        with InferenceServerClient(f"unix:{path}") as client:
            assert client.is_server_ready()
            found = client.update_log_settings({"log_verbose_level": 1})
        assert found.settings["log_verbose_level"].uint32_param == 1
        assert announced(server) == f"unix:{path}"
        assert f"Started GRPCInferenceService at unix:{path}" in server.text
    assert not path.exists()


def test_an_absolute_path_may_stand_behind_two_slashes(
    models: Path, path: Path, transport: str
) -> None:
    with ending_well(models, transport, f"--grpc-address=unix://{path}") as server:
        assert announced(server) == f"unix:{path}"
        assert answered(f"unix://{path}")


def test_a_socket_that_a_dead_server_has_left_is_replaced(
    models: Path, path: Path, transport: str
) -> None:
    address = f"--grpc-address=unix:{path}"
    server = Serving(models, (transport, address)).wait_ready()
    server.stop(signal.SIGKILL)
    assert path.exists()
    with ending_well(models, transport, address):
        assert answered(f"unix:{path}")
    assert not path.exists()


def test_a_socket_in_use_is_refused_and_stays(models: Path, path: Path, transport: str) -> None:
    address = f"--grpc-address=unix:{path}"
    with ending_well(models, transport, address):
        said = f"sluice: cannot listen on unix:{path}: Address already in use"
        assert refused(models, transport, address) == said
        assert answered(f"unix:{path}")


def test_what_is_no_socket_is_refused_and_stays(models: Path, path: Path, transport: str) -> None:
    path.write_text("precious")
    said = refused(models, transport, f"--grpc-address=unix:{path}")
    reason = "the path exists and is not a socket; remove it"
    assert said == f"sluice: cannot listen on unix:{path}: {reason}"
    assert path.read_text() == "precious"


@pytest.mark.parametrize(
    ("name", "why"),
    [("absent/grpc.sock", "No such file or directory"), ("x" * 120, "AF_UNIX path too long")],
)
def test_an_unusable_path_fails_with_one_clear_line(
    models: Path, tmp_path: Path, transport: str, name: str, why: str
) -> None:
    path = tmp_path / name
    said = refused(models, transport, f"--grpc-address=unix:{path}")
    assert said == f"sluice: cannot listen on unix:{path}: {why}"


def test_a_successor_may_take_the_socket_while_the_server_ends(
    models: Path, path: Path, transport: str
) -> None:
    address = f"--grpc-address=unix:{path}"
    write_model(path.parent / "slow", "slow", identity("BYTES", "1", delay_us=2_000_000))
    slow = path.parent / "slow"
    with ending_well(slow, transport, address) as old, connected(f"unix:{path}") as stub:
        last = stub.ModelInfer.future(infer_request("slow", INPUT="last"), timeout=WAIT_SECS)
        old.wait_metric("gateway_requests_in_flight", "slow", 1)
        old.begin_stop()
        wait_until(lambda: not path.exists(), "the socket is gone")
        with ending_well(models, transport, address):
            assert last.result().raw_output_contents[0][4:] == b"last"
            assert old.wait_ended() == 0
            assert path.exists()
            assert answered(f"unix:{path}")


@pytest.mark.skipif(not socket.has_ipv6, reason="this machine has no IPv6")
@pytest.mark.parametrize(
    ("address", "shown", "targets"),
    [
        ("::1", "[::1]", ["[::1]"]),
        ("[::1]", "[::1]", ["[::1]"]),
        ("::", "localhost", ["[::1]", "127.0.0.1", "localhost"]),
    ],
)
def test_ipv6_is_served(
    models: Path, transport: str, address: str, shown: str, targets: list[str]
) -> None:
    with ending_well(models, transport, f"--grpc-address={address}") as server:
        port = server.ports["grpc"]
        assert announced(server) == f"{shown}:{port}"
        host = address.strip("[]")
        assert f"Started GRPCInferenceService at [{host}]:{port}" in server.text
        for target in targets:
            assert answered(f"{target}:{port}")


@pytest.mark.skipif(not socket.has_ipv6, reason="this machine has no IPv6")
def test_a_port_of_ipv6_in_use_is_one_clear_line(models: Path, transport: str) -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as other:
        port = other.getsockname()[1]
        said = refused(models, transport, "--grpc-address=::1", f"--grpc-port={port}")
    assert said == f"sluice: cannot listen on [::1]:{port}: Address already in use"


def test_an_address_of_another_machine_is_one_clear_line(models: Path, transport: str) -> None:
    said = refused(models, transport, "--grpc-address=192.0.2.1", "--grpc-port=0")
    assert said.startswith("sluice: cannot listen on 192.0.2.1:0: Cannot assign")
    said = refused(models, transport, "--grpc-address=no.such.host.invalid")
    assert said.startswith("sluice: cannot listen on no.such.host.invalid:0: ")


def test_a_port_is_shared_only_if_each_server_says_so(models: Path, transport: str) -> None:
    shared = (transport, "--reuse-grpc-port=true")
    with ending_well(models, *shared, "--id=first") as first:
        port = f"--grpc-port={first.ports['grpc']}"
        said = refused(models, transport, port)
        assert said.endswith(f"cannot listen on 127.0.0.1:{first.ports['grpc']}: {IN_USE}")
        with ending_well(models, *shared, port, "--id=second") as second:
            assert second.ports["grpc"] == first.ports["grpc"]
            wait_until(lambda: len({name(first.grpc) for _ in range(10)}) == 2, "both are asked")
        assert {name(first.grpc) for _ in range(10)} == {"first"}


def test_a_port_that_is_not_shared_is_no_ones_else(models: Path, transport: str) -> None:
    with ending_well(models, transport) as first:
        port = first.ports["grpc"]
        said = refused(models, transport, "--reuse-grpc-port=true", f"--grpc-port={port}")
        assert said == f"sluice: cannot listen on 127.0.0.1:{port}: {IN_USE}"


@pytest.mark.parametrize("address", ["unix:{path}", "::1", "127.0.0.1"])
def test_the_chat_finds_what_is_announced(
    path: Path, environment: dict[str, str], transport: str, address: str
) -> None:
    folder = path.parent / "models"
    write_model(folder, "chatty", CHATTING)
    address = address.format(path=path)
    flags = (transport, f"--grpc-address={address}")
    with ending_well(folder, *flags, environment=environment) as server:
        found = subprocess.run(
            [
                *(sys.executable, "-m", "gateway", "chat", "--url", announced(server)),
                *("--once", "hello"),
            ],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env={**os.environ, "NO_COLOR": "1"},
            timeout=WAIT_SECS * 3,
            stdin=subprocess.DEVNULL,
        )
        assert (found.returncode, found.stderr) == (0, "")
        assert found.stdout.strip()


def name(target: str) -> str:
    """The name of the server that answers a new connection."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    with InferenceServerClient(target, channel_args=options) as client:
        return str(client.get_server_metadata().name)
