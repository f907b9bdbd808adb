"""A collector of OpenTelemetry that counts spans and drops them, in little processor time.

A real one runs on another machine. Here it shares the CPUs with the server that is measured.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from socketserver import BaseRequestHandler, StreamRequestHandler, ThreadingTCPServer
from threading import Thread

HEAD_END = b"\r\n"
LENGTH = b"content-length:"
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/x-protobuf\r\ncontent-length: 0\r\n\r\n"
OF_REQUEST = b"REQUEST_END"
"""The name of an event that each executed request has once."""


@dataclass
class Collected:
    """The URL of a collector, and the number of requests whose spans it has got."""

    url: str
    requests: int = 0


@contextmanager
def collecting() -> Iterator[Collected]:
    """A collector on a free port of this machine."""

    class Messages(StreamRequestHandler):
        def handle(self) -> None:
            while (length := _length(iter(self.rfile.readline, b""))) is not None:
                found.requests += self.rfile.read(length).count(OF_REQUEST)
                self.wfile.write(ANSWER)

    handler: type[BaseRequestHandler] = Messages
    with ThreadingTCPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        found = Collected(f"http://127.0.0.1:{server.server_address[1]}/v1/traces")
        Thread(target=server.serve_forever, daemon=True).start()
        yield found
        server.shutdown()


def _length(lines: Iterator[bytes]) -> int | None:
    """The length in the head of the next request; None at the end of the connection."""
    length = None
    for line in lines:
        if line == HEAD_END:
            break
        if line.lower().startswith(LENGTH):
            length = int(line[len(LENGTH) :])
    return length
