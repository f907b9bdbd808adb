"""The trace of a request on the real engine: from the caller through the gateway into vLLM."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from secrets import token_hex
from typing import Any

import httpx
import pytest

from tests.collector import Collector, collector, grpc_collector, tree, values
from tests.e2e.llama import ANSWER_SECS, DTYPE, GREEDY, QUESTION, events, write_llama
from tests.fork_server import forked_with_engines
from tests.rpc import connected, infer_request, streaming
from tests.serving import Serving, running

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

PARENT = "b7ad6b7169203331"
TEXT = "Once upon a time"
SAMPLING = {**GREEDY, "ignore_eos": True}
TOKENS = SAMPLING["max_tokens"]


@pytest.fixture(scope="module")
def spans() -> Iterator[Collector]:
    """The collector of the gateway."""
    with collector() as found:
        yield found


@pytest.fixture(scope="module")
def engine_spans() -> Iterator[Collector]:
    """The collector of vLLM, which sends by gRPC."""
    with grpc_collector() as found:
        yield found


@pytest.fixture(scope="module")
def tracing(
    one_layer: Path,
    tmp_path_factory: pytest.TempPathFactory,
    spans: Collector,
    engine_spans: Collector,
) -> Iterator[Serving]:
    """A server that traces the requests with a `traceparent`, as its engine does."""
    repository = tmp_path_factory.mktemp("repository")
    arguments = {"model": str(one_layer), "dtype": DTYPE, "reasoning_parser": "olmo3"}
    write_llama(repository, {**arguments, "otlp_traces_endpoint": engine_spans.url})
    settings = (
        "mode=opentelemetry",
        "level=TIMESTAMPS",
        "rate=0",
        f"opentelemetry,url={spans.url}",
    )
    flags = [f"--trace-config={each}" for each in settings]
    soon = {"OTEL_BSP_SCHEDULE_DELAY": "20"}
    with running(Serving(repository, flags, soon, start=forked_with_engines)) as server:
        yield server


@pytest.fixture
def trace_id() -> str:
    """The trace of the caller."""
    return token_hex(16)


def headers(trace_id: str) -> dict[str, str]:
    return {"traceparent": f"00-{trace_id}-{PARENT}-01"}


def over_http(server: Serving, trace_id: str) -> None:
    body = {"text_input": TEXT, "stream": True, "parameters": SAMPLING}
    url = f"{server.http}/v2/models/llama/generate_stream"
    answer = httpx.post(url, json=body, headers=headers(trace_id), timeout=ANSWER_SECS)
    assert answer.status_code == 200, answer.text


def over_grpc(server: Serving, trace_id: str) -> None:
    message: Any = infer_request("llama", text_input=TEXT, sampling_parameters=json.dumps(SAMPLING))
    with (
        connected(server.grpc) as stub,
        streaming(stub, metadata=tuple(headers(trace_id).items())) as rpc,
    ):
        rpc.ask(message)
        assert not rpc.answer().error_message


@pytest.mark.parametrize("ask", [over_http, over_grpc], ids=lambda ask: ask.__name__)
def test_the_trace_of_a_caller_reaches_into_the_engine(
    tracing: Serving,
    spans: Collector,
    engine_spans: Collector,
    trace_id: str,
    ask: Callable[[Serving, str], None],
) -> None:
    ask(tracing, trace_id)
    found = spans.trace(6, trace_id)
    assert tree(found) == {
        "InferRequest": ["llama"],
        "llama": ["compute"],
        "compute": ["engine.queue", "generate", "prefill"],
    }
    by_name = {each.name: each for each in found}
    assert by_name["InferRequest"].parent_span_id.hex() == PARENT
    phases = [by_name[name] for name in ("engine.queue", "prefill", "generate")]
    bounds = [(each.start_time_unix_nano, each.end_time_unix_nano) for each in phases]
    compute = by_name["compute"]
    assert compute.start_time_unix_nano <= bounds[0][0]
    assert [end for _, end in bounds[:2]] == [start for start, _ in bounds[1:]]
    assert bounds[2][1] <= compute.end_time_unix_nano
    assert bounds[1][0] < bounds[1][1] < bounds[2][1]

    (of_engine,) = engine_spans.trace(1, trace_id)
    assert of_engine.name == "llm_request"
    assert of_engine.parent_span_id == by_name["llama"].span_id
    counted = values(of_engine)
    assert counted["gen_ai.usage.completion_tokens"] == TOKENS
    model = values(by_name["llama"])
    assert model["gen_ai.usage.output_tokens"] == TOKENS
    assert counted["gen_ai.usage.prompt_tokens"] == model["gen_ai.usage.input_tokens"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_the_span_of_a_chat_has_the_tokens_of_thoughts_that_its_usage_has(
    tracing: Serving, spans: Collector, trace_id: str, stream: bool
) -> None:
    """The parser of vLLM, which reads text, reports that it counts none."""
    body: dict[str, Any] = {"model": "llama", "messages": QUESTION, **GREEDY, "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    url = f"{tracing.http}/v1/chat/completions"
    answer = httpx.post(url, json=body, headers=headers(trace_id), timeout=ANSWER_SECS)
    assert answer.status_code == 200, answer.text
    last = events(answer.text.replace("data: [DONE]", ""))[-1] if stream else answer.json()
    usage = last["usage"]
    found = values(next(each for each in spans.trace(6, trace_id) if each.name == "llama"))
    assert found["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    assert (
        found["gen_ai.usage.reasoning.output_tokens"]
        == (usage["completion_tokens_details"]["reasoning_tokens"])
    )
