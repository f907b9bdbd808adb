"""Names that the library has in `tensorrt_llm.llmapi`."""

from tensorrt_llm.executor import RequestError
from tensorrt_llm.llm import LLM
from tensorrt_llm.results import CompletionOutput, RequestOutput
from tensorrt_llm.sampling_params import GuidedDecodingParams, SamplingParams

__all__ = [
    "LLM",
    "CompletionOutput",
    "GuidedDecodingParams",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
]
