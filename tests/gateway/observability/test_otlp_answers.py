"""Answers of a collector in all forms of HTTP, byte by byte."""

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from requests import Session

from gateway.observability import otlp, otlp_transport
from gateway.observability.otlp import SpanExporter
from gateway.observability.otlp_transport import CollectorAnswer, KeptConnection
from gateway.observability.span_trace import SpanTrace
from gateway.observability.traceparent import SpanIds
from gateway.span_settings import SpanSettings
from tests.collector import PROTOBUF
from tests.serving import wait_until

REJECTED = b"\n\x02\x08\x01"
"""A body by which a collector rejects one span."""
KIND = f"content-type: {PROTOBUF}\r\n".encode()
WHOLE = b"HTTP/1.1 200 OK\r\n%bcontent-length: 4\r\n\r\n%b" % (KIND, REJECTED)
CHUNKED = b"transfer-encoding: chunked\r\n"
HEAD_END = b"\r\n\r\n"
LARGE = bytes(8 << 20)
"""A body that no buffers of a connection hold."""


@contextmanager
def answering(
    answers: Sequence[Sequence[bytes]], *, keeps: bool = True
) -> Iterator[tuple[str, list[bytes]]]:
    """The URL of a collector with these answers, each in pieces, and the requests that it got.

    It closes a connection behind the last answer, or behind each if it does not keep them. An empty
    request stands for a connection that its client has closed.
    """
    found: list[bytes] = []
    left = list(answers)
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while left:
            connection, _ = listener.accept()
            with connection:
                while left:
                    found.append(read_request(connection))
                    if not found[-1]:
                        break
                    for piece in left.pop(0):
                        connection.sendall(piece)
                    if not keeps:
                        break

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    with listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1/traces", found
        thread.join(20)
    assert not thread.is_alive()


