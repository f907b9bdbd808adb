"""Spans that are built from the stamps of a trace."""

from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.common._internal import _encode_key_value
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from gateway.errors import Code, InferenceError
from gateway.messages import EngineStamps, InferRequest, InferResponse, Phases, Usage
from gateway.observability import spans
from gateway.observability.span_trace import SpanTrace
from gateway.observability.spans import MOST_CHARS, MOST_ID_CHARS, spans_of
from gateway.observability.traceparent import ParentSpan, SpanIds
from tests.collector import events, read_spans, values

CANCELLED = InferenceError(Code.CANCELLED, "Request was cancelled")


def begun(parent: ParentSpan | None = None) -> SpanTrace:
    """A trace of a request over HTTP."""
    trace = SpanTrace(1, SpanIds(parent), lambda _: None, iter(range(2, 9)))
    trace.stamp("HTTP_RECV_START", 10)
    trace.stamp("HTTP_RECV_END", 20)
    return trace


def accepted(trace: SpanTrace, model: str = "m", **fields: Any) -> None:
    trace.accepted(model, "1", InferRequest(model=model, **fields))
    trace.started_ns, trace.queued_ns = 30, 31


def built(trace: SpanTrace) -> dict[str, Span]:
    """The spans by name."""
    found = read_spans(spans_of(trace))
    named = {each.name: each for each in found}
    assert len(named) == len(found)
    return named


def test_a_cancelled_request_has_its_arrival_only() -> None:
    trace = begun()
    accepted(trace)
    trace.answered(50)
    trace.ended(50, CANCELLED)
    trace.stamp("HTTP_SEND_START", 51)
    trace.stamp("HTTP_SEND_END", 52)
    found = built(trace)
    assert found.keys() == {"InferRequest", "m"}
    assert events(found["InferRequest"]) == ["HTTP_RECV_START", "HTTP_RECV_END"]
    assert events(found["m"]) == ["REQUEST_START", "QUEUE_START", "REQUEST_END"]
    assert values(found["m"])["error.type"] == "CANCELLED"


def test_the_phases_of_an_engine_are_below_compute() -> None:
    trace = begun()
    accepted(trace)
    trace.computed(40, Phases(infer_ns=50))
    stamps = EngineStamps(queued_ns=41, scheduled_ns=42, first_token_ns=60, last_token_ns=80)
    trace.responded(InferResponse(engine=stamps), 85, first=True)
    trace.ended(90)
    found = built(trace)
    start = found["InferRequest"].start_time_unix_nano
    times = {
        name: (each.start_time_unix_nano - start, each.end_time_unix_nano - start)
        for name, each in found.items()
        if each.parent_span_id == found["compute"].span_id
    }
    assert times == {"engine.queue": (31, 32), "prefill": (32, 50), "generate": (50, 70)}


def test_an_engine_that_says_little_has_few_phases() -> None:
    trace = begun()
    accepted(trace)
    trace.computed(40, Phases(infer_ns=50))
    trace.responded(InferResponse(engine=EngineStamps(first_token_ns=60)), 85, first=True)
    trace.ended(90)
    assert built(trace).keys() == {"InferRequest", "m", "compute"}


def test_a_replica_continues_the_trace_below_a_span_of_its_own() -> None:
    trace = begun(ParentSpan(7, 8))
    accepted(trace)
    sent = trace.routed("10.0.0.1:8003").split("-")
    trace.ended(90)
    found = built(trace)
    assert int(sent[1], 16) == 7
    assert sent[2] == found["replica"].span_id.hex() != found["m"].span_id.hex()
    assert found["replica"].parent_span_id == found["m"].span_id
    assert found["InferRequest"].parent_span_id == (8).to_bytes(8, "big")
    assert values(found["replica"]) == {"server.address": "10.0.0.1:8003"}


def test_a_child_that_ends_is_below_the_model_of_its_parent() -> None:
    trace = begun()
    accepted(trace)
    child = trace.child()
    accepted(child, "member")
    child.ended(70)
    trace.ended(90)
    found = built(trace)
    assert found["member"].parent_span_id == found["m"].span_id
    assert values(found["member"])["triton.trace_parent_id"] == 1


def test_texts_of_clients_are_cut_and_can_be_encoded() -> None:
    trace = begun()
    accepted(trace, id="\ud800" + "x" * 5000)
    trace.ended(90)
    shown = values(built(trace)["m"])["triton.request_id"]
    assert shown == "?" + "x" * (MOST_CHARS - 1)


def test_tokens_are_attributes_of_the_model() -> None:
    trace = begun()
    accepted(trace)
    trace.asked = {"gen_ai.operation.name": "chat"}
    usage = Usage(prompt_tokens=3, completion_tokens=1)
    trace.responded(InferResponse(usage=usage), 1_000_000_030, first=True)
    ending = Usage(completion_tokens=4, finish_reason="stop")
    trace.responded(InferResponse(usage=ending), 2_000_000_000, first=False)
    assert trace.generated is not None
    trace.generated.usage = Usage(3, 5, cached_tokens=2)
    trace.ended(2_000_000_000)
    attributes = values(built(trace)["m"])
    assert {n: v for n, v in attributes.items() if n.startswith("gen_ai.")} == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "sluice",
        "gen_ai.request.model": "m",
        "gen_ai.response.model": "m",
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 2,
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.response.time_to_first_chunk": 1.0,
    }


def test_an_empty_trace_has_no_spans() -> None:
    trace = SpanTrace(1, SpanIds(None), lambda _: None)
    trace.refused()
    assert spans_of(trace) == []


