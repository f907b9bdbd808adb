"""Triton's parameters of PyTorch models (`parameters` of config.pbtxt)."""

from collections.abc import Mapping
from dataclasses import dataclass

from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError

BOOLEANS = {"true": True, "on": True, "1": True, "false": False, "off": False, "0": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class PytorchParameters:
    """The parameters of one model; None keeps PyTorch's setting.

    A thread count of zero means that the model sets none.
    """

    inference_mode: bool = True
    disable_optimized_execution: bool = False
    enable_weight_sharing: bool = False
    enable_cache_cleaning: bool = False
    disable_cudnn: bool = False
    enable_jit_executor: bool | None = None
    enable_jit_profiling: bool | None = None
    enable_tensor_fuser: bool | None = None
    intra_op_thread_count: int = 0
    inter_op_thread_count: int = 0

    @classmethod
    def read(cls, config: ModelConfig) -> "PytorchParameters":
        """The parameters in a config; INVALID_ARG for an invalid value. Other keys are ignored."""
        found = {
            key.lower(): _value(config, key)
            for key in config.parameters
            if key.isupper() and key.lower() in cls.__dataclass_fields__
        }
        return cls(**found)  # type: ignore[arg-type]  # each value has the type of its field


def _value(config: ModelConfig, key: str) -> bool | int:
    text = config.parameters[key]
    try:
        if key.endswith("_THREAD_COUNT"):
            return integer(text)
        return boolean(text)
    except ValueError as error:
        raise InferenceError(
            Code.INVALID_ARG, f"model '{config.name}', parameter '{key}': {error}"
        ) from None


def boolean(text: str) -> bool:
    """A boolean as Triton's parameters spell it; ValueError with Triton's text."""
    if text.lower() not in BOOLEANS:
        raise ValueError(f"failed to convert '{text}' to boolean")
    return BOOLEANS[text.lower()]


def integer(text: str) -> int:
    """A count of threads, zero if not positive; ValueError with Triton's text."""
    try:
        return max(0, int(text))
    except ValueError:
        raise ValueError(f"failed to convert '{text}' to integral number") from None


def thread_count(settings: Mapping[str, str]) -> int:
    """The `thread-count` of `--backend-config`; zero if it is missing."""
    try:
        return integer(settings.get("thread-count", "0"))
    except ValueError as error:
        raise InferenceError(
            Code.INVALID_ARG, f"--backend-config=pytorch,thread-count: {error}"
        ) from None
