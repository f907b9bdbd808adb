"""The thread that sends spans, and collectors that take none."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceResponse,
)

from gateway.json_lines import MOST_CHARS
from gateway.observability.otlp import QUIET_SECS, Failure, SpanExporter
from gateway.observability.otlp_transport import MOST_ANSWER_BYTES
from gateway.observability.span_trace import SpanTrace
from gateway.observability.traceparent import SpanIds
from gateway.span_settings import SpanSettings
from tests.collector import PROTOBUF, Collector, answered, collector
from tests.serving import wait_until

SPANS = 3
"""The spans of a trace as the queue counts them."""


@pytest.fixture
def spans() -> Iterator[Collector]:
    with collector() as found:
        yield found


def started(url: str, **fields: Any) -> SpanExporter:
    """An exporter that sends nothing before its batch is full, or it is closed."""
    return SpanExporter(SpanSettings(url=url, **{"bsp_schedule_delay": 600_000, **fields}))


def keep(exporter: SpanExporter, count: int = 1) -> None:
    for _ in range(count):
        trace = SpanTrace(1, SpanIds(None), exporter.keep)
        trace.stamp("HTTP_RECV_START", 5)
        trace.refused()


def drops(exporter: SpanExporter) -> dict[str, int]:
    """The reasons of dropped spans."""
    return {reason: count for reason, count in exporter.drops.items() if count}


def test_what_waits_is_sent_when_the_server_stops(spans: Collector) -> None:
    exporter = started(spans.url)
    keep(exporter, 2)
    exporter.close()
    assert [each.name for each in spans.spans] == ["InferRequest"] * 2
    assert exporter.dropped == 0
    keep(exporter)
    assert drops(exporter) == {"not_queued": SPANS}


def test_a_full_batch_is_sent_at_once_and_a_request_has_no_more(spans: Collector) -> None:
    exporter = started(spans.url, bsp_max_export_batch_size=2 * SPANS)
    keep(exporter, 2)
    wait_until(lambda: len(spans.spans) == 2, "the batch is sent")
    exporter.close()
    many = started(spans.url, bsp_max_export_batch_size=1)
    spans.asked = 0
    keep(many, 3)
    many.close()
    assert spans.asked == 3


def test_what_is_behind_a_full_batch_waits_for_the_next_one(spans: Collector) -> None:
    asked, freed = threading.Event(), threading.Event()

    def hold(handler: BaseHTTPRequestHandler) -> None:
        asked.set()
        assert freed.wait(20)
        answered(handler, 200, b"")

    spans.answer = hold
    exporter = started(spans.url, bsp_max_export_batch_size=2 * SPANS)
    keep(exporter, 2)
    assert asked.wait(20)
    keep(exporter, 3)
    freed.set()
    wait_until(lambda: spans.asked == 2, "the second batch is sent")
    keep(exporter)
    exporter.close()
    assert (spans.asked, exporter.dropped) == (3, 0)


def test_a_queue_that_is_full_drops_the_newest(spans: Collector) -> None:
    exporter = started(spans.url, bsp_max_queue_size=2 * SPANS + 1)
    keep(exporter, 4)
    assert drops(exporter) == {"not_queued": 2 * SPANS}
    exporter.close()
    assert len(spans.spans) == 2


def reset(handler: BaseHTTPRequestHandler) -> None:
    handler.close_connection = True
    handler.connection.shutdown(2)


ANSWERS: dict[str, Callable[[BaseHTTPRequestHandler], None]] = {
    "resets": reset,
    "500": lambda handler: answered(handler, 500, b"no"),
    "304": lambda handler: answered(handler, 304, b""),
    "307": lambda handler: answered(handler, 307, b""),
    "400": lambda handler: answered(handler, 400, b"\xff" * 100),
    "429": lambda handler: answered(handler, 429, b""),
    "no HTTP": lambda handler: (handler.wfile.write(b"\x00garbage\r\n"), reset(handler))[1],
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS.keys())
def test_a_collector_that_takes_nothing_costs_its_spans_only(
    spans: Collector,
    answer: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.observability.otlp.CLOSE_SECS", 0.2)
    spans.answer = answer
    exporter = started(spans.url)
    with caplog.at_level(logging.DEBUG):
        keep(exporter, 2)
        exporter.close()
        wait_until(lambda: drops(exporter) == {"not_taken": 2}, "the spans are counted")
    mine = [r for r in caplog.records if not r.name.startswith(("urllib3", "requests"))]
    assert [record.msg for record in mine] == ["spans not exported"]
    assert vars(mine[0])["reason"]


def test_an_answer_of_garbage_with_status_200_is_taken(spans: Collector) -> None:
    spans.answer = lambda handler: answered(handler, 200, b"\xff" * 1000)
    exporter = started(spans.url)
    keep(exporter)
    exporter.close()
    assert exporter.dropped == 0


def rejection(count: int, text: str = "too old") -> bytes:
    """The answer of a collector that has rejected that many spans."""
    partial = ExportTracePartialSuccess(rejected_spans=count, error_message=text)
    return ExportTraceServiceResponse(partial_success=partial).SerializeToString()


@pytest.mark.parametrize(("said", "counted"), [(1, 1), (2, 2), (2**62, 2), (0, 0), (-1, 0)])
def test_spans_that_a_collector_rejects_are_counted(
    spans: Collector, said: int, counted: int
) -> None:
    spans.answer = lambda handler: answered(handler, 200, rejection(said))
    exporter = started(spans.url)
    keep(exporter, 2)
    exporter.close()
    assert exporter.drops.keys() == {"not_queued", "not_built", "not_taken", "rejected"}
    assert drops(exporter) == ({"rejected": counted} if counted else {})


def test_a_warning_of_a_collector_is_one_line_of_the_log_and_drops_nothing(
    spans: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    warnings = iter(("", "old\nclient" + "x" * MOST_CHARS, "another one"))
    spans.answer = lambda handler: answered(handler, 200, rejection(0, next(warnings)))
    exporter = started(spans.url, bsp_max_export_batch_size=1)
    with caplog.at_level(logging.WARNING, "sluice.trace"):
        keep(exporter, 3)
        exporter.close()
    assert (spans.asked, drops(exporter)) == (3, {})
    (record,) = caplog.records
    warning = vars(record)["warning"]
    assert (record.msg, warning[:10]) == ("warning of the collector received", "old\nclient")
    assert len(warning) < MOST_CHARS + 50


def test_an_answer_in_chunks_is_read_as_a_whole(spans: Collector) -> None:
    def reject(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", f"{PROTOBUF}; charset=utf-8")
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        for each in (*rejection(1), None):
            handler.wfile.write(b"0\r\n\r\n" if each is None else b"1\r\n%c\r\n" % each)

    spans.answer = reject
    exporter = started(spans.url)
    keep(exporter)
    exporter.close()
    assert drops(exporter) == {"rejected": 1}


def test_rejected_spans_are_one_line_of_the_log_and_one_connection(
    spans: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    connections = set()

    def reject(handler: BaseHTTPRequestHandler) -> None:
        connections.add(handler.client_address)
        answered(handler, 200, rejection(1, "x" * 2 * MOST_CHARS))

    spans.answer = reject
    exporter = started(spans.url, bsp_max_export_batch_size=1)
    with caplog.at_level(logging.WARNING, "sluice.trace"):
        keep(exporter, 3)
        exporter.close()
    assert drops(exporter) == {"rejected": 3}
    (record,) = caplog.records
    reason = vars(record)["reason"]
    assert (record.msg, reason[:27]) == ("spans not exported", "1 of 1 spans rejected: xxxx")
    assert len(reason) < MOST_CHARS + 50
    assert len(connections) == 1


def as_json(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", str(len(rejection(1))))
    handler.end_headers()
    handler.wfile.write(rejection(1))


def broken_off(handler: BaseHTTPRequestHandler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(rejection(1))
    reset(handler)


@pytest.mark.parametrize(
    "answer",
    [
        as_json,
        broken_off,
        lambda handler: answered(handler, 200, rejection(1, "x" * MOST_ANSWER_BYTES)),
    ],
)
def test_an_answer_that_cannot_be_read_is_that_of_its_status(spans: Collector, answer: Any) -> None:
    spans.answer = answer
    exporter = started(spans.url)
    keep(exporter)
    exporter.close()
    assert (drops(exporter), spans.asked) == ({}, 1)


def test_no_more_of_an_endless_answer_is_read_than_its_limit(spans: Collector) -> None:
    ended = threading.Event()

    def endless(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(1 << 40))
        handler.end_headers()
        try:
            while True:
                handler.wfile.write(bytes(1 << 16))
        except OSError:
            ended.set()
        handler.close_connection = True

    spans.answer = endless
    exporter = started(spans.url)
    keep(exporter)
    exporter.close()
    assert ended.wait(20)
    assert drops(exporter) == {}


def test_a_collector_that_hangs_does_not_hold_the_server_up(
    spans: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.observability.otlp.CLOSE_SECS", 0.05)
    asked, freed = threading.Event(), threading.Event()

    def hang(handler: BaseHTTPRequestHandler) -> None:
        asked.set()
        freed.wait(20)
        reset(handler)

    spans.answer = hang
    exporter = started(spans.url, bsp_max_export_batch_size=SPANS, bsp_max_queue_size=2 * SPANS)
    keep(exporter)
    assert asked.wait(20)
    before = time.perf_counter()
    keep(exporter, 10)
    assert time.perf_counter() - before < 1
    assert exporter.dropped == 8 * SPANS
    exporter.close()
    assert time.perf_counter() - before < 2
    freed.set()
    assert exporter._thread is not None  # noqa: SLF001
    exporter._thread.join(20)  # noqa: SLF001


def test_a_dead_collector_is_one_line_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    failure = Failure()
    with caplog.at_level(logging.WARNING, "sluice.trace"):
        for now in (10.0, 11.0, 10 + QUIET_SECS - 1, 10 + QUIET_SECS):
            failure.report(1, now)
    assert len(caplog.records) == 2


def test_only_lines_of_the_thread_are_taken() -> None:
    failure = Failure()
    failure.thread = threading.get_ident()
    own = logging.makeLogRecord({"msg": "no route", "thread": failure.thread})
    assert not failure.filter(own)
    assert failure.filter(logging.makeLogRecord({"msg": "another", "thread": 0}))
