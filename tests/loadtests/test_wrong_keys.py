"""The load of wrong keys, and the latency of a client next to it."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from loadtests import wrong_keys
from loadtests.support.http_client import Address, post
from loadtests.support.servers import LoadTestFailed
from loadtests.wrong_keys import CONNECTIONS, MOST_UNANSWERED, flood, p99

REQUEST = post("/", Address(1), b"{}")


SLOW_SECS = 0.05


class Answers(BaseHTTPRequestHandler):
    """Answers each request; one with the path `/no` is refused, and each N-th of `/N` is slow."""

    protocol_version = "HTTP/1.1"
    count = 0

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.count += 1
        if self.path[1:].isdigit() and self.count % int(self.path[1:]) == 0:
            time.sleep(SLOW_SECS)
        self.send_response(401 if self.path == "/no" else 200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Write no line."""


@contextmanager
def answering() -> Iterator[Address]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Address(server.server_address[1])
        server.shutdown()


def received(client: socket.socket, size: int) -> bytes:
    """That many bytes; a signal ends a read of all of them at once early."""
    found = b""
    while len(found) < size and (piece := client.recv(size - len(found))):
        found += piece
    return found


def test_requests_beyond_those_without_an_answer_are_not_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wrong_keys, "RATE", 1_000_000)
    begun, ended = threading.Event(), threading.Event()
    with socket.create_server(("127.0.0.1", 0), backlog=CONNECTIONS) as silent:
        address = Address(silent.getsockname()[1])
        flooding = threading.Thread(target=flood, args=(address, REQUEST, begun, ended))
        flooding.start()
        clients = [silent.accept()[0] for _ in range(CONNECTIONS)]
        most = REQUEST * MOST_UNANSWERED
        for each in clients:
            assert received(each, len(most)) == most
        time.sleep(0.2)
        ended.set()
        flooding.join()
        for each in clients:
            with each:
                assert each.recv(1) == b""


def test_the_latency_is_that_of_the_slowest_hundredth() -> None:
    with answering() as address:
        assert p99(address, post("/50", address, b"{}"), secs=0.5) > SLOW_SECS
        assert p99(address, post("/250", address, b"{}"), secs=0.5) < SLOW_SECS
        with pytest.raises(LoadTestFailed, match="has refused the client with a key"):
            p99(address, post("/no", address, b"{}"), secs=0.1)
