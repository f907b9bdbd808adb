"""Every name of vLLM in use is where it was, with the same parameters; a moved one fails."""

import inspect
from importlib import import_module
from typing import Any

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(120)]

OPENAI = "vllm.entrypoints.openai"
SERVE = "vllm.entrypoints.serve"
POOLING = "vllm.entrypoints.pooling"
TAKEN = {
    "vllm.entrypoints.launchers.api_server.app_state:init_app_state": (
        *("engine_client", "state", "args", "supported_tasks"),
    ),
    f"{OPENAI}.chat_completion.serving:OpenAIServingChat.create_chat_completion": (
        *("self", "request", "raw_request"),
    ),
    f"{OPENAI}.completion.serving:OpenAIServingCompletion.create_completion": (
        *("self", "request", "raw_request"),
    ),
    f"{OPENAI}.responses.serving:OpenAIServingResponses.create_responses": (
        *("self", "request", "raw_request"),
    ),
    f"{POOLING}.base.serving:PoolingBaseServing.__call__": ("self", "request", "raw_request"),
    f"{POOLING}.scoring.serving:ServingScores.__call__": ("self", "args", "kwargs"),
    f"{SERVE}.tokenize.serving:ServingTokenization.create_tokenize": (
        *("self", "request", "raw_request"),
    ),
    f"{SERVE}.tokenize.serving:ServingTokenization.create_detokenize": (
        *("self", "request", "raw_request"),
    ),
    f"{SERVE}.exception_handling.error_response:create_error_response": (
        *("message", "err_type", "status_code", "param"),
    ),
    f"{OPENAI}.models.protocol:LoRAModulePath": (
        *("name", "path", "base_model_name", "is_3d_lora_weight"),
    ),
    "vllm.renderers.online_renderer:OnlineRenderer.render_chat": (
        *("self", "request", "skip_mm_cache"),
    ),
    "vllm.v1.engine.async_llm:AsyncLLM.generate": (
        *("self", "prompt", "sampling_params", "request_id", "prompt_text", "lora_request"),
        *("tokenization_kwargs", "trace_headers", "priority", "data_parallel_rank"),
        *("session_id", "kv_hints", "reasoning_ended", "reasoning_parser_kwargs"),
    ),
    "vllm.v1.engine.async_llm:AsyncLLM.encode": (
        *("self", "prompt", "pooling_params", "request_id", "lora_request", "trace_headers"),
        *("priority", "tokenization_kwargs", "reasoning_ended"),
    ),
    "vllm.v1.engine.async_llm:AsyncLLM.add_request": (
        *("self", "request_id", "prompt", "params", "arrival_time", "lora_request"),
        *("tokenization_kwargs", "trace_headers", "priority", "data_parallel_rank"),
        *("session_id", "prompt_text", "reasoning_ended", "reasoning_parser_kwargs", "kv_hints"),
    ),
    "vllm.v1.engine.async_llm:AsyncLLM.abort": ("self", "request_id", "internal"),
    "vllm.v1.engine.output_processor:RequestState.make_request_output": (
        *("self", "new_token_ids", "pooling_output", "finish_reason", "stop_reason"),
        *("kv_transfer_params", "ec_transfer_params", "error"),
    ),
    "vllm.v1.engine.output_processor:OutputProcessor.process_outputs": (
        *("self", "engine_core_outputs", "engine_core_timestamp", "iteration_stats"),
        "weight_version",
    ),
    "vllm.v1.engine.detokenizer:BaseIncrementalDetokenizer.get_next_output_text": (
        *("self", "finished", "delta"),
    ),
    "vllm.v1.engine.detokenizer:BaseIncrementalDetokenizer.update": (
        *("self", "new_token_ids", "stop_terminated"),
    ),
    "vllm.v1.engine.detokenizer:FastIncrementalDetokenizer.decode_next": ("self", "next_token_id"),
    "vllm.v1.metrics.loggers:PrometheusStatLogger.record": (
        *("self", "scheduler_stats", "iteration_stats", "mm_cache_stats", "engine_idx"),
    ),
    "vllm.renderers.base:BaseRenderer.get_eos_token_id": ("self",),
    "vllm.parser.abstract_parser:DelegatingParser.parse_delta": (
        *("self", "delta_text", "delta_token_ids", "request", "prompt_token_ids", "finished"),
    ),
}
ARGUMENTS = {
    *("model", "served_model_name", "enable_log_requests", "structured_outputs_config"),
    *("lora_modules", "chat_template", "trust_request_chat_template", "tool_call_parser"),
    *("enable_auto_tool_choice", "log_error_stack"),
}
"""The arguments of `vllm serve` that are set."""


