"""The thread that sends spans, and collectors that take none."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from gateway.observability.otlp import QUIET_SECS, Failure, SpanExporter
from gateway.observability.trace import Trace
from gateway.observability.traceparent import SpanIds
from gateway.span_settings import SpanSettings
from tests.collector import Collector, answered, collector
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
        trace = Trace(1, ("TIMESTAMPS",), exporter.keep)
        trace.becomes_spans(SpanIds(None))
        trace.stamp("HTTP_RECV_START", 5)
        trace.refused()


def test_what_waits_is_sent_when_the_server_stops(spans: Collector) -> None:
    exporter = started(spans.url)
    keep(exporter, 2)
    exporter.close()
    assert [each.name for each in spans.spans] == ["InferRequest"] * 2
    assert exporter.dropped == 0
    keep(exporter)
    assert exporter.dropped == SPANS


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


def test_a_queue_that_is_full_drops_the_newest(spans: Collector) -> None:
    exporter = started(spans.url, bsp_max_queue_size=2 * SPANS + 1)
    keep(exporter, 4)
    assert exporter.dropped == 2 * SPANS
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
        wait_until(lambda: exporter.dropped == 2, "the spans are counted")
    mine = [r for r in caplog.records if not r.name.startswith(("urllib3", "requests"))]
    assert [record.msg for record in mine] == ["spans not exported"]
    assert vars(mine[0])["reason"]


def test_an_answer_of_garbage_with_status_200_is_taken(spans: Collector) -> None:
    spans.answer = lambda handler: answered(handler, 200, b"\xff" * 1000)
    exporter = started(spans.url)
    keep(exporter)
    exporter.close()
    assert exporter.dropped == 0


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
