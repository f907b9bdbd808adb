"""Requests without a trace: they are counted, and nothing is made for them."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest

from gateway.errors import Code, InferenceError
from gateway.frontends.grpc.traces import begin_trace
from gateway.observability.otlp import SpanExporter
from gateway.observability.traceparent import TRACEPARENT, ParentSpan
from gateway.observability.tracer import Tracer
from gateway.settings import TraceSettings
from gateway.span_settings import SpanSettings
from tests.builders import KeptTraces, text_request

LEVELS = ("TIMESTAMPS",)
PARENT = ParentSpan(1, 2)


@pytest.mark.parametrize(
    ("fields", "traced"),
    [
        ({"rate": 1}, list(range(12))),
        ({"rate": 3}, [2, 5, 8, 11]),
        ({"rate": 2, "count": 2}, [1, 3]),
        ({"rate": 0}, []),
        ({"levels": (), "rate": 1}, []),
    ],
)
@pytest.mark.parametrize("is_file", [False, True])
def test_the_requests_with_traces_are_those_of_the_rate(
    tmp_path: Path, fields: dict[str, Any], traced: list[int], is_file: bool
) -> None:
    if is_file:
        settings = TraceSettings(file=str(tmp_path / "t"), **{"levels": LEVELS, **fields})
        tracer = Tracer(settings)
    else:
        tracer = KeptTraces().tracer(**fields)
    assert [number for number in range(12) if tracer.begin("m") is not None] == traced
    assert tracer.settings().count == (0 if "count" in fields else -1)


def test_a_request_that_finds_the_queue_full_has_no_trace_and_its_spans_are_counted() -> None:
    exporter = SpanExporter(SpanSettings(bsp_max_queue_size=5, bsp_schedule_delay=600_000))
    settings = TraceSettings(levels=LEVELS, rate=2, count=9, spans=SpanSettings())
    tracer = Tracer(settings, exporter)
    assert [tracer.begin("m") is None, tracer.begin("m") is None] == [True, False]
    exporter._queue._put = 3  # noqa: SLF001 - a trace waits
    assert [tracer.begin("m") for _ in range(4)] == [None] * 4
    assert exporter.drops["not_queued"] == 2 * 3
    assert tracer.settings().count == 9 - 1 - 2
    assert tracer.begin("m") is None
    assert tracer.begin("m", PARENT) is not None  # its spans are counted when it ends
    exporter._queue._put = 0  # noqa: SLF001
    assert [tracer.begin("m") is None, tracer.begin("m") is None] == [True, False]
    exporter.close()


def test_a_traced_caller_over_grpc_is_never_skipped() -> None:
    tracer = KeptTraces().tracer(rate=0)
    assert begin_trace(tracer, text_request(), (("a", "b"),), 1) is None
    metadata = (("a", "b"), (TRACEPARENT, PARENT.text))
    trace = begin_trace(tracer, text_request(), metadata, 1)
    assert trace is not None
    assert trace.spans is not None
    assert trace.spans.parent == PARENT


def test_a_trace_is_freed_without_the_garbage_collector() -> None:
    trace = KeptTraces().tracer(rate=1).begin("m")
    assert trace is not None
    assert trace.members == [trace]
    trace.error = InferenceError(Code.INTERNAL, "x")
    held = weakref.ref(trace.error)
    gc.disable()
    try:
        del trace
        assert held() is None
    finally:
        gc.enable()