def found(place: str) -> Any:
    module, _, path = place.partition(":")
    thing = import_module(module)
    for name in path.split("."):
        thing = getattr(thing, name)
    return thing


@pytest.mark.parametrize("place", TAKEN, ids=lambda place: place.rpartition(":")[2])
def test_what_is_called_takes_what_it_took(place: str) -> None:
    assert tuple(inspect.signature(found(place)).parameters) == TAKEN[place]


def test_handlers_hold_the_engine_where_an_exchange_takes_its_place() -> None:
    bases = (f"{SERVE[: -len('.serve')]}.generate.base.serving:GenerateBaseServing",)
    for place in (*bases, f"{POOLING}.base.serving:PoolingBaseServing"):
        source = inspect.getsource(found(place).__init__)
        assert "self.engine_client = engine_client" in source


def test_the_arguments_of_the_server_have_the_names_that_are_set() -> None:
    parser = found("vllm.utils.argparse_utils:FlexibleArgumentParser")()
    made = found("vllm.entrypoints.launchers.cli_args:make_arg_parser")(parser).parse_args([])
    assert vars(made).keys() >= ARGUMENTS


def test_the_store_of_responses_can_be_switched_off() -> None:
    serving = found(f"{OPENAI}.responses.serving:OpenAIServingResponses")
    assert "self.enable_store = " in inspect.getsource(serving.__init__)


def test_the_setting_for_redirects_exists() -> None:
    from backends.vllm.engine import REDIRECTS

    assert found(f"vllm.envs:{REDIRECTS}") in (True, False)


def test_no_address_has_the_domain_that_stands_for_none() -> None:
    from backends.vllm.settings import NOWHERE

    connector = found("vllm.multimodal.media.connector:MediaConnector")(
        allowed_media_domains=[NOWHERE]
    )
    for address in ("http://localhost/x.png", f"http://{NOWHERE}/x.png", "https:///x.png"):
        with pytest.raises(ValueError, match=r"must be from one of the allowed domains|parse"):
            connector.load_from_url(address, found("vllm.multimodal.media:ImageMediaIO")())


def test_the_renderer_has_the_functions_that_render_in_threads() -> None:
    """`backends.vllm.prompts` stands in front of them."""
    renderer = inspect.getsource(found("vllm.renderers.base:BaseRenderer.__init__"))
    assert (
        "self._tokenize_prompt_async = make_async(\n            self._tokenize_prompt," in renderer
    )
    chats = inspect.getsource(found("vllm.renderers.hf:HfRenderer.__init__"))
    assert "self._apply_chat_template_async = make_async(" in chats
    assert "            safe_apply_chat_template, executor=" in chats
    rendered = inspect.getsource(found("vllm.renderers.hf:HfRenderer.render_messages_async"))
    assert (
        "await self._render_with_timeout(\n            self._apply_chat_template_async(" in rendered
    )
    assert found("vllm.tokenizers.hf:ThreadSafeHFTokenizerMixin")


def test_diverted_deltas_find_what_they_replace() -> None:
    """Without one of these all outputs go vLLM's way, or a delta would lose a part of it."""
    place = "vllm.v1.engine.output_processor"
    state = inspect.getsource(found(f"{place}:RequestState.__init__"))
    for name in ("output_kind", "parent_req", "stream_interval", "streaming_input", "detokenizer"):
        assert f"self.{name} = " in state
    assert "self.sampling_mask_chunks: " in state
    assert "self.request_states: " in inspect.getsource(found(f"{place}:OutputProcessor.__init__"))
    assert "self.output: " in inspect.getsource(found(f"{place}:RequestOutputCollector.__init__"))
    detokenizer = found("vllm.v1.engine.detokenizer:FastIncrementalDetokenizer.__init__")
    for name in ("tokenizer: Tokenizer", "spaces_between_special_tokens"):
        assert f"self.{name} = " in inspect.getsource(detokenizer)
    record = inspect.getsource(found("vllm.v1.metrics.loggers:PrometheusStatLogger.record"))
    assert "for itl in iteration_stats.inter_token_latencies_iter:" in record
    assert "self.histogram_inter_token_latency[engine_idx].observe(itl)" in record
    processed = inspect.getsource(found(f"{place}:OutputProcessor.process_outputs"))
    assert "if request_output := req_state.make_request_output(" in processed
    parser = found("vllm.tool_parsers.abstract_tool_parser:ToolParser")
    assert parser.engine_based_streaming is False
