"""Usual traces as rows of numbers, and the spans of many rows at once."""

import logging
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from gateway.errors import Code, InferenceError
from gateway.frontends.grpc.traces import GRPC
from gateway.frontends.http.traces import HTTP
from gateway.messages import InferRequest, Phases
from gateway.observability import span_queue, span_rows, traceparent
from gateway.observability.span_queue import NOT_QUEUED, SpanBatch, SpanQueue
from gateway.observability.span_rows import FEW, SPANS_OF_ROW
from gateway.observability.span_trace import SpanTrace
from gateway.observability.spans import MOST_ID_CHARS, spans_of
from gateway.observability.trace import ANSWERED, WireStamps
from gateway.observability.traceparent import NumberedIds, ParentSpan, SpanIds
from tests.collector import read_spans

OFFSET_NS = 1_700_000_000_123_456_789
BATCH = 512
NUMBERS = [1, 2, *range(120, 140), *range(16_380, 16_400), 2**21 - 1, 2**21, 2**40, 2**56 - 1]
"""Numbers of traces, around those where one takes a byte more."""


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The distance of the two clocks is always the same."""
    clocks = SimpleNamespace(time_ns=lambda: OFFSET_NS, perf_counter_ns=lambda: 0)
    monkeypatch.setattr(traceparent, "time", clocks)


def served(
    ids: NumberedIds | SpanIds,
    number: int,
    request_id: str = "",
    wire: WireStamps = HTTP,
    model: str = "m",
    error: InferenceError | None = None,
) -> SpanTrace:
    """A complete trace of a request that a model has executed; each has other times."""
    begun = 1000 * (number % 99 + 1)
    trace = SpanTrace(number, ids, lambda _: None, iter((9,)))
    trace.received(wire, begun, begun + 20)
    trace.accepted(model, "3", InferRequest(model=model, id=request_id))
    trace.started_ns, trace.queued_ns = begun + 30, begun + 31
    trace.answered(begun + 60)
    trace.computed(begun + 40, Phases(number % 5, 2, 3))
    trace.ended(begun + 70, error)
    trace.answer_sent(wire, begun + 80)
    trace.sent_ns = begun + number % 90  # may be before its end
    return trace


def new_queue() -> SpanQueue:
    """A queue with room for all spans of a test."""
    return SpanQueue(10_000, BATCH, {NOT_QUEUED: 0}, lambda: None)


def taken(queue: SpanQueue, most: int = BATCH) -> tuple[list[Span], list[int]]:
    """All spans of a queue, by batches, and the counts of their messages."""
    spans, counts = [], []
    while (batch := queue.next_batch(most)).counted:
        assert batch.failed == 0
        for pieces, count in batch.messages(most):
            found = read_spans(map(bytes, pieces))
            assert len(found) == count <= most
            spans += found
            counts.append(count)
    return spans, counts


def expected(traces: Iterable[SpanTrace]) -> list[Span]:
    """The same, written one by one."""
    return read_spans(message for trace in traces for message in spans_of(trace))


def in_order(spans: Iterable[Span]) -> list[bytes]:
    """Spans to compare, without the id of `compute`: that of a trace differs each time."""
    for each in spans:
        if each.name == "compute":
            each.span_id = b""
    return sorted(each.SerializeToString(deterministic=True) for each in spans)


IDS: dict[str, Any] = {
    "none": lambda _: "",
    "one length": lambda number: f"{number % 10_000:04}",
    "several lengths": lambda number: "r" * (number % 4),
    "not ASCII": lambda number: "\u00e9" * (number % 3) + "\ud800",
    "two bytes each": lambda number: "\u00e9" * (number % 3),
    "not printable": lambda number: "\x1b" * (number % 3),
    "longest": lambda _: "x" * MOST_ID_CHARS,
    "too long": lambda _: "x" * (MOST_ID_CHARS + 1),
}


@pytest.mark.parametrize("request_id", IDS.values(), ids=IDS.keys())
@pytest.mark.parametrize("wire", [HTTP, GRPC], ids=["http", "grpc"])
@pytest.mark.parametrize("count", [1, FEW - 1, FEW, len(NUMBERS)])
def test_rows_have_the_spans_of_their_traces_field_by_field(
    request_id: Any, wire: WireStamps, count: int
) -> None:
    queue = new_queue()
    traces = [served(queue.ids, n, request_id(n), wire) for n in NUMBERS[:count]]
    for trace in traces:
        queue.keep(trace)
    found, _ = taken(queue)
    assert len({each.span_id for each in found}) == len(found) == SPANS_OF_ROW * count
    assert len({each.trace_id for each in found}) == count
    assert in_order(found) == in_order(expected(traces))


@pytest.mark.parametrize("count", [1, 2 * FEW])
def test_requests_without_a_response_have_no_time_of_one(count: int) -> None:
    queue = new_queue()
    traces = [served(queue.ids, n + 1) for n in range(count)]
    for trace in traces:
        trace.answered_ns = 0
        queue.keep(trace)
    found, _ = taken(queue)
    assert in_order(found) == in_order(expected(traces))
    assert ANSWERED not in {event.name for each in found for event in each.events}


def unusual(ids: NumberedIds, number: int) -> Iterable[SpanTrace]:
    """Traces whose spans are others than those of rows."""
    failed = served(ids, number, error=InferenceError(Code.INTERNAL, "x"))
    parent, member = (served(ids, number + n) for n in (1, 2))
    parent.child().accepted("inner", "1", InferRequest(model="inner"))
    member.routed("10.0.0.1:8003")
    called = served(SpanIds(ParentSpan(7, 8, state="a=1")), number + 3)
    return failed, parent, member, called, served(SpanIds(ParentSpan(7, 8)), number + 4)


@pytest.mark.parametrize("most", [1, 2, 3, 10, 100, BATCH])
def test_a_queue_of_all_kinds_of_traces_loses_no_span_and_fills_no_message_above_its_limit(
    most: int,
) -> None:
    queue, traces = new_queue(), []
    for n in range(0, 300, 10):
        traces += [*unusual(queue.ids, n + 1), served(queue.ids, n + 6, model="other")]
        traces += [served(queue.ids, n + 7 + i, wire=GRPC if i else HTTP) for i in range(3)]
    for trace in traces:
        queue.keep(trace)
    found, counts = taken(queue, most)
    assert in_order(found) == in_order(expected(traces))
    assert len(counts) <= 3 * (len(found) / most + 1)


def test_rows_and_other_traces_share_a_batch() -> None:
    queue = new_queue()
    for n in range(1, 101):
        queue.keep(served(queue.ids, n))
        queue.keep(served(SpanIds(ParentSpan(7, 8)), n))
    batch = queue.next_batch(60)
    ((pieces, count),) = batch.messages(60)
    callers = [each.parent_span_id.hex() for each in read_spans(map(bytes, pieces))]
    assert (batch.counted, count, callers.count(f"{8:016x}")) == (60, 60, 10)


def test_models_take_turns_so_that_none_waits_for_the_busiest() -> None:
    queue = new_queue()
    for model in ("busy", "quiet"):
        for n in range(1, 41):
            queue.keep(served(queue.ids, n, model=model))
    for model in ("busy", "quiet", "busy"):
        ((pieces, _),) = queue.next_batch(30).messages(30)
        assert model in {each.name for each in read_spans(map(bytes, pieces))}


def test_kinds_of_traces_beyond_the_limit_are_kept_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(span_queue, "MOST_ROWS", 2)
    queue = new_queue()
    traces = [served(queue.ids, n + 1, model=f"m{n % 4}") for n in range(40)]
    for trace in traces:
        queue.keep(trace)
    assert (len(queue._rows), len(queue._traces)) == (2, 20)  # noqa: SLF001
    found, _ = taken(queue)
    assert in_order(found) == in_order(expected(traces))


@pytest.mark.parametrize("count", [1, 2 * FEW])
def test_a_trace_whose_spans_cannot_be_built_costs_its_spans_only(
    count: int, caplog: pytest.LogCaptureFixture
) -> None:
    queue = new_queue()
    for n in range(count):
        trace = served(queue.ids, n + 1)
        trace.phases = Phases(1, 2.5, 3)  # type: ignore[arg-type]
        queue.keep(trace)
    queue.keep(served(queue.ids, 99))
    with caplog.at_level(logging.ERROR, "sluice.trace"):
        batch = queue.next_batch(BATCH)
    assert (batch.counted, batch.failed) == (SPANS_OF_ROW * (count + 1), SPANS_OF_ROW * count)
    assert [each.msg for each in caplog.records] == ["spans not built"] * count
    assert len(read_spans(map(bytes, next(batch.messages(BATCH))[0]))) == SPANS_OF_ROW


def test_rows_that_cannot_be_built_end_no_thread(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    queue = new_queue()
    queue.keep(served(queue.ids, 1))
    monkeypatch.setattr(span_rows, "row_of", None)
    batch: SpanBatch = queue.next_batch(BATCH)
    assert (batch.counted, batch.failed, list(batch.messages(BATCH))) == (3, 3, [])
    assert [each.msg for each in caplog.records] == ["spans not built"]


def test_the_ids_of_a_trace_are_those_that_were_read_before_its_end() -> None:
    ids = NumberedIds()
    trace = SpanTrace(5, ids, lambda _: None)
    sent = trace.headers["traceparent"]
    later = ids.of(5)
    assert sent == f"00-{later.trace_id:032x}-{later.model_id:016x}-01"
    assert later.root_id != later.model_id
    assert {NumberedIds().of(5).trace_id, ids.of(6).trace_id}.isdisjoint({later.trace_id})
