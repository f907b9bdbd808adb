"""Requests to language models in the names of OpenTelemetry's conventions."""

import json
from typing import Any

import pytest

from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest, InferResponse, Usage
from gateway.models.gen_ai_metrics import DURATION, FAMILIES, FIRST_TOKEN, PER_TOKEN, GenAiMetrics
from gateway.observability.gen_ai import Generated, operation_of, request_attributes
from gateway.observability.request_record import Record
from gateway.observability.span_trace import SpanTrace
from gateway.observability.traceparent import ParentSpan, SpanIds
from gateway.openai_contract import ENDPOINT, REQUEST, RESPONSE, Endpoint
from gateway.tensor import text_tensor
from tests.builders import text_response


@pytest.mark.parametrize(
    ("endpoint", "members", "found"),
    [
        (Endpoint.CHAT, {}, {"gen_ai.operation.name": "chat"}),
        (Endpoint.COMPLETIONS, {"n": 1}, {"gen_ai.operation.name": "text_completion"}),
        (Endpoint.EMBEDDINGS, {"input": "x"}, {"gen_ai.operation.name": "embeddings"}),
        (Endpoint.RERANK, {"seed": 1}, {}),
        (
            Endpoint.CHAT,
            {"max_completion_tokens": 9, "top_k": 4, "seed": 5, "n": 2, "stream": True},
            {
                "gen_ai.operation.name": "chat",
                "gen_ai.request.max_tokens": 9,
                "gen_ai.request.top_k": 4,
                "gen_ai.request.seed": 5,
                "gen_ai.request.choice.count": 2,
                "gen_ai.request.stream": True,
            },
        ),
        (
            Endpoint.CHAT,
            {"max_tokens": 2**63, "temperature": "hot", "seed": True, "n": [1], "stream": 1},
            {"gen_ai.operation.name": "chat"},
        ),
    ],
)
def test_the_attributes_of_a_request(
    endpoint: Endpoint, members: dict[str, Any], found: dict[str, Any]
) -> None:
    assert request_attributes(endpoint, members) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"id":"chatcmpl-1","object":"x"}', "chatcmpl-1"),
        ('{"id": "cmpl-2"}', "cmpl-2"),
        ('{"id":"a\\nb"}', ""),
        ('{"object":"x","id":"chatcmpl-1"}', ""),
        ("no JSON", ""),
    ],
)
def test_the_id_of_an_answer_is_read_of_its_beginning(text: str, found: str) -> None:
    generated = Generated()
    response = InferResponse(outputs=(text_tensor(RESPONSE, [text]),), usage=Usage(1, 1))
    generated.add(response, 5)
    assert generated.attributes("m", 1).get("gen_ai.response.id", "") == found


MS = 1_000_000
"""Nanoseconds."""
WHOLE = '{"id":"x","choices":[],"usage":%s,"prompt_logprobs":null}'
CHUNK = '{"id":"x","choices":[],"usage":%s}'
CHAT_USAGE = (
    '{"total_tokens":9,"completion_tokens_details":{"audio_tokens":2,"reasoning_tokens":5}}'
)
RESPONSES_USAGE = '{"output_tokens": 7, "output_tokens_details": {"reasoning_tokens": 0}}'


@pytest.mark.parametrize(
    ("texts", "found"),
    [
        ([WHOLE % CHAT_USAGE], 5),
        ([CHUNK % "null", CHUNK % CHAT_USAGE], 5),
        ([CHUNK % CHAT_USAGE, CHUNK % CHAT_USAGE.replace("5", "12")], 12),
        ([WHOLE % RESPONSES_USAGE], 0),
        (["x" * 5000 + WHOLE % CHAT_USAGE], 5),
        ([WHOLE % CHAT_USAGE, CHUNK % "null"], 5),
        ([WHOLE % '{"completion_tokens":3,"completion_tokens_details":null}'], None),
        ([json.dumps({"choices": [{"text": WHOLE % CHAT_USAGE}]})], None),
        (["no JSON"], None),
    ],
)
def test_tokens_of_thoughts_are_those_of_the_usage_in_an_answer(
    texts: list[str], found: int | None
) -> None:
    generated = Generated()
    for ns, text in enumerate(texts, 5):
        response = InferResponse(outputs=(text_tensor(RESPONSE, [text]),), usage=Usage(1, 1))
        generated.add(response, ns)
    attributes = generated.attributes("m", 1)
    assert attributes.get("gen_ai.usage.reasoning.output_tokens") == found


def openai_request(endpoint: str = "") -> InferRequest:
    inputs = [text_tensor(REQUEST, ["{}"])]
    if endpoint:
        inputs.append(text_tensor(ENDPOINT, [endpoint]))
    return InferRequest(model="m", inputs=tuple(inputs))


def test_the_operation_is_that_of_the_endpoint() -> None:
    endpoints = ("", "completions", "embeddings", "tokenize", "other")
    operations = [operation_of(openai_request(each)) for each in endpoints]
    assert operations == ["chat", "text_completion", "embeddings", "", ""]
    assert operation_of(InferRequest(model="m")) == ""


