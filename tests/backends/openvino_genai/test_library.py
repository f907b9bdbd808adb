"""The names of the library that the program uses, in the installed version."""

from typing import Any

import pytest

genai: Any = pytest.importorskip("openvino_genai")

USED = {
    "ContinuousBatchingPipeline": (
        *("add_request", "step", "has_non_finished_requests"),
        *("get_config", "get_metrics", "get_tokenizer"),
    ),
    "GenerationConfig": (
        *("apply_chat_template", "do_sample", "eos_token_id", "frequency_penalty", "ignore_eos"),
        *("logprobs", "max_new_tokens", "min_new_tokens", "min_p"),
        *("presence_penalty", "repetition_penalty", "rng_seed", "set_eos_token_id"),
        *("stop_token_ids", "structured_output_config", "temperature", "top_k", "top_p"),
        "validate",
    ),
    "GenerationHandle": ("can_read", "cancel", "get_status", "read"),
    "GenerationOutput": ("finish_reason", "generated_ids", "generated_log_probs"),
    "PipelineMetrics": ("cache_usage", "scheduled_requests"),
    "SchedulerConfig": (
        *("cache_size", "dynamic_split_fuse", "enable_prefix_caching"),
        *("max_num_batched_tokens", "max_num_seqs", "num_kv_blocks"),
    ),
    "StructuredOutputConfig": ("grammar", "json_schema", "regex"),
    "Tokenizer": ("apply_chat_template", "decode", "encode", "get_eos_token_id", "get_vocab"),
}


@pytest.mark.parametrize("name", USED)
def test_a_class_has_the_used_names(name: str) -> None:
    found = getattr(genai, name, None) or getattr(genai.py_openvino_genai, name)
    assert set(USED[name]) <= set(dir(found))


def test_the_used_reasons_and_status_exist() -> None:
    assert {"STOP", "LENGTH", "NONE"} <= set(dir(genai.GenerationFinishReason))
    status = getattr(genai, "GenerationStatus", None) or genai.py_openvino_genai.GenerationStatus
    assert "IGNORED" in dir(status)
