"""Spans that are built from the stamps of a trace."""

from typing import Any

from opentelemetry.proto.trace.v1.trace_pb2 import Span

from gateway.errors import Code, InferenceError
from gateway.messages import EngineStamps, InferRequest, InferResponse, Phases, Usage
from gateway.observability.spans import MOST_CHARS, spans_of
from gateway.observability.trace import Trace
from gateway.observability.traceparent import ParentSpan, SpanIds
from tests.collector import events, values

CANCELLED = InferenceError(Code.CANCELLED, "Request was cancelled")


def begun(parent: ParentSpan | None = None) -> Trace:
    """A trace of a request over HTTP."""
    trace = Trace(1, ("TIMESTAMPS",), lambda _: None, iter(range(2, 9)))
    trace.becomes_spans(SpanIds(parent))
    trace.stamp("HTTP_RECV_START", 10)
    trace.stamp("HTTP_RECV_END", 20)
    return trace


def accepted(trace: Trace, model: str = "m", **fields: Any) -> None:
    trace.accepted(model, "1", InferRequest(model=model, **fields))
    trace.stamps[-2:] = [
        (name, ns) for (name, _), ns in zip(trace.stamps[-2:], (30, 31), strict=True)
    ]


def built(trace: Trace) -> dict[str, Span]:
    """The spans by name."""
    found = [Span.FromString(each) for each in spans_of(trace)]
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
    trace.ended(2_000_000_000, None, Usage(3, 5, cached_tokens=2))
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
    trace = Trace(1, ("TIMESTAMPS",), lambda _: None)
    trace.becomes_spans(SpanIds(None))
    trace.refused()
    assert spans_of(trace) == []
