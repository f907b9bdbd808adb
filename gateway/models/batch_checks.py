"""Do `batch_input` and `batch_output` of a config fit its inputs and outputs? Triton's texts."""

from collections import Counter
from collections.abc import Iterator

from gateway.config import ModelConfig
from gateway.config.data_type import DataType

TOLD_AS = (DataType.TYPE_INT32, DataType.TYPE_FP32)


def batch_problems(config: ModelConfig) -> Iterator[str]:
    """What is wrong with the tensors that are derived from a batch, or split by its shapes."""
    inputs = {each.name for each in config.input}
    for batch_input in config.batch_input:
        yield from _source_problems("input", batch_input.kind, batch_input.source_input, inputs)
        if batch_input.data_type not in TOLD_AS:
            yield "batch input data type must be TYPE_INT32 or TYPE_FP32"
    for batch_output in config.batch_output:
        yield from _source_problems("output", batch_output.kind, batch_output.source_input, inputs)
    yield from _target_problems(config)


def _source_problems(
    role: str, kind: str, sources: tuple[str, ...], inputs: set[str]
) -> Iterator[str]:
    if len(sources) != 1:
        yield f"batch {role} kind '{kind}' expects 1 source input, got {len(sources)}"
    for name in sources:
        if name not in inputs:
            yield f"unknown source input name '{name}'"


def _target_problems(config: ModelConfig) -> Iterator[str]:
    outputs = {each.name for each in config.output}
    targets = Counter(name for each in config.batch_output for name in each.target_name)
    for name, times in targets.items():
        if name not in outputs:
            yield f"unknown target output name '{name}'"
        if times > 1:
            yield f"target output name '{name}' can only be specified once"
