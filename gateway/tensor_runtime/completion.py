"""Completion of a config from the model, by Triton's rules for ONNX models, in its words.

It looks at whole sides: inputs or outputs that a config lists are kept.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace

from gateway.batches.stacking import sequence_inputs
from gateway.config import ModelConfig, ModelInput, ModelOutput, TensorReshape
from gateway.config.scheduling import DynamicBatching
from gateway.errors import Code, InferenceError
from gateway.tensor_runtime.signature import ModelSignature, ModelTensor

log = logging.getLogger("sluice.tensors")

DEFAULT_BATCH_SIZE = "default-max-batch-size"
"""The option of `--backend-config` with the batch size of models without one."""
USUAL_BATCH_SIZE = 4


def is_complete(config: ModelConfig) -> bool:
    """Whether nothing is missing; batching then is as configured."""
    return bool((config.input or config.batch_input) and config.output)


def complete(config: ModelConfig, signature: ModelSignature, batch_size: int | None) -> ModelConfig:
    """The config with the model's tensors, batch size and dynamic batching filled in.

    `batch_size` is that of a config without one; None if the model cannot batch. Raises
    InferenceError if the config asks for batches of such a model, or if the model has a tensor that
    the protocol lacks.
    """
    if config.max_batch_size and batch_size is None:
        raise InferenceError(
            Code.INVALID_ARG,
            f"autofill failed for model '{config.name}': model does not support batching while "
            "non-zero max_batch_size is specified",
        )
    if batch_size is not None and not config.max_batch_size:
        log.warning("batch size chosen", extra={"model": config.name, "max_batch_size": batch_size})
        config = replace(config, max_batch_size=batch_size)
    own = _without_sequence_tensors(signature, config)
    return replace(
        config,
        input=config.input if config.input or config.batch_input else _inputs(own, config),
        output=config.output or _outputs(own, config),
        dynamic_batching=with_batching(config).dynamic_batching,
    )


def with_batching(config: ModelConfig) -> ModelConfig:
    """The config with dynamic batching, if it batches and has no scheduler."""
    if config.max_batch_size <= 1 or config.dynamic_batching or config.sequence_batching:
        return config
    found = DynamicBatching(preferred_batch_size=(config.max_batch_size,))
    return replace(config, dynamic_batching=found)


def _without_sequence_tensors(signature: ModelSignature, config: ModelConfig) -> ModelSignature:
    """The signature without controls and states, which the server feeds itself."""
    fed, kept = sequence_tensors(config)
    return replace(
        signature,
        inputs={name: each for name, each in signature.inputs.items() if name not in fed},
        outputs={name: each for name, each in signature.outputs.items() if name not in kept},
    )


def sequence_tensors(config: ModelConfig) -> tuple[set[str], set[str]]:
    """The inputs that the server feeds, and the outputs that it keeps."""
    batching = config.sequence_batching
    if batching is None:
        return set(), set()
    fed = {each.name for each in sequence_inputs(batching)}
    return fed, {each.output_name for each in batching.state}


def _inputs(signature: ModelSignature, config: ModelConfig) -> tuple[ModelInput, ...]:
    return tuple(
        ModelInput(name=each.name, data_type=each.data_type, dims=dims, reshape=reshape)
        for each, dims, reshape in _shaped(signature.inputs, config)
    )


def _outputs(signature: ModelSignature, config: ModelConfig) -> tuple[ModelOutput, ...]:
    return tuple(
        ModelOutput(name=each.name, data_type=each.data_type, dims=dims, reshape=reshape)
        for each, dims, reshape in _shaped(signature.outputs, config)
    )


def _shaped(
    tensors: Mapping[str, ModelTensor], config: ModelConfig
) -> Iterable[tuple[ModelTensor, tuple[int, ...], TensorReshape | None]]:
    """Each tensor with its dims; [1] and an empty reshape for a batch dimension only."""
    for tensor in tensors.values():
        if tensor.dims is None:
            yield tensor, (), None
            continue
        dims = tensor.dims[1:] if config.batching else tensor.dims
        scalar = TensorReshape() if config.batching and not dims else None
        yield tensor, dims or (1,), scalar
