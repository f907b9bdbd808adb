"""Answers of a collector in all forms of HTTP, byte by byte."""

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest

from gateway.observability import otlp_transport
from gateway.observability.otlp import SpanExporter
from gateway.observability.span_trace import SpanTrace
from gateway.observability.traceparent import SpanIds
from gateway.span_settings import SpanSettings
from tests.collector import PROTOBUF

REJECTED = b"\n\x02\x08\x01"
"""A body by which a collector rejects one span."""
KIND = f"content-type: {PROTOBUF}\r\n".encode()
WHOLE = b"HTTP/1.1 200 OK\r\n%bcontent-length: 4\r\n\r\n%b" % (KIND, REJECTED)
CHUNKED = b"transfer-encoding: chunked\r\n"
HEAD_END = b"\r\n\r\n"


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
    settings = SpanSettings(url=url, bsp_schedule_delay=600_000, bsp_max_export_batch_size=1)
    exporter = SpanExporter(settings)
    for _ in range(batches):
        trace = SpanTrace(1, SpanIds(None), exporter.keep)
        trace.stamp("HTTP_RECV_START", 5)
        trace.refused()
        wait()
    exporter.close()
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
        names = [line.partition(b":")[0].lower() for line in head.split(b"\r\n")[1:]]
        assert head.startswith(b"POST /v1/traces HTTP/1.1\r\n")
        assert sorted(names) == sorted(set(names))
        assert {b"host", b"content-length", b"content-type", b"user-agent"} <= set(names)
