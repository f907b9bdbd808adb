"""Inputs and outputs of TensorRT-LLM models.

They are those of Triton's LLM-API model, of its classic ensemble (`max_tokens`, `stop_words`, ...)
and of the text contract. All inputs are optional, since any of three can carry the prompt; all
outputs but the text are sent only on request.
"""

from gateway.config import ModelInput, ModelOutput
from gateway.config.data_type import DataType
from gateway.generation import MESSAGES, SAMPLING_PARAMETERS, STREAM, TEXT_INPUT, TEXT_OUTPUT
from gateway.openai_contract import ENDPOINT, REQUEST, RESPONSE

_LLM_API = "sampling_param_"

_TEXT = (
    *(MESSAGES, REQUEST, ENDPOINT, SAMPLING_PARAMETERS),
    *("lora_name", "guided_decoding_guide_type", "guided_decoding_guide"),
)
_TEXTS = (TEXT_INPUT, "stop_words", "bad_words", f"{_LLM_API}stop")
_FLAG = (
    *(STREAM, "streaming", "stop"),
    *("exclude_input_in_output", f"{_LLM_API}exclude_input_from_output"),
    *("return_finish_reason", "return_stop_reason", "return_cumulative_logprob"),
    *("return_log_probs", "return_logprobs", "return_num_input_tokens", "return_num_output_tokens"),
    *("return_perf_metrics", f"{_LLM_API}return_perf_metrics"),
)
_INT32 = (
    *("max_tokens", "min_tokens", "min_length", "top_k", "end_id", "pad_id"),
    *("beam_width", "num_return_sequences"),
    *(f"{_LLM_API}{name}" for name in ("best_of", "top_k", "max_tokens")),
)
_FP32 = (
    *("temperature", "top_p", "length_penalty"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
    *(
        f"{_LLM_API}{name}"
        for name in ("temperature", "top_p", "frequency_penalty", "presence_penalty")
    ),
)
_UINT64 = ("seed", "random_seed", f"{_LLM_API}seed", "lora_task_id")


def _inputs(names: tuple[str, ...], data_type: DataType, dim: int = 1) -> tuple[ModelInput, ...]:
    return tuple(
        ModelInput(name=name, data_type=data_type, dims=(dim,), optional=True) for name in names
    )


def _outputs(
    names: tuple[str, ...], data_type: DataType, dims: tuple[int, ...] = (-1,)
) -> tuple[ModelOutput, ...]:
    return tuple(ModelOutput(name=name, data_type=data_type, dims=dims) for name in names)


INPUTS = (
    *_inputs(_TEXTS, DataType.TYPE_STRING, -1),
    *_inputs(_TEXT, DataType.TYPE_STRING),
    *_inputs(_FLAG, DataType.TYPE_BOOL),
    *_inputs(_INT32, DataType.TYPE_INT32),
    *_inputs(_FP32, DataType.TYPE_FP32),
    *_inputs(_UINT64, DataType.TYPE_UINT64),
)

OUTPUTS = (
    *_outputs((TEXT_OUTPUT, "finish_reason", "stop_reason", "logprobs"), DataType.TYPE_STRING),
    *_outputs(("cumulative_logprob", "cum_log_probs"), DataType.TYPE_FP32),
    *_outputs(("output_log_probs",), DataType.TYPE_FP32, (-1, -1)),
    *_outputs(("num_input_tokens",), DataType.TYPE_INT32, (1,)),
    *_outputs(
        (
            *("num_output_tokens", "sequence_index"),
            *("kv_cache_reused_block", "kv_cache_reused_blocks", "kv_cache_missed_block"),
            *("kv_cache_alloc_new_blocks", "kv_cache_alloc_total_blocks"),
            *("total_accepted_draft_tokens", "total_draft_tokens"),
        ),
        DataType.TYPE_INT32,
    ),
    *_outputs(("kv_cache_hit_rate", "acceptance_rate"), DataType.TYPE_FP32),
    *_outputs(
        (
            *("arrival_time_ns", "first_scheduled_time_ns"),
            *("first_token_time_ns", "last_token_time_ns"),
        ),
        DataType.TYPE_INT64,
    ),
    *_outputs((RESPONSE,), DataType.TYPE_STRING, (1,)),
)
