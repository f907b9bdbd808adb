"""Listening sockets, their errors, Unix sockets."""

import socket
from pathlib import Path
from typing import Any

import pytest

from gateway.frontends.grpc.sockets import bound, peer_name, require_free
from gateway.settings import GrpcSettings, netloc
from gateway.unix_socket import SocketFile, unix_path


def at(address: str, port: int = 0, *, reuse: bool = False) -> GrpcSettings:
    return GrpcSettings(address=address, port=port, reuse_port=reuse)


def refusal(settings: GrpcSettings) -> str:
    with pytest.raises(OSError, match="cannot listen on") as caught:
        bound(settings)
    return str(caught.value)


@pytest.mark.parametrize(
    ("address", "path", "written"),
    [
        ("127.0.0.1", "", "127.0.0.1:8001"),
        ("::1", "", "[::1]:8001"),
        ("unix:/run/s", "/run/s", "unix:/run/s"),
    ],
)
def test_an_address_is_written_as_grpc_does(address: str, path: str, written: str) -> None:
    assert unix_path(address) == path
    assert netloc(address, 8001) == written


@pytest.mark.parametrize(
    ("address", "listening_at", "peer"),
    [
        (("127.0.0.1", 4000), "0.0.0.0", "ipv4:127.0.0.1:4000"),
        (("::1", 4000, 0, 0), "::", "ipv6:[::1]:4000"),
        (("::ffff:10.0.0.5", 4000, 0, 0), "::", "ipv4:10.0.0.5:4000"),
        (None, "0.0.0.0", ""),
        (None, "unix:/run/s", "unix:"),
        ("", "unix:/run/s", "unix:"),
    ],
)
def test_a_peer_is_written_as_grpc_does(address: Any, listening_at: str, peer: str) -> None:
    """The address of a client that has reset its connection is None."""
    assert peer_name(address, listening_at) == peer


def test_a_port_is_exclusive_unless_every_server_shares_it() -> None:
    with bound(at("127.0.0.1")) as first:
        port = first.getsockname()[1]
        said = f"cannot listen on 127.0.0.1:{port}: Address already in use"
        assert refusal(at("127.0.0.1", port)) == said
        assert refusal(at("127.0.0.1", port, reuse=True)) == said
    with bound(at("127.0.0.1", reuse=True)) as first:
        port = first.getsockname()[1]
        require_free(at("127.0.0.1", port, reuse=True))
        bound(at("127.0.0.1", port, reuse=True)).close()
        said = f"cannot listen on 127.0.0.1:{port}: Address already in use"
        assert refusal(at("127.0.0.1", port)) == said


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_every_address_of_ipv6_is_every_address() -> None:
    with bound(at("::")) as found:
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, found.getsockname()[1]), timeout=5).close()
    with bound(at("::1")) as found, pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", found.getsockname()[1]), timeout=5)


def test_a_unix_socket_in_use_is_refused_also_if_its_queue_is_full(tmp_path: Path) -> None:
    path = tmp_path / "s"
    said = f"cannot listen on unix:{path}: Address already in use"
    with bound(at(f"unix:{path}")):
        assert refusal(at(f"unix:{path}")) == said
    path.unlink()
    with socket.socket(socket.AF_UNIX) as busy:
        busy.bind(str(path))
        busy.listen(0)
        clients = [socket.socket(socket.AF_UNIX) for _ in range(3)]
        for client in clients:
            client.setblocking(False)
            client.connect_ex(str(path))
        assert refusal(at(f"unix:{path}")) == said
        for client in clients:
            client.close()


def test_a_stale_socket_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    bound(at(f"unix:{path}")).close()
    assert path.exists()
    with bound(at(f"unix:{path}")), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_a_file_that_is_not_a_socket_is_not_replaced(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "s"
    if kind == "file":
        path.write_text("precious")
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(tmp_path / "elsewhere")
    said = refusal(at(f"unix:{path}"))
    assert said.endswith("the path exists and is not a socket; remove it")
    assert path.is_symlink() or path.exists()


def test_checking_an_address_leaves_no_socket(tmp_path: Path) -> None:
    require_free(at(f"unix:{tmp_path / 's'}"))
    assert list(tmp_path.iterdir()) == []


def test_a_socket_file_is_removed_only_by_its_own_server(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with bound(at(f"unix:{path}")):
        SocketFile(str(path)).remove()
    assert not path.exists()
    with bound(at(f"unix:{path}")):
        old = SocketFile(str(path))
        path.rename(tmp_path / "moved")
        old.remove()  # nothing is there
        with bound(at(f"unix:{path}")):
            old.remove()
            assert path.exists()
