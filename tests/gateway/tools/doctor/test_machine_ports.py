"""Ports: free or taken."""

import socket

from gateway.tools.doctor.machine import port, ports
from gateway.tools.doctor.report import Health


def test_a_port_in_use_is_taken() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        number = other.getsockname()[1]
        found = port("http", "0.0.0.0", number)
        assert (found.verdict, found.found) == (Health.WARNING, "taken")
        assert "--http-port" in found.fix
    assert port("http", "0.0.0.0", number).verdict is Health.OK


def test_the_three_default_ports_are_looked_at() -> None:
    names = [each.what for each in ports()]
    assert names == ["http port 8000", "grpc port 8001", "metrics port 8002"]
