"""Refused heads, in raw bytes: behind answers under way, over TLS, and what follows them."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from gateway.frontends.http.connection_parts import LINGER_BYTES
from gateway.frontends.http.errors import LINGER_SECS
from tests.certificates import Authority, Certificate
from tests.conformance.models import REPEAT
from tests.conformance.tls import flags, session
from tests.raw import Connection, get, post
from tests.serving import WAIT_SECS, Serving, serving, write_model

HEAD_LIMIT = 64 << 10
LONG_HEAD = f"request line and headers exceed {HEAD_LIMIT} bytes"
HEAD_SECS = 0.5
STREAM = "/v2/models/repeat/generate_stream"
BODY = b'{"text_input": "x", "n": 4, "delay_us": 150000}'
LONG_BODY = b'{"text_input": "x", "n": 30, "delay_us": 100000}'
HELD_SECS = 0.5
BUFFERS = 16 << 20
"""More than the kernel's buffers of a connection have."""
TEXTS = b'"text_output":"x"'
BAD = [
    (b"GET / HTTP/1.1\r\nA: ".ljust(200_000, b"a") + b"\r\n\r\n", 431),
    (b"GET / HTTP/1.1\r\nA: ".ljust(8 << 20, b"a"), 431),
    (b"no request at all\r\n\r\n", 400),
    (
        post(STREAM, b"", "Transfer-Encoding: chunked").replace(b"Content-Length: 0\r\n", b"")
        + b"z",
        400,
    ),
]
"""Requests that are refused before they are whole, and the status of their answer."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder, "repeat", REPEAT)
    return folder


@pytest.fixture(scope="module", params=[0, 2], ids=["one process", "two frontends"])
def processes(request: pytest.FixtureRequest) -> str:
    return f"--frontends={request.param}"


@pytest.fixture(scope="module")
def server(models: Path, processes: str) -> Iterator[Serving]:
    limit = f"--http-head-timeout-secs={HEAD_SECS}"
    with serving(models, processes, limit, "--log-verbose=1") as started:
        yield started
    check_log(started)


@pytest.fixture(scope="module")
def secure(models: Path, processes: str, own: Certificate) -> Iterator[Serving]:
    with serving(models, processes, *flags("http", own)) as started:
        yield started
    check_log(started)


def check_log(server: Serving) -> None:
    """No event of a connection had an error of its own."""
    for word in ("Traceback", "Fatal error", "Exception in callback", "NotImplementedError"):
        assert word not in server.text


@pytest.mark.parametrize("pipelined", [0, 2])
@pytest.mark.parametrize(("bad", "status"), BAD, ids=["head", "8 MiB", "malformed", "chunk"])
def test_answers_under_way_are_whole_before_a_refusal(
    server: Serving, bad: bytes, status: int, pipelined: int
) -> None:
    with Connection(server.ports["http"]) as connection:
        connection.send(post(STREAM, BODY))
        assert connection.head().status == 200
        connection.send(get("/v2/health/live") * pipelined)
        connection.send(bad)
        assert connection.rest().count(TEXTS) == 4
        for _ in range(pipelined):
            assert connection.answer().status == 200
        answer = connection.answer()
        assert (answer.status, answer.headers["connection"]) == (status, "close")
        assert connection.ended


def test_what_follows_a_refused_head_is_dropped_beyond_the_limit_of_a_head(
    server: Serving,
) -> None:
    """There is one refusal, and the connection stays open for the client to read it.

    The limit of its time ends with it.
    """
    with Connection(server.ports["http"]) as connection:
        connection.send(b"GET / HTTP/1.1\r\nA: ".ljust(HEAD_LIMIT + 1, b"a"))
        until = time.monotonic() + 4 * HEAD_SECS
        while time.monotonic() < until:
            connection.send(b"a" * 1000)
            time.sleep(0.05)
        assert connection.answer().status == 431
        assert connection.ended
    assert "request head timed out" not in server.text


@pytest.mark.parametrize("cut", [0, 10, 60_000])
def test_a_head_that_begins_within_a_read_has_the_same_limit(server: Serving, cut: int) -> None:
    """It comes with the end of an earlier request; the last `cut` bytes come apart."""
    ask, end = get("/v2/health/live"), b"\r\n\r\n"
    for size, status in ((HEAD_LIMIT + 4000, 431), (HEAD_LIMIT - 100, 200)):
        head = ask.removesuffix(end) + b"\r\nA: "
        data = ask + head.ljust(size - len(end), b"a") + end
        with Connection(server.ports["http"]) as connection:
            connection.send(data[: len(data) - cut])
            connection.wait_taken()
            connection.send(data[len(data) - cut :])
            assert connection.answer().status == 200
            answer = connection.answer()
            assert answer.status == status
            assert status == 200 or answer.json["error"] == LONG_HEAD


def test_what_follows_a_refusal_that_waits_has_a_limit(server: Serving) -> None:
    """The client has to wait with the rest then; the answer under way is whole."""
    with Connection(server.ports["http"]) as connection:
        connection.send(post(STREAM, LONG_BODY))
        assert connection.head().status == 200
        connection.send(b"no request at all\r\n\r\n")
        assert LINGER_BYTES < bytes_until_held(connection.socket) < LINGER_BYTES + BUFFERS
        assert connection.rest().count(TEXTS) == 30
        assert connection.answer().status == 400


def bytes_until_held(connection: socket.socket) -> int:
    """The bytes that a server takes before it takes none for HELD_SECS, or 1 GiB."""
    sent = 0
    connection.settimeout(HELD_SECS)
    with suppress(TimeoutError):
        while sent < 1 << 30:
            sent += connection.send(bytes(1 << 20))
    connection.settimeout(WAIT_SECS)
    return sent


def test_a_request_with_too_long_trailers_ends_with_its_refusal(server: Serving) -> None:
    """Its connection is closed at once: no answer to it is due."""
    head = f"POST {STREAM} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    with Connection(server.ports["http"]) as connection:
        for data in (head + b"2\r\n{}\r\n0\r\n", b"A: ".ljust(HEAD_LIMIT, b"a")):
            connection.send(data)
            connection.wait_taken()
        connection.send(b"a")
        assert connection.answer().status == 431
        assert connection.ended
        assert secs_to_close(connection.socket) < LINGER_SECS / 2


@pytest.mark.parametrize("size", [HEAD_LIMIT + 1, 200_000, 8 << 20])
def test_a_head_beyond_the_limit_gets_its_answer_over_tls(
    secure: Serving, authority: Authority, size: int
) -> None:
    """The client reads the end as `close_notify`: one without is an error."""
    with session(secure, authority.client()) as connection:
        connection.suppress_ragged_eofs = False
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nA: ".ljust(size, b"a"))
        answer = b""
        while data := connection.recv(1 << 16):
            answer += data
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431 ")
    assert json.loads(body)["error"] == LONG_HEAD


def test_a_client_over_tls_that_sends_on_has_a_limit(secure: Serving, authority: Authority) -> None:
    with session(secure, authority.client()) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nA: ".ljust(HEAD_LIMIT + 1, b"a"))
        assert LINGER_SECS / 2 < secs_to_close(connection) < 2 * LINGER_SECS


def secs_to_close(connection: socket.socket) -> float:
    """The time after which a client can send no more, while it does; at most WAIT_SECS."""
    began = spent = time.monotonic()
    with suppress(OSError):
        while spent < began + WAIT_SECS:
            connection.sendall(bytes(1000))
            time.sleep(0.02)
            spent = time.monotonic()
    return spent - began
