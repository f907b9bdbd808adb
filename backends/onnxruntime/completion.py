"""What does the model add to a config that leaves its tensors or its batching open?

Triton's rules for ONNX models, which look at whole sides: inputs or outputs that a config lists
are kept as they are.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace

from backends.onnxruntime.signature import ModelTensor, Signature
from gateway.batches.extra_inputs import sequence_inputs
from gateway.config import ModelConfig, ModelInput, ModelOutput, TensorReshape
from gateway.config.scheduling import DynamicBatching
from gateway.errors import Code, InferenceError

log = logging.getLogger("sluice.onnxruntime")


def is_complete(config: ModelConfig) -> bool:
    """Whether nothing is left to complete; batching then is what the config says it is."""
    return bool((config.input or config.batch_input) and config.output)


def complete(config: ModelConfig, signature: Signature, default_batch_size: int) -> ModelConfig:
    """The config with the model's tensors, batch size and dynamic batching filled in.

    Raises InferenceError if it asks for batches of a model that cannot, or if the model has a
    tensor that the protocol has not.
    """
    batches = _batches(signature)
    if config.max_batch_size and not batches:
        raise InferenceError(
            Code.INVALID_ARG,
            f"autofill failed for model '{config.name}': model does not support batching while "
            "non-zero max_batch_size is specified",
        )
    size = config.max_batch_size or (_default(config, default_batch_size) if batches else 0)
    config = replace(config, max_batch_size=size)
    own = _without_sequence_tensors(signature, config)
    return replace(
        config,
        input=config.input if config.input or config.batch_input else _inputs(own, config),
        output=config.output or _outputs(own, config),
        dynamic_batching=_dynamic_batching(config),
    )


def _without_sequence_tensors(signature: Signature, config: ModelConfig) -> Signature:
    """What is left for clients where the server feeds controls and states itself."""
    batching = config.sequence_batching
    if batching is None:
        return signature
    fed = {each.name for each in sequence_inputs(batching)}
    kept = {each.output_name for each in batching.state}
    return replace(
        signature,
        inputs={name: each for name, each in signature.inputs.items() if name not in fed},
        outputs={name: each for name, each in signature.outputs.items() if name not in kept},
    )


def _batches(signature: Signature) -> bool:
    every = (*signature.inputs.values(), *signature.outputs.values())
    return all(tensor.dims[:1] == (-1,) for tensor in every)


def _default(config: ModelConfig, size: int) -> int:
    log.warning("batch size chosen", extra={"model": config.name, "max_batch_size": size})
    return size


def _dynamic_batching(config: ModelConfig) -> DynamicBatching | None:
    if config.max_batch_size <= 1 or config.dynamic_batching or config.sequence_batching:
        return config.dynamic_batching
    return DynamicBatching(preferred_batch_size=(config.max_batch_size,))


def _inputs(signature: Signature, config: ModelConfig) -> tuple[ModelInput, ...]:
    return tuple(
        ModelInput(name=each.name, data_type=each.data_type, dims=dims, reshape=reshape)
        for each, dims, reshape in _shaped(signature.inputs, config)
    )


def _outputs(signature: Signature, config: ModelConfig) -> tuple[ModelOutput, ...]:
    return tuple(
        ModelOutput(name=each.name, data_type=each.data_type, dims=dims, reshape=reshape)
        for each, dims, reshape in _shaped(signature.outputs, config)
    )


def _shaped(
    tensors: Mapping[str, ModelTensor], config: ModelConfig
) -> Iterable[tuple[ModelTensor, tuple[int, ...], TensorReshape | None]]:
    for tensor in tensors.values():
        dims = tensor.dims[1:] if config.batching else tensor.dims
        scalar = TensorReshape() if config.batching and not dims else None
        yield tensor, dims or (1,), scalar
