"""The work of the real engine is counted: tokens, times, and the engine's own series."""

from collections import Counter

import pytest

from tests.conformance.clients import connect
from tests.e2e.figures import changes, figures
from tests.e2e.llama import QUESTION, Llama, every_engine
from tests.serving import Serving, http_get

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(240)]

TOKENS = 16
COUNTED = {"messages": QUESTION, "max_tokens": TOKENS, "ignore_eos": True, "seed": 1}
ROUNDED_US = 2
"""Each of the two parts is cut to whole microseconds."""

ENGINE_SERIES = (
    *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"),
    *("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:request_success_total"),
    *("vllm:time_to_first_token_seconds_count", "vllm:inter_token_latency_seconds_count"),
    *("vllm:e2e_request_latency_seconds_count", "vllm:time_per_output_token_seconds_count"),
)


@every_engine
@pytest.mark.parametrize("sequences", [1, 2])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_the_tokens_that_were_asked_for_are_counted_once(
    server: Serving, llama: Llama, sequences: int, stream: bool
) -> None:
    with changes(server) as change:
        prompt_tokens = ask(llama, sequences, stream=stream)
    assert change["gateway_completion_tokens_total"] == sequences * TOKENS
    assert change["gateway_prompt_tokens_total"] == prompt_tokens
    assert change["gateway_wasted_tokens_total"] == 0


@pytest.mark.parametrize("sequences", [1, 2])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_the_engine_counts_the_same_tokens(
    server: Serving, llama: Llama, sequences: int, stream: bool
) -> None:
    with changes(server) as change:
        ask(llama, sequences, stream=stream)
    assert change["vllm:generation_tokens_total"] == sequences * TOKENS


@every_engine
def test_a_request_is_one_success_one_inference_and_one_execution(
    server: Serving, llama: Llama
) -> None:
    with changes(server) as change:
        ask(llama, stream=True)
    assert change["nv_inference_request_success"] == 1
    assert change["nv_inference_count"] == 1
    assert change["nv_inference_exec_count"] == 1
    assert change["nv_inference_request_failure"] == 0


@every_engine
def test_a_refused_prompt_is_one_failure_and_no_inference(server: Serving, llama: Llama) -> None:
    with changes(server) as change:
        assert llama.post("/generate", {"text_input": ""}).status_code == 400
    assert change["nv_inference_request_failure"] == 1
    assert change["nv_inference_request_success"] == change["nv_inference_count"] == 0


@every_engine
def test_a_stream_fills_the_histograms_of_its_times(server: Serving, llama: Llama) -> None:
    with changes(server) as change:
        ask(llama, stream=True)
    assert change["gateway_time_to_first_token_seconds_count"] == 1
    assert change["gateway_time_to_first_token_seconds_sum"] > 0
    assert change["gateway_overhead_seconds_count"] == 1
    assert change["nv_inference_first_response_histogram_ms_count"] == 1
    assert 1 <= change["gateway_inter_token_seconds_count"] < TOKENS
    assert change["gateway_inter_token_seconds_sum"] > 0


@every_engine
def test_overhead_is_the_smaller_part_of_the_time_to_the_first_token(
    server: Serving, llama: Llama
) -> None:
    with changes(server) as change:
        ask(llama, stream=True)
    overhead = change["gateway_overhead_seconds_sum"]
    assert 0 < overhead < change["gateway_time_to_first_token_seconds_sum"]


@every_engine
def test_the_durations_of_a_request_fit_into_each_other(server: Serving, llama: Llama) -> None:
    with changes(server) as change:
        ask(llama, stream=True)
    inside = change["nv_inference_queue_duration_us"]
    inside += change["nv_inference_compute_infer_duration_us"]
    assert 0 < inside <= change["nv_inference_request_duration_us"] + ROUNDED_US


@every_engine
@pytest.mark.parametrize("wire", ["http.aio", "grpc.aio"])
async def test_model_statistics_agree_with_the_metrics(
    server: Serving, llama: Llama, wire: str
) -> None:
    ask(llama, stream=False)
    async with connect(server, wire) as client:
        (row,) = (await client.statistics("llama")).model_stats
    total = figures(server)
    assert row.inference_count == total["nv_inference_count"]
    assert row.execution_count == total["nv_inference_exec_count"]
    assert row.inference_stats.success.count == total["nv_inference_request_success"]
    assert row.inference_stats.fail.count == total["nv_inference_request_failure"]
    times = {
        "nv_inference_request_duration_us": row.inference_stats.success.ns,
        "nv_inference_queue_duration_us": row.inference_stats.queue.ns,
        "nv_inference_compute_infer_duration_us": row.inference_stats.compute_infer.ns,
    }
    # The metrics lose the fraction of a microsecond of each request, as Triton's do.
    for name, ns in times.items():
        assert 0 <= ns / 1000 - total[name] < row.inference_stats.success.count


@pytest.mark.own_models("the metrics of models")
def test_the_engines_own_series_carry_the_labels_of_the_model(
    server: Serving, llama: Llama
) -> None:
    ask(llama, stream=True)
    labelled = {
        sample.partition("{")[0]
        for sample in server.metrics()
        if 'model="llama"' in sample and 'version="1"' in sample
    }
    assert labelled.issuperset(ENGINE_SERIES)


@every_engine
def test_the_page_has_each_sample_once_and_each_family_in_one_piece(server: Serving) -> None:
    lines = http_get(server.ports["metrics"], "/metrics")[1].decode().splitlines()
    samples = Counter(line.rpartition(" ")[0] for line in lines if not line.startswith("#"))
    families = Counter(line for line in lines if line.startswith("# TYPE"))
    assert [each for each, count in (samples + families).items() if count > 1] == []


def ask(llama: Llama, sequences: int = 1, *, stream: bool) -> int:
    """Ask for TOKENS per sequence; how many the prompt has."""
    asked = {**COUNTED, "n": sequences, "return_num_input_tokens": True}
    answer = llama.stream(**asked)[0] if stream else llama.generate(**asked)
    return int(answer["num_input_tokens"])
