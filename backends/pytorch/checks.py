"""Can PyTorch serve what the configuration announces? Triton's checks and texts."""

from collections.abc import Iterator

from gateway.config import ModelConfig, ModelInput, ModelOutput
from gateway.config.data_type import DataType
from gateway.errors import Code, InferenceError


def check_config(config: ModelConfig) -> None:
    """Raise for the first thing that PyTorch models cannot have."""
    for role, tensors in (("input", config.input), ("output", config.output)):
        if not tensors:
            raise InferenceError(
                Code.INTERNAL,
                f"model configuration must contain at least one {role}, none were specified.",
            )
        for problem in _string_problems(config, role, tensors):
            raise InferenceError(Code.INTERNAL, problem)


def _string_problems(
    config: ModelConfig, role: str, tensors: tuple[ModelInput, ...] | tuple[ModelOutput, ...]
) -> Iterator[str]:
    for each in tensors:
        dims = each.reshape.shape if each.reshape is not None else each.dims
        if each.data_type is DataType.TYPE_STRING and len(dims) + config.batching > 1:
            yield (
                f"Triton only supports 1 dimensional List of String as {role} for '{each.name}' "
                f"for model '{config.name}'"
            )
