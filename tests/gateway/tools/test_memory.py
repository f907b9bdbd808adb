"""The command `sluice ps` without a server of models."""

import argparse
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest
from rich.console import Console

from gateway.errors import InferenceError
from gateway.flags.values import API_KEY, url
from gateway.tools.memory import run

EMPTY = b'{"budget": {}, "models": []}'


class Guarded(BaseHTTPRequestHandler):
    """Answers callers with one key."""

    def do_GET(self) -> None:
        is_known = self.headers["Authorization"] == "Bearer secret"
        body = EMPTY if is_known else b'{"error": "no key"}'
        self.send_response(200 if is_known else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *_: object) -> None:
        """Nothing is logged."""


@pytest.fixture
def parsed() -> Iterator[argparse.Namespace]:
    """The options of the command for a server with a key."""
    with HTTPServer(("127.0.0.1", 0), Guarded) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield argparse.Namespace(url=url(f"http://127.0.0.1:{server.server_port}"), json=False)
        server.shutdown()
        thread.join()


def test_the_api_key_of_the_environment_is_sent(
    parsed: argparse.Namespace, capsys: pytest.CaptureFixture[str]
) -> None:
    run(parsed, {API_KEY: "secret"}, Console())
    assert "budget: none" in capsys.readouterr().out


def test_without_a_key_the_error_has_the_reason_of_the_server(parsed: argparse.Namespace) -> None:
    with pytest.raises(InferenceError, match="does not describe its memory: no key"):
        run(parsed, {}, Console())