@contextmanager
def listening() -> Iterator[tuple[socket.socket, str]]:
    """A socket for the connections of an exporter, and its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(10)
        yield listener, f"http://127.0.0.1:{listener.getsockname()[1]}/v1/traces"


def read_request(connection: socket.socket) -> bytes:
    """The head of a request, whose body is read; empty at the end of the connection."""
    data = b""
    while HEAD_END not in data:
        if not (piece := connection.recv(65536)):
            return b""
        data += piece
    head, _, body = data.partition(HEAD_END)
    (length,) = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")]
    while len(body) < int(length.partition(b":")[2]):
        body += connection.recv(65536)
    return head


def sent(url: str, batches: int = 1, wait: Callable[[], object] = lambda: None) -> dict[str, int]:
    """The reasons of dropped spans, after as many requests of one span."""
    exporter = started(url)
    for _ in range(batches):
        keep_one(exporter)
        wait()
    exporter.close()
    return dropped(exporter)


def started(url: str) -> SpanExporter:
    """An exporter that sends each span in a request of its own."""
    settings = SpanSettings(url=url, bsp_schedule_delay=600_000, bsp_max_export_batch_size=1)
    return SpanExporter(settings)


def keep_one(exporter: SpanExporter) -> None:
    trace = SpanTrace(1, SpanIds(None), exporter.keep)
    trace.stamp("HTTP_RECV_START", 5)
    trace.refused()


@contextmanager
def asked(exporter: SpanExporter, listener: socket.socket) -> Iterator[socket.socket]:
    """The connection of an exporter that waits for the answer to its first span."""
    keep_one(exporter)
    with listener.accept()[0] as connection:
        connection.settimeout(10)
        assert read_request(connection)
        yield connection


def dropped(exporter: SpanExporter) -> dict[str, int]:
    return {reason: count for reason, count in exporter.drops.items() if count}


def by_bytes(data: bytes) -> list[bytes]:
    return [data[n : n + 1] for n in range(len(data))]


@pytest.mark.parametrize(
    "answer",
    [
        by_bytes(WHOLE),
        by_bytes(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 E\r\nlink: x\r\n\r\n" + WHOLE),
        [b"HTTP/1.1 200 OK\r\n%b\r\n%b" % (KIND, REJECTED)],
        [b"HTTP/1.0 200 OK\r\n%bcontent-length: 4\r\n\r\n%b" % (KIND, REJECTED)],
        [b"HTTP/1.1 200 OK\r\n%bconnection: close\r\n\r\n" % KIND, REJECTED[:1], REJECTED[1:]],
        [b"HTTP/1.1 206 \r\n%b%b\r\n4\r\n" % (KIND, CHUNKED), REJECTED, b"\r\n0\r\n\r\n"],
    ],
    ids=["by bytes", "interim ones", "no length", "HTTP/1.0", "connection: close", "chunks"],
)  # fmt: skip
def test_an_answer_is_read_to_its_end(answer: Sequence[bytes]) -> None:
    with answering([answer]) as (url, _):
        assert sent(url) == {"rejected": 1}


@pytest.mark.parametrize(
    "answer",
    [
        [b"HTTP/1.1 200 OK\r\n%bcontent-length: 5\r\n\r\n%b" % (KIND, REJECTED)],
        [b"HTTP/1.1 200 OK\r\n%b%b\r\nnone" % (KIND, CHUNKED)],
        [b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 4\r\n\r\n", REJECTED],
        [b"HTTP/1.1 204 No Content\r\n\r\n"],
    ],
    ids=["broken off", "no chunks", "another type", "no body"],
)
def test_an_answer_with_a_status_of_success_and_no_whole_body_rejects_nothing(
    answer: Sequence[bytes],
) -> None:
    with answering([answer]) as (url, _):
        assert sent(url) == {}


def test_a_connection_that_the_collector_has_closed_is_replaced_without_a_loss() -> None:
    with answering([[WHOLE]] * 3, keeps=False) as (url, requests):
        assert sent(url, batches=3) == {"rejected": 3}
    assert len(requests) == 3


@pytest.mark.parametrize(
    "status", [b"401 Unauthorized", b"429 Too Many Requests"], ids=lambda each: each[:3].decode()
)
def test_an_answer_before_the_end_of_a_request_is_read(status: bytes) -> None:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.settimeout(10)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1/traces"
        connection = KeptConnection(Session(), url, {}, CollectorAnswer())
        with ThreadPoolExecutor(1) as threads:
            for _ in range(2):
                result = threads.submit(connection.request, "POST", url, data=LARGE, timeout=10)
                with listener.accept()[0] as accepted:
                    accepted.recv(1024)
                    head = b"HTTP/1.1 %b\r\nretry-after: 1\r\ncontent-length: 0\r\n\r\n"
                    accepted.sendall(head % status)
                found = result.result(10)
                assert found.error is None
                assert found.status_code == int(status[:3])
                assert found.headers()["retry-after"] == "1"
        connection.close()


def test_a_request_that_is_reset_without_an_answer_is_a_failed_one() -> None:
    with listening() as (listener, url):
        connection = KeptConnection(Session(), url, {}, CollectorAnswer())
        with ThreadPoolExecutor(1) as threads:
            result = threads.submit(connection.request, "POST", url, data=LARGE, timeout=10)
            with listener.accept()[0] as accepted:
                accepted.recv(1024)
            found = result.result(10)
        assert found.status_code is None
        assert connection.is_connection_error(found.error)
        connection.close()


LATE = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


def test_what_a_collector_sends_on_an_idle_connection_answers_no_request() -> None:
    with listening() as (listener, url):
        exporter = started(url)
        keep_one(exporter)
        with listener.accept()[0] as first:
            assert read_request(first)
            first.sendall(WHOLE)
            wait_until(lambda: exporter.dropped == 1, "the answer is read")
            first.sendall(LATE)
            keep_one(exporter)
            with listener.accept()[0] as second:
                assert read_request(second)
                second.sendall(WHOLE)
                exporter.close()
    assert dropped(exporter) == {"rejected": 2}


@pytest.mark.parametrize("more", [LATE, b"HTTP/1.1 4", b"\0"], ids=["whole", "begun", "garbage"])
def test_what_a_collector_sends_with_an_answer_answers_no_request(more: bytes) -> None:
    with answering([[WHOLE + more], [WHOLE]]) as (url, requests):
        assert sent(url, batches=2) == {"rejected": 2}
    assert [bool(each) for each in requests] == [True, False, True]


def test_a_collector_that_answers_behind_the_stop_gets_no_span_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(otlp, "CLOSE_SECS", 0.2)
    with listening() as (listener, url):
        exporter = started(url)
        with asked(exporter, listener) as connection:
            keep_one(exporter)
            exporter.close()
            connection.sendall(WHOLE)
            assert connection.recv(1) == b""
        thread = exporter._thread  # noqa: SLF001
        assert thread is not None
        thread.join(10)
        assert not thread.is_alive()
        listener.settimeout(0)
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert dropped(exporter) == {"rejected": 1, "not_taken": 1}


def test_a_closed_exporter_has_no_connection() -> None:
    with listening() as (listener, url):
        exporter = started(url)
        with asked(exporter, listener) as connection:
            connection.sendall(WHOLE)
            exporter.close()
            assert connection.recv(1) == b""


def test_no_request_follows_an_answer_that_ends_its_connection() -> None:
    last = WHOLE.replace(b"200 OK\r\n", b"200 OK\r\nconnection: close\r\n")
    with answering([[last], [WHOLE]]) as (url, requests):
        assert sent(url, batches=2) == {"rejected": 2}
    assert [bool(each) for each in requests] == [True, False, True]


@pytest.mark.parametrize("line", [b"x-a: b\r\n", b"HTTP/1.1 100 Continue\r\n\r\n"])
@pytest.mark.parametrize(("times", "dropped"), [(1, {"rejected": 1}), (3, {"not_taken": 1})])
def test_a_head_above_its_limit_is_no_answer(
    line: bytes, times: int, dropped: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.observability.otlp.CLOSE_SECS", 20)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.5")
    lines = line * (times * otlp_transport.MOST_HEAD_BYTES // 2 // len(line))
    status, _, rest = WHOLE.partition(b"\r\n")
    long = b"%b\r\n%b%b" % (status, lines, rest) if line.startswith(b"x") else lines + WHOLE
    with answering([[long]] * (1 + ("not_taken" in dropped)), keeps=False) as (url, _):
        assert sent(url) == dropped


def test_a_request_has_the_length_and_the_host_once() -> None:
    with answering([[WHOLE]] * 2) as (url, requests):
        sent(url, batches=2)
    for head in requests:
        assert head.startswith(b"POST /v1/traces HTTP/1.1\r\n")
        found = headers(head)
        assert found["host"] == url.split("/")[2]
        assert {"content-length", "content-type", "user-agent"} <= found.keys()


def headers(head: bytes) -> dict[str, str]:
    """The headers of a request, each of which it has once."""
    pairs = [line.split(": ", 1) for line in head.decode().split("\r\n")[1:]]
    found = {name.lower(): value for name, value in pairs}
    assert len(found) == len(pairs)
    return found


def test_a_header_of_the_environment_replaces_another_one_of_its_name_in_any_case(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen = "host=tenant.example,user-agent=me,accept-encoding=gzip,content-length=9"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", chosen)
    with answering([[WHOLE]]) as (url, requests):
        assert sent(url) == {"rejected": 1}
    found = headers(requests[0])
    assert (found["host"], found["user-agent"]) == ("tenant.example", "me")
    assert found["accept-encoding"] == "identity"  # an answer is read as it is
