"""Messages of OTLP, read by the generated classes."""

from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, Status

from gateway.observability.otlp_wire import (
    CLIENT,
    WireSpan,
    attribute,
    export_message,
    span_message,
)

NS = 1_700_000_000_123_456_789
LONG = "x" * 70_000


@pytest.mark.parametrize(
    ("value", "kind", "found"),
    [
        ("text \u00e9", "string_value", "text \u00e9"),
        ("", "string_value", ""),
        (LONG, "string_value", LONG),
        ("\ud800", "string_value", "?"),
        (True, "bool_value", True),
        (False, "bool_value", False),
        (0, "int_value", 0),
        (127, "int_value", 127),
        (128, "int_value", 128),
        (2**63 - 1, "int_value", 2**63 - 1),
        (-1, "int_value", -1),
        (-(2**63), "int_value", -(2**63)),
        (1.5, "double_value", 1.5),
    ],
)
def test_values_of_attributes(value: Any, kind: str, found: Any) -> None:
    read = KeyValue.FromString(attribute("a.b", value))
    assert (read.key, read.value.WhichOneof("value")) == ("a.b", kind)
    assert getattr(read.value, kind) == found


def test_a_sequence_is_an_array() -> None:
    read = KeyValue.FromString(attribute("a", ("x", "y")))
    assert [each.string_value for each in read.value.array_value.values] == ["x", "y"]


def test_a_span_has_all_its_fields() -> None:
    trace_id, span_id, parent_id = 2**128 - 1, 5, 2**63
    span = WireSpan(
        *("a name", trace_id, span_id, parent_id, NS, NS + 9, CLIENT, "a=1,b=2"), True, True
    )
    events = [("HTTP_RECV_START", NS), (LONG, NS + 1)]
    read = Span.FromString(span_message(span, {"k": "v", "n": 2}, events))
    assert read == Span(
        trace_id=trace_id.to_bytes(16, "big"),
        span_id=span_id.to_bytes(8, "big"),
        parent_span_id=parent_id.to_bytes(8, "big"),
        trace_state="a=1,b=2",
        name="a name",
        kind=Span.SPAN_KIND_CLIENT,
        start_time_unix_nano=NS,
        end_time_unix_nano=NS + 9,
        attributes=[
            KeyValue.FromString(attribute("k", "v")),
            KeyValue.FromString(attribute("n", 2)),
        ],
        events=[Span.Event(name=name, time_unix_nano=ns) for name, ns in events],
        status=Status(code=Status.STATUS_CODE_ERROR),
        flags=0x301,
    )


def test_a_span_without_parent_and_error_leaves_them_out() -> None:
    read = Span.FromString(span_message(WireSpan("n", 1, 2, 0, 3, 4), {}, []))
    assert (read.parent_span_id, read.trace_state, read.HasField("status")) == (b"", "", False)
    assert (read.kind, read.flags) == (Span.SPAN_KIND_SERVER, 0x101)


def test_a_request_has_the_resource_the_scope_and_the_spans() -> None:
    spans = [span_message(WireSpan(name, 1, 2, 0, 3, 4), {}, []) for name in ("a", LONG, "c")]
    read = ExportTraceServiceRequest.FromString(export_message({"s.n": "x"}, "scope", spans))
    scoped = ScopeSpans(spans=[Span.FromString(each) for each in spans])
    scoped.scope.name = "scope"
    expected = ResourceSpans(scope_spans=[scoped])
    expected.resource.attributes.append(KeyValue.FromString(attribute("s.n", "x")))
    assert read == ExportTraceServiceRequest(resource_spans=[expected])