def test_a_stream_of_any_length_has_an_event_for_each_write_and_no_form_of_its_own() -> None:
    forms = spans._form_of_root.cache_info().currsize  # noqa: SLF001
    rows = spans.row_of.cache_info().currsize
    for writes in (8, 9, 500):
        trace = begun()
        accepted(trace)
        trace.computed(40, Phases(1, 2, 3))
        for write in range(writes):
            trace.stamp("HTTP_SEND_START", 100 + 2 * write)
            trace.stamp("HTTP_SEND_END", 101 + 2 * write)
        trace.ended(70)
        root = built(trace)["InferRequest"]
        times = [each.time_unix_nano - trace.spans.offset_ns for each in root.events]
        assert times == [10, 20, *range(100, 100 + 2 * writes)]
        assert events(root)[2:] == ["HTTP_SEND_START", "HTTP_SEND_END"] * writes
        assert root.end_time_unix_nano - root.start_time_unix_nano == 89 + 2 * writes
    assert spans._form_of_root.cache_info().currsize <= forms + 1  # noqa: SLF001
    assert spans.row_of.cache_info().currsize == rows


ROUTES = {
    "http": ("HTTP_RECV_START", "HTTP_RECV_END", "HTTP_SEND_START", "HTTP_SEND_END"),
    "grpc": (*("GRPC_WAITREAD_START", "GRPC_WAITREAD_END", "GRPC_SEND_START", "GRPC_SEND_END"),),
}


def served(
    route: str, parent: ParentSpan | None, number: int, request_id: str, version: str
) -> SpanTrace:
    """A complete trace of a request that a model has executed."""
    received, whole, sending, sent = ROUTES[route]
    trace = SpanTrace(number, SpanIds(parent), lambda _: None)
    trace.stamp(received, 10)
    trace.stamp(whole, 20)
    trace.accepted("a%s", version, InferRequest(model="m", id=request_id))
    trace.started_ns, trace.queued_ns = 30, 31
    trace.answered(60)
    trace.computed(40, Phases(1, 2, 3))
    trace.ended(70)
    trace.stamp(sending, 80)
    trace.stamp(sent, 90)
    trace.sent()
    return trace


def expected(trace: SpanTrace, route: str, parent: ParentSpan | None) -> list[Span]:
    """Its spans, written by the generated classes; the id of `compute` is empty."""
    ids, (received, whole, sending, sent) = trace.spans, ROUTES[route]

    def span(name: str, span_id: int, above: int, begin: int, end: int, **events: int) -> Span:
        found = Span(
            trace_id=ids.trace_id.to_bytes(16, "big"),
            span_id=span_id.to_bytes(8, "big") if span_id else b"",
            parent_span_id=above.to_bytes(8, "big") if above else b"",
            name=name,
            kind=Span.SPAN_KIND_SERVER,
            start_time_unix_nano=ids.offset_ns + begin,
            end_time_unix_nano=ids.offset_ns + end,
            flags=0x101,
        )
        for event, ns in events.items():
            found.events.add(name=event, time_unix_nano=ids.offset_ns + ns)
        return found

    answered = {"INFER_RESPONSE_COMPLETE": 60}
    moments = {received: 10, whole: 20, **answered, sending: 80, sent: 90}
    root = span("InferRequest", ids.root_id, 0, 10, 90, **moments)
    if parent is not None:
        root.parent_span_id, root.flags = parent.span_id.to_bytes(8, "big"), 0x301
        root.trace_state = parent.state
    of_model = {"REQUEST_START": 30, "QUEUE_START": 31, "REQUEST_END": 70}
    model = span("a%s", trace.span_id, ids.root_id, 30, 70, **of_model)
    for name, value in (
        ("triton.model_name", "a%s"),
        ("triton.model_version", int(trace.version)),
        ("triton.trace_parent_id", 0),
        ("triton.trace_id", trace.id),
        ("triton.request_id", trace.request_id),
    ):
        if value != "":
            model.attributes.append(_encode_key_value(name, value))
    phases = {"COMPUTE_START": 40, "COMPUTE_INPUT_END": 41, "COMPUTE_OUTPUT_START": 43}
    compute = span("compute", 0, trace.span_id, 40, 46, **phases, COMPUTE_END=46)
    for each in (model, compute):
        each.trace_state = root.trace_state
    return [root, model, compute]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    "parent",
    [None, ParentSpan(7, 8), ParentSpan(2**128 - 1, 2**64 - 1, state="a=1")],
    ids=["root", "below a caller", "with its state"],
)
@pytest.mark.parametrize(
    ("number", "request_id", "version"),
    [
        (1, "", "1"),
        (127, "r", "1"),
        (128, "r" * MOST_ID_CHARS, "300"),
        (2**40, "r" * (MOST_ID_CHARS + 1), "1"),
        (2**21, "\u00e9" * MOST_ID_CHARS, "2"),
    ],
)
def test_a_request_that_a_model_has_executed_has_all_fields_of_its_spans(
    route: str, parent: ParentSpan | None, number: int, request_id: str, version: str
) -> None:
    trace = served(route, parent, number, request_id, version)
    usual, first = read_spans(spans_of(trace)), expected(trace, route, parent)
    trace.asked = {"k": "v"}
    special = read_spans(spans_of(trace))
    ids = {each[-1].span_id for each in (usual, special)} | {each.span_id for each in first}
    assert len(ids) == 5
    usual[-1].span_id = special[-1].span_id = b""
    assert usual == first
    first[1].attributes.append(_encode_key_value("k", "v"))
    assert special == first
