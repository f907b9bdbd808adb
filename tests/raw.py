"""HTTP in literal bytes: what a client library would hide, a test may send and see."""

import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.serving import WAIT_SECS, wait_until


@dataclass(frozen=True, slots=True)
class Answer:
    """A response: its head as it came, and its body without the framing."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)


class Connection:
    """One connection to a port of this machine; no wait takes longer than WAIT_SECS."""

    def __init__(self, port: int, receive_buffer: int = 0) -> None:
        self.socket = socket.socket()
        if receive_buffer:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(WAIT_SECS)
        self.socket.connect(("127.0.0.1", port))
        self._file = self.socket.makefile("rb")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def send(self, data: bytes) -> None:
        """Send all of it."""
        self.socket.sendall(data)

    def send_as_taken(self, data: bytes) -> None:
        """Send until the server has had enough: it may answer and close before the end."""
        try:
            self.send(data)
        except (BrokenPipeError, ConnectionResetError):
            return

    def wait_taken(self) -> None:
        """As the function, for this connection."""
        wait_taken(self.socket)

    def ask(self, path: str, body: Any, *headers: str) -> None:
        """Send a POST with a JSON body."""
        type_ = "Content-Type: application/json"
        self.send(post(path, json.dumps(body).encode(), type_, *headers))

    def line(self) -> bytes:
        """The next line; empty at the end of the connection."""
        return self._file.readline()

    def read(self, count: int) -> bytes:
        """The next `count` bytes, or all before the end of the connection."""
        return self._file.read(count)

    def head(self) -> Answer:
        """Status and headers; the body is left to be read."""
        status = int(self.line().split()[1])
        headers: dict[str, str] = {}
        while line := self.line().rstrip(b"\r\n"):
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.lower()] = value.strip()
        return Answer(status, headers, b"")

    def chunk(self) -> bytes:
        """The next chunk of a chunked body; empty for the last one."""
        size = int(self.line(), 16)
        data = self.read(size)
        self.line()
        return data

    def rest(self) -> bytes:
        """A chunked body to its end."""
        return b"".join(iter(self.chunk, b""))

    def answer(self) -> Answer:
        """A whole response."""
        head = self.head()
        if head.headers.get("transfer-encoding") == "chunked":
            body = self.rest()
        else:
            body = self.read(int(head.headers.get("content-length", "0")))
        return Answer(head.status, head.headers, body)

    @property
    def ended(self) -> bool:
        """Wait for the server to close the connection; False if it sends something instead."""
        try:
            return self._file.read(1) == b""
        except ConnectionResetError:
            return True

    def reset(self) -> None:
        """Leave without a goodbye: the server sees a connection reset."""
        linger = (1).to_bytes(4, "little") + (0).to_bytes(4, "little")
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.close()

    def close(self) -> None:
        """Leave."""
        self._file.close()
        self.socket.close()


def wait_taken(connection: socket.socket) -> None:
    """Wait until the server has accepted the connection, and read all that was sent."""
    (host, own), (_, other) = connection.getsockname(), connection.getpeername()
    address = socket.inet_aton(host)[::-1].hex().upper()
    ends = [f"{address}:{port:04X}" for port in (other, own)]

    def is_taken() -> bool:
        rows = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines())
        found, *_ = [row for row in rows if row[1:3] == ends]  # a table that changes repeats some
        _, unread = found[4].split(":")
        inode = found[9]  # 0 before it is accepted
        return inode != "0" and int(unread, 16) == 0

    wait_until(is_taken, "the server has read it")


def post(path: str, body: bytes, *headers: str) -> bytes:
    """A POST request with a Content-Length."""
    head = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*head, "", ""]).encode() + body


def get(path: str, *headers: str) -> bytes:
    """A GET request."""
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: localhost", *headers, "", ""]).encode()