def counts(metrics: GenAiMetrics) -> dict[str, list[dict[str, str]]]:
    """The labels of the histograms of each family, as often as there are observations."""
    return {
        family.name: [
            dict(sample.labels)
            for sample in family.samples
            if sample.name.endswith("_count")
            for _ in range(int(sample.value))
        ]
        for family in metrics.families()
    }


def test_tokens_and_failures_are_observed(record: Record) -> None:
    metrics = GenAiMetrics()
    recorder = metrics.tap(openai_request(), "m", None).recorder(record, record)
    record.started()
    recorder.responded(text_response("a", tokens=2))
    recorder.delivered("text_output", [b"b", b"c"], [1, None])
    recorder.ended(None)
    labels = {
        "gen_ai_operation_name": "chat",
        "gen_ai_provider_name": "sluice",
        "gen_ai_request_model": "m",
    }
    assert counts(metrics) == {DURATION: [labels], FIRST_TOKEN: [labels], PER_TOKEN: [labels]}
    assert record.statistics.completion_tokens == 3


def test_observations_have_the_trace_of_their_request(record: Record) -> None:
    metrics = GenAiMetrics()
    record.trace = SpanTrace(1, SpanIds(ParentSpan(7, 8)), lambda _: None)
    recorder = metrics.tap(openai_request(), "m", None).recorder(record, record)
    record.started()
    recorder.responded(text_response("a", tokens=2))
    recorder.responded(text_response("b", tokens=2))
    recorder.ended(None)
    traced = [
        sample.exemplar.labels["trace_id"]
        for family in metrics.families()
        for sample in family.samples
        if sample.exemplar
    ]
    assert traced == 3 * [f"{7:032x}"]


class Clock:
    """The time of the metrics, in the place of the module `time`."""

    def __init__(self, ns: int) -> None:
        self.ns = ns

    def perf_counter_ns(self) -> int:
        return self.ns


def observed(metrics: GenAiMetrics) -> dict[str, tuple[float, str]]:
    """The sum of each family with one observation, and the bound of its first bucket with it."""
    found = {}
    for family in metrics.families():
        values = {sample.name: sample.value for sample in family.samples}
        if values.get(f"{family.name}_count") == 1:
            buckets = [each for each in family.samples if each.name.endswith("_bucket")]
            bound = next(each.labels["le"] for each in buckets if each.value)
            found[family.name] = round(values[f"{family.name}_sum"], 9), bound
    return found


@pytest.mark.parametrize(
    "error", [None, InferenceError(Code.UNKNOWN, "no")], ids=["whole", "fails"]
)
def test_times_of_tokens_are_those_of_the_conventions(
    record: Record, monkeypatch: pytest.MonkeyPatch, error: InferenceError | None
) -> None:
    """The first two tokens after 50 ms, three further ones until 450 ms, the end after 500 ms.

    The request is submitted some time after it is received.
    """
    record.submitted_ns += 7 * MS
    clock, metrics = Clock(record.received_ns), GenAiMetrics()
    monkeypatch.setattr("gateway.models.gen_ai_metrics.time", clock)
    recorder = metrics.tap(openai_request(), "m", None).recorder(record, record)
    record.started()
    begun_ns = clock.ns
    clock.ns = begun_ns + 20 * MS
    recorder.responded(text_response(""))
    clock.ns = begun_ns + 50 * MS
    recorder.responded(text_response("a", tokens=2))
    clock.ns = begun_ns + 200 * MS
    recorder.delivered("text_output", [b"b", b"c"], [1, None])
    clock.ns = begun_ns + 450 * MS
    recorder.delivered("text_output", [b"d", b"e"], [1, 1])
    clock.ns = begun_ns + 500 * MS
    recorder.ended(error)
    found = observed(metrics)
    assert found.pop(DURATION) == (0.5, "0.64")
    times = {FIRST_TOKEN: (0.05, "0.06"), PER_TOKEN: (0.1, "0.1")}
    assert found == ({} if error else times)


def test_one_token_has_no_time_per_token(record: Record) -> None:
    metrics = GenAiMetrics()
    recorder = metrics.tap(openai_request(), "m", None).recorder(record, record)
    record.started()
    recorder.responded(text_response("a", tokens=1))
    recorder.ended(None)
    assert observed(metrics).keys() == {DURATION, FIRST_TOKEN}


def test_a_failure_without_tokens_has_a_duration_only(record: Record) -> None:
    metrics = GenAiMetrics()
    recorder = metrics.tap(openai_request("completions"), "m", None).recorder(record, record)
    recorder.ended(InferenceError(Code.UNAVAILABLE, "later"))
    (labels,) = counts(metrics)[DURATION]
    assert labels["error_type"] == "UNAVAILABLE"
    assert counts(metrics)[FIRST_TOKEN] == []


def test_a_request_without_tokens_is_not_observed(record: Record) -> None:
    metrics = GenAiMetrics()
    recorder = metrics.tap(InferRequest(model="m"), "m", None).recorder(record, record)
    record.started()
    recorder.responded(text_response("a"))
    recorder.ended(None)
    assert counts(metrics) == {name: [] for name in FAMILIES}


def test_the_buckets_are_those_of_the_conventions() -> None:
    assert FAMILIES[DURATION][1][-1] == 81.92
    assert [len(bounds) for _, bounds in FAMILIES.values()] == [14, 16, 13]
