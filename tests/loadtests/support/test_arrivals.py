"""Arrivals of answers: a client that reads late knows when the kernel had its answer."""

import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from loadtests.support.arrivals import StampedConnection

PAUSE_NS = 100_000_000
TRIES = 50
"""The kernel begins to stamp some time after the first option is set."""


class Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, *_: object) -> None:
        """Write no line."""


@pytest.fixture
def connection() -> Iterator[StampedConnection]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        found = StampedConnection("127.0.0.1", server.server_address[1], timeout=10)
        yield found
        found.close()
        server.shutdown()


def test_a_late_reader_knows_when_its_answer_arrived(connection: StampedConnection) -> None:
    for _ in range(TRIES):
        since_ns = time.perf_counter_ns()
        connection.request("GET", "/")
        time.sleep(PAUSE_NS / 1e9)
        read_ns = time.perf_counter_ns()
        assert connection.getresponse().read() == b"ok"
        if connection.arrived_ns < read_ns:
            break
    assert since_ns < connection.arrived_ns < read_ns


def test_a_connection_without_an_answer_has_no_arrival(connection: StampedConnection) -> None:
    assert connection.arrived_ns == 0
