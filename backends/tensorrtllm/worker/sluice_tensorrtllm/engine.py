"""Start of `tensorrt_llm.LLM` with the arguments of a model's file."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sluice_llm.program import importing
from sluice_llm.request import Mistake, clean

from .model_file import LlmModelFile

HOW_TO_INSTALL = (
    "give the model an environment that has it: a folder 'venv' or a requirements.txt with "
    "'tensorrt-llm==1.2.*' in the model's folder, or the parameter EXECUTION_ENV_PATH"
)
NO_GPU = ("no cuda gpus", "no nvidia driver", "libcuda", "no cuda-capable device")
VISIBLE = "CUDA_VISIBLE_DEVICES"
OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True)
class LlmLibrary:
    """The classes of the package in use, besides `LLM`."""

    SamplingParams: Any
    GuidedDecodingParams: Any
    LoRARequest: Any
    RequestError: type[BaseException]


def choose_gpu(args: Mapping[str, str], file: LlmModelFile) -> None:
    """Make only the GPU of an instance of KIND_GPU visible to the library.

    It takes the first visible GPUs, which it reads at its import.
    """
    if args["model_instance_kind"] != "GPU":
        return
    _check_one_gpu(file)
    number = int(args["model_instance_device_id"])
    seen = [each for each in os.environ.get(VISIBLE, "").split(",") if each]
    if seen and number >= len(seen):
        raise Mistake(f"its instance group names GPU {number}, but {VISIBLE} shows {len(seen)}")
    os.environ[VISIBLE] = seen[number] if seen else str(number)


def _check_one_gpu(file: LlmModelFile) -> None:
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size"):
        if (size := file.arguments.get(name, 1)) != 1:
            raise Mistake(
                f"its {file.name} has {name} {size!r}, but its instance group is KIND_GPU, which "
                "gives an engine one GPU; use KIND_MODEL"
            )


def import_library() -> tuple[Any, LlmLibrary]:
    """The class `LLM`, and the others; Mistake if the package is missing or cannot be imported."""
    with importing("tensorrt_llm", HOW_TO_INSTALL, _explained):
        from tensorrt_llm import LLM
        from tensorrt_llm.executor import LoRARequest, RequestError
        from tensorrt_llm.llmapi import GuidedDecodingParams, SamplingParams
    return LLM, LlmLibrary(SamplingParams, GuidedDecodingParams, LoRARequest, RequestError)


def opened(llm: Any, file: LlmModelFile) -> Any:
    """A running engine; blocks during its start."""
    # The metrics need it; the file's own value comes first.
    arguments = {"enable_iter_perf_stats": True, **file.arguments}
    try:
        return llm(**arguments)
    except (TypeError, ValueError) as error:  # those of pydantic are ValueErrors
        raise Mistake(f"its {file.name} is refused by tensorrt_llm.LLM: {clean(error)}") from error
    except Exception as error:  # one load, by foreign code
        raise Mistake(f"its engine does not start: {_explained(error)}", "INTERNAL") from error


def _explained(error: BaseException) -> str:
    """The text of an error, with its remedy."""
    text: str = clean(error)
    if OUT_OF_MEMORY in text.lower():
        return (
            f"the GPU is out of memory ({text}); lower kv_cache_config.free_gpu_memory_fraction or "
            "max_num_tokens, raise tensor_parallel_size, or give the model another GPU"
        )
    if any(sign in text.lower() for sign in NO_GPU):
        return f"no NVIDIA GPU and driver were found, and TensorRT-LLM runs on no other ({text})"
    return text
