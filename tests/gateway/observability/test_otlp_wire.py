"""Messages of OTLP, read by the generated classes."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.common._internal import _encode_key_value
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, Status

from gateway.observability.otlp_wire import (
    CLIENT,
    FAILED,
    ExportForm,
    Parent,
    SpanForm,
    attribute,
    attributes,
    numbered,
    trace_state,
)
from tests.collector import read_spans

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


NUMBERS = [0, 1, 127, 128, 129, 255, 256, 16383, 16384, 2**21 - 1, 2**21, 2**35, 2**63 - 1]


@pytest.mark.parametrize("number", NUMBERS)
def test_a_number_is_encoded_as_each_attribute(number: int) -> None:
    for name in ("triton.trace_id", "a%b%cd"):
        assert numbered(name, number) == attributes({name: number})


SIZES = [1, 90, 127, 128, 129, 300, 16383, 16384, 70_000]
"""Sizes of names and of further fields, around those where a length takes one more byte."""
EVENTS = [(), ("HTTP_RECV_START",), ("A", LONG, "100 %d", "\u00e9"), ("E",) * 40]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("events", EVENTS, ids=len)
@pytest.mark.parametrize("has_parent", [False, True])
def test_a_span_of_a_form_has_all_its_fields(
    size: int, events: Sequence[str], has_parent: bool
) -> None:
    fixed, more = {"k": "%" * size, "n": 2, "m": True}, {"id": "r" * size, "f": 1.5}
    form = SpanForm(
        "n" * size,
        events,
        kind=CLIENT,
        parent=Parent.REMOTE if has_parent else Parent.NONE,
        fixed=attributes(fixed),
    )
    expected = Span(
        trace_id=b"T" * 16,
        span_id=b"S" * 8,
        parent_span_id=b"P" * 8 if has_parent else b"",
        name="n" * size,
        kind=Span.SPAN_KIND_CLIENT,
        start_time_unix_nano=NS,
        end_time_unix_nano=2**63,
        events=[Span.Event(name=name, time_unix_nano=NS + n) for n, name in enumerate(events)],
        flags=0x301 if has_parent else 0x101,
    )
    expected.attributes.extend(each for each in encoded(fixed))
    ids = (b"T" * 16, b"S" * 8, b"P" * 8)[: 2 + has_parent]
    values = (*ids, NS, 2**63, *[NS + n for n in range(len(events))])
    bare = form.message(values)
    assert read_spans([bare]) == [expected]
    expected.attributes.extend(each for each in encoded(more))
    expected.trace_state = "a=1,b=2"
    expected.status.code = Status.STATUS_CODE_ERROR
    full = form.message(values, attributes(more) + trace_state("a=1,b=2") + FAILED)
    assert read_spans([full, bare, full])[::2] == [expected, expected]


def encoded(found: Mapping[str, Any]) -> Iterator[KeyValue]:
    """Attributes as the SDK's own encoder writes them."""
    for name, value in found.items():
        yield _encode_key_value(name, value)


def test_a_span_without_parent_and_error_leaves_them_out() -> None:
    (read,) = read_spans([SpanForm("n", parent=Parent.NONE).message((b"T" * 16, b"S" * 8, 3, 4))])
    assert (read.parent_span_id, read.trace_state, read.HasField("status")) == (b"", "", False)
    assert (read.kind, read.flags) == (Span.SPAN_KIND_SERVER, 0x101)


def test_a_request_has_the_resource_the_scope_and_the_spans() -> None:
    spans = [
        SpanForm(name).message((b"T" * 16, b"S" * 8, b"P" * 8, 3, 4)) for name in ("a", LONG, "c")
    ]
    read = ExportTraceServiceRequest.FromString(ExportForm({"s.n": "x"}, "scope").message(spans))
    scoped = ScopeSpans(spans=read_spans(spans))
    scoped.scope.name = "scope"
    expected = ResourceSpans(scope_spans=[scoped])
    expected.resource.attributes.append(KeyValue.FromString(attribute("s.n", "x")))
    assert read == ExportTraceServiceRequest(resource_spans=[expected])
    assert [each.name for each in read.resource_spans[0].scope_spans[0].spans] == ["a", LONG, "c"]
