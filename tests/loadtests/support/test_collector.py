"""The collector of the load tests, as an exporter of spans sees it."""

from gateway.frontends.http.traces import HTTP
from gateway.messages import InferRequest, Phases
from gateway.observability.otlp import SpanExporter
from gateway.observability.span_trace import SpanTrace
from gateway.span_settings import SpanSettings
from loadtests.support.collector import collecting


def test_a_collector_counts_the_requests_whose_spans_it_has_got() -> None:
    with collecting() as collected:
        settings = SpanSettings(url=collected.url, bsp_max_export_batch_size=30)
        exporter = SpanExporter(settings)
        for number in range(1, 26):
            trace = SpanTrace(number, exporter.ids, exporter.keep)
            trace.received(HTTP, 1, 2)
            trace.accepted("m", "1", InferRequest(model="m"))
            trace.ended(9, None, 4, Phases(1, 2, 1))
            trace.answer_sent(HTTP, 10)
        exporter.close()
        assert (collected.requests, exporter.dropped) == (25, 0)
