"""The requests whose traces become spans."""

import logging
import sys
from typing import Any

import pytest

from gateway.errors import Code, InferenceError
from gateway.observability.span_trace import SpanTrace
from gateway.observability.spans import spans_of
from gateway.observability.traceparent import ParentSpan
from gateway.observability.tracer import MOST_FORCED, Tracer, build_tracer, show_trace_settings
from gateway.policy.caller import Caller
from gateway.settings import TraceSettings
from gateway.span_settings import SpanSettings
from tests.builders import KeptTraces, text_request
from tests.collector import read_spans

PARENT = ParentSpan(1, 2)


def tracer(sink: KeptTraces | None = None, **fields: Any) -> Tracer:
    return (sink or KeptTraces()).tracer(**fields)


def parents(found: Tracer, *given: ParentSpan | None) -> list[ParentSpan | str | None]:
    """The parent of each request's trace, or that it has none."""
    traces = [found.begin("m", each) for each in given]
    return ["-" if each is None or each.spans is None else each.spans.parent for each in traces]


def test_at_rate_0_only_requests_of_traced_callers_are_traced() -> None:
    assert parents(tracer(), None, PARENT, None) == ["-", PARENT, "-"]


def test_a_rate_counts_the_requests_of_traced_callers_too() -> None:
    found = parents(tracer(rate=2), None, None, PARENT, None, PARENT, PARENT)
    assert found == ["-", None, PARENT, None, PARENT, PARENT]


def test_traced_callers_take_nothing_of_the_count_and_are_traced_after_it() -> None:
    found = tracer(rate=2, count=1)
    assert parents(found, PARENT, None, None, None, PARENT) == [PARENT, None, "-", "-", PARENT]
    assert found.on
    assert found.settings().count == 0


def test_with_level_off_nothing_is_traced() -> None:
    found = tracer(levels=(), rate=1)
    assert parents(found, None, PARENT) == ["-", "-"]
    assert not found.on


def test_on_a_server_with_keys_only_callers_with_one_force_a_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.observability.tracer.time.monotonic", lambda: 5.0)
    found = tracer()
    with_key = Caller(tenant="team")
    assert found.begin("m", PARENT, Caller()) is None
    taken = [found.begin("m", PARENT, with_key) is not None for _ in range(MOST_FORCED + 3)]
    assert taken == [True] * MOST_FORCED + [False] * 3
    assert found.begin("m", PARENT, None) is not None


def test_tensors_are_not_traced_even_if_their_level_is_set_later() -> None:
    sink = KeptTraces()
    found = tracer(sink, rate=1)
    found.update("", {"levels": ("TIMESTAMPS", "TENSORS")})
    trace = found.begin("m")
    assert isinstance(trace, SpanTrace)
    trace.accepted("m", "1", text_request("secret"))
    trace.child().accepted("m", "1", text_request("secret"))
    spans = spans_of(trace)
    assert [each.name for each in read_spans(spans)] == ["InferRequest", "m", "m"]
    assert not any(b"secret" in each for each in spans)


def test_a_refused_request_is_a_trace_and_one_that_ends_is_kept_once() -> None:
    sink = KeptTraces()
    found = tracer(sink, rate=1)
    refused, ended = found.begin("m"), found.begin("m")
    assert refused is not None
    assert ended is not None
    refused.stamp("HTTP_RECV_START", 1)
    refused.refused(InferenceError(Code.INVALID_ARG, "no"))
    refused.stamp("HTTP_SEND_START", 2)
    refused.sent()
    ended.ended(3)
    ended.sent()
    ended.sent()
    assert sink.kept == [refused, ended]
    assert isinstance(refused, SpanTrace)
    assert (refused.names, refused.times) == (["HTTP_RECV_START"], [1])


def test_dropped_spans_are_a_metric_and_the_sink_is_closed() -> None:
    sink = KeptTraces()
    found = tracer(sink)
    (family,) = found.families()
    assert [(each.labels, each.value) for each in family.samples] == [
        ({"reason": "not_queued"}, 7),
        ({"reason": "rejected"}, 0),
    ]
    found.close()
    assert sink.closed == 1
    assert Tracer().families() == []


def test_the_protocol_shows_what_the_export_is_set_to() -> None:
    settings = TraceSettings(spans=SpanSettings(resource=(("a", "b"),)))
    assert show_trace_settings(settings) == {
        "trace_level": ["OFF"],
        "trace_rate": "1000",
        "trace_count": "-1",
        "trace_mode": "opentelemetry",
        "url": "http://localhost:4318/v1/traces",
        "bsp_max_queue_size": "2048",
        "bsp_schedule_delay": "5000",
        "bsp_max_export_batch_size": "512",
        "resource": ["a=b"],
    }


def test_without_the_packages_the_start_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "gateway.observability.otlp", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    with pytest.raises(InferenceError, match=r"pip install 'sluice\[otel\]'") as caught:
        build_tracer(TraceSettings(spans=SpanSettings()))
    assert caught.value.code is Code.UNSUPPORTED


def test_settings_of_files_and_tensors_are_ignored_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings = TraceSettings(file="/f", levels=("TENSORS",), log_frequency=3, spans=SpanSettings())
    with caplog.at_level(logging.WARNING, "sluice.trace"):
        found = build_tracer(settings)
    *ignored, last = (vars(each) for each in caplog.records)
    assert last["reason"] == "tensors are no part of spans"
    assert [each["setting"] for each in ignored] == [
        "triton,file",
        "triton,log-frequency",
        "level=TENSORS",
    ]
    assert not found.on
    found.close()
