"""The backend `tensorrtllm`: LLMs by TensorRT-LLM's LLM API, each instance in a worker process.

The inputs and outputs are those of Triton's LLM-API model, of its classic ensemble (`max_tokens`,
`stop_words`, ...) and of the text contract. All inputs are optional, since any of three can carry
the prompt; all outputs but the text are sent only on request.
"""

import asyncio
from dataclasses import replace
from pathlib import Path
from weakref import WeakSet, WeakValueDictionary

import orjson

from backends.python.backend import PythonBackend
from backends.tensorrtllm.instance import TensorRtLlmInstance
from gateway.backend import Backend, Instance, ModelContext
from gateway.config import InstanceGroup, InstanceKind, ModelConfig, ModelInput, ModelOutput
from gateway.config.data_type import DataType
from gateway.errors import Code, InferenceError
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

PROGRAM = Path(__file__).parent / "worker"
"""The folder of the Python-based backend that serves the models."""


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


class TensorRtLlmBackend(Backend):
    """Runs the program with the engine on the Python backend, in the model's environment."""

    def __init__(self) -> None:
        self._workers = PythonBackend()
        self._siblings: WeakValueDictionary[tuple[str, Path], WeakSet[TensorRtLlmInstance]] = (
            WeakValueDictionary()
        )

    async def prepare(self, config: ModelConfig, path: Path) -> None:
        await self._python().prepare(config, path)

    def complete(self, config: ModelConfig, path: Path) -> ModelConfig:
        """Add missing inputs and outputs of the contract, and the settings of the model's file."""
        _check_counts(config)
        given = {each.name for each in INPUTS}
        named = {each.name for each in config.input}, {each.name for each in config.output}
        # Triton's ensemble requires a text and a length, which OpenAI's requests lack.
        inputs = [replace(i, optional=i.optional or i.name in given) for i in config.input]
        completed = replace(
            config,
            input=(*inputs, *(i for i in INPUTS if i.name not in named[0])),
            output=(*config.output, *(o for o in OUTPUTS if o.name not in named[1])),
            instance_group=config.instance_group
            or (InstanceGroup(kind=InstanceKind.KIND_MODEL, count=1),),
        )
        return self._python().complete(completed, path)

    async def load(self, context: ModelContext) -> Instance:
        names = await asyncio.to_thread(adapter_names, context.config.name, context.path)
        siblings = self._siblings.setdefault((context.config.name, context.path), WeakSet())
        found = TensorRtLlmInstance(await self._python().load(context), names, siblings)
        found.places = context.config.max_batch_size or None
        return found

    def _python(self) -> PythonBackend:
        return self._workers.for_program(self, PROGRAM)


def _check_counts(config: ModelConfig) -> None:
    """Refuse counts above 1: every engine takes a share of its GPU's whole memory."""
    for group in config.instance_group:
        if group.count > 1:
            raise InferenceError(
                Code.INVALID_ARG,
                f"model '{config.name}': an instance group has count {group.count}, expected 1: an "
                "engine of TensorRT-LLM serves any number of requests at once (for several GPUs "
                "use tensor_parallel_size, or one KIND_GPU instance for each)",
            )


ADAPTERS_FILE = "multi_lora.json"


def adapter_names(model: str, folder: Path) -> tuple[str, ...]:
    """The names in `multi_lora.json` of the version folder; none without such a file."""
    try:
        content = orjson.loads((folder / ADAPTERS_FILE).read_bytes())
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise _refusal(model, f"cannot be read: {error.strerror}") from None
    except orjson.JSONDecodeError as error:
        raise _refusal(model, f"is not valid JSON: {error}") from None
    if not isinstance(content, dict) or not all(isinstance(v, str) for v in content.values()):
        raise _refusal(model, "must be a JSON object of names and the folders of their adapters")
    return tuple(content)


def _refusal(model: str, why: str) -> InferenceError:
    return InferenceError(Code.INVALID_ARG, f"model '{model}': its {ADAPTERS_FILE} {why}")
