"""A page of another server in a real browser: it may read if its origin is named, else nothing."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser

from tests.conformance.models import REPEAT, identity
from tests.serving import serving, write_model

pytestmark = pytest.mark.browser

COUNT = "nv_inference_request_success"
STREAM = "/v2/models/repeat/generate_stream"
TICKING = {"text_input": "x", "n": 100_000, "delay_us": 20_000}
ASK = {"inputs": [{"name": "INPUT", "datatype": "BYTES", "shape": [1], "data": ["hi"]}]}
SEND = """async ([url, body, options]) => {
  try {
    const answer = await fetch(url, {method: "POST", body: JSON.stringify(body), ...options});
    const reader = answer.body?.getReader();
    const first = reader && new TextDecoder().decode((await reader.read()).value);
    await reader?.cancel();
    return [answer.type, answer.status, first, answer.headers.get("sluice-stream")];
  } catch (error) {
    return [error.name];
  }
}"""


class EmptyPage(BaseHTTPRequestHandler):
    """A page without content."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@contextmanager
def pages() -> Iterator[int]:
    """The port of a server whose pages have two origins: by the name and by the address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), EmptyPage) as found:
        thread = threading.Thread(target=found.serve_forever, daemon=True)
        thread.start()
        yield found.server_port
        found.shutdown()
        thread.join()


def test_a_browser_lets_pages_of_named_origins_ask_and_no_others(
    browser: Browser, tmp_path: Path
) -> None:
    write_model(tmp_path, "single", identity("BYTES", "1"))
    write_model(tmp_path, "repeat", REPEAT)
    json = {"Content-Type": "application/json", "Authorization": "Bearer none"}
    with pages() as port:
        named, other = f"http://127.0.0.1:{port}", f"http://localhost:{port}"
        with serving(tmp_path, f"--cors-origin={named}") as server:
            page = browser.new_page()

            def send(path: str, body: Any, **options: Any) -> Any:
                return page.evaluate(SEND, [f"{server.http}{path}", body, options])

            page.goto(named)
            kind, status, first, _ = send("/v2/models/single/infer", ASK, headers=json)
            assert (kind, status) == ("cors", 200)
            assert '"data":["hi"]' in first
            resumable = {**TICKING, "resumable": True}
            kind, status, first, token = send(STREAM, resumable, headers=json)
            assert (kind, status, first.startswith("id: ")) == ("cors", 200, True)
            assert token
            assert send("/v2/models/single/infer", ASK)[:2] == ["cors", 415]
            page.goto(other)
            answered = server.metric(COUNT, "single")
            assert send("/v2/models/single/infer", ASK, headers=json) == ["TypeError"]
            assert send("/v2/models/single/infer", ASK) == ["TypeError"]
            assert send("/v2/models/single/infer", ASK, mode="no-cors")[0] == "opaque"
            assert server.metric(COUNT, "single") == answered == 1
            page.close()
