"""A proxy before a storage, which breaks chosen answers on their way."""

import http.client
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

HOST = "127.0.0.1"
KEPT = ("Content-Range", "Content-Type", "ETag", "Last-Modified", "Date")
LISTS = "list-type"
"""A part of the path of each listing of S3."""


@dataclass(slots=True)
class Answer:
    """An answer of the storage: what is sent of it, and what is said of its length."""

    status: int
    headers: dict[str, str]
    content: bytes
    length: int


Fault = Callable[[Answer], None]
"""It changes the answer, or does anything else before the answer is sent."""


def cut(after: int) -> Fault:
    """The connection ends after that many bytes of the content."""

    def fault(answer: Answer) -> None:
        answer.content = answer.content[:after]

    return fault


def shortened(by: int) -> Fault:
    """A whole answer that has fewer bytes than were asked for, and says so."""

    def fault(answer: Answer) -> None:
        answer.content = answer.content[:-by]
        answer.length = len(answer.content)

    return fault


def lengthened(by: int) -> Fault:
    """A whole answer that has more bytes than were asked for, and says so."""

    def fault(answer: Answer) -> None:
        answer.content += b"+" * by
        answer.length = len(answer.content)

    return fault


def refused(status: int, code: str) -> Fault:
    """An error of S3 in place of the answer."""

    def fault(answer: Answer) -> None:
        message = f"<Error><Code>{code}</Code><Message>no, says {code}</Message></Error>"
        answer.status, answer.content, answer.headers = status, message.encode(), {}
        answer.length = len(answer.content)

    return fault


class _Server(ThreadingHTTPServer):
    """Silent about clients that leave."""

    def handle_error(self, *_: object) -> None:
        """Log nothing."""


class FaultyProxy:
    """`paths` and `signatures` have those of all requests."""

    def __init__(self, target: str) -> None:
        self.paths: list[str] = []
        self.signatures: list[str] = []
        self._ended = threading.Event()
        self._faults: list[tuple[str, Fault]] = []
        self._target = urlsplit(target).netloc
        self._server = _Server((HOST, 0), self._answerer())
        self.url = f"http://{HOST}:{self._server.server_port}"

    def break_next(self, fault: Fault, *, of: str, times: int = 1) -> None:
        """Have a fault in the next answers to requests whose path has the part `of`."""
        self._faults += [(of, fault)] * times

    def break_none(self) -> None:
        """Have no fault in the answers from now on."""
        self._faults = []

    def stall(self, _: Answer) -> None:
        """A fault: nothing is sent until the proxy ends."""
        self._ended.wait()

    @contextmanager
    def running(self) -> Iterator["FaultyProxy"]:
        """Serve until the end of the block."""
        thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield self
        finally:
            self._ended.set()
            self._server.shutdown()
            thread.join()
            self._server.server_close()

    def _break(self, path: str, answer: Answer) -> None:
        for place, (of, fault) in enumerate(self._faults):
            if of in path:
                del self._faults[place]
                return fault(answer)
        return None

    def _pass(self, method: str, path: str, headers: Any) -> Answer:
        self.paths.append(path)
        self.signatures.append(headers.get("Authorization", ""))
        connection = http.client.HTTPConnection(self._target)
        passed = {name: value for name, value in headers.items() if name.lower() != "connection"}
        connection.request(method, path, headers=passed)
        with connection.getresponse() as found:
            content = found.read()
            kept = {name: value for name in KEPT if (value := found.headers[name])}
            length = int(found.headers["Content-Length"] or len(content))
        connection.close()
        answer = Answer(found.status, kept, content, length)
        self._break(path, answer)
        return answer

    def _answerer(self) -> type[BaseHTTPRequestHandler]:
        proxy = self

        class Answerer(BaseHTTPRequestHandler):
            """Passes on one request per connection."""

            def do_GET(self) -> None:
                answer = proxy._pass(self.command, self.path, self.headers)
                self.send_response_only(answer.status)
                for name, value in answer.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(answer.length))
                self.end_headers()
                self.wfile.write(answer.content)

            do_HEAD = do_GET

            def log_message(self, *_: object) -> None:
                """Log nothing."""

        return Answerer
