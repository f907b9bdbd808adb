"""What does an engine add to a config that leaves its tensors or its batching open?

Triton's rules for TensorRT: what a config says of a tensor is kept, and says whether it batches.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace

from backends.tensorrt.signature import Binding, Signature
from gateway.batches.extra_inputs import sequence_inputs
from gateway.config import ModelConfig, ModelInput, ModelOutput, TensorReshape
from gateway.config.data_type import DataType
from gateway.config.scheduling import DynamicBatching
from gateway.errors import Code, InferenceError

log = logging.getLogger("sluice.tensorrt")


def is_complete(config: ModelConfig) -> bool:
    """Whether nothing of the engine is needed to complete it."""
    tensors: tuple[ModelInput | ModelOutput, ...] = (*config.input, *config.output)
    whole = all(each.dims and each.data_type is not DataType.TYPE_INVALID for each in tensors)
    return bool(config.max_batch_size and config.input and config.output and whole)


def complete(config: ModelConfig, signature: Signature, profiles: Sequence[int]) -> ModelConfig:
    """The config with the engine's tensors, its batch size and dynamic batching filled in.

    The batch size is the most that one of the profiles takes. Raises InferenceError if the config
    asks for larger batches, or says of one tensor that the model batches and of another that not.
    """
    size = _batch_size(config, signature.largest_batch(profiles), signature)
    config = replace(config, max_batch_size=size)
    fed, kept = _sequence_tensors(config)
    fed |= {name for each in config.batch_input for name in each.target_name}
    inputs = [each for each in signature.inputs.values() if each.name not in fed]
    outputs = [each for each in signature.outputs.values() if each.name not in kept]
    return replace(
        config,
        input=_inputs(config, inputs),
        output=_outputs(config, outputs),
        dynamic_batching=with_batching(config).dynamic_batching,
    )


def with_batching(config: ModelConfig) -> ModelConfig:
    """The config with dynamic batching if it batches, and nothing else is said of it."""
    if config.max_batch_size <= 1 or config.dynamic_batching or config.sequence_batching:
        return config
    found = DynamicBatching(preferred_batch_size=(config.max_batch_size,))
    return replace(config, dynamic_batching=found)


def _sequence_tensors(config: ModelConfig) -> tuple[set[str], set[str]]:
    """What the server feeds and keeps itself, which is not the clients'."""
    batching = config.sequence_batching
    if batching is None:
        return set(), set()
    fed = {each.name for each in sequence_inputs(batching)}
    return fed, {each.output_name for each in batching.state}


# Batching.


def _batch_size(config: ModelConfig, largest: int, signature: Signature) -> int:
    hints = set(_hints(config, signature))
    if len(hints) > 1:
        raise _failure(
            f"unable to autofill for '{config.name}', model tensor configurations are "
            "contradicting each other in terms of whether batching is supported"
        )
    if True in hints and not largest:
        raise _failure(
            f"autofill failed for model '{config.name}': model tensor shape configuration hints "
            "for dynamic batching but the underlying engine doesn't support batching."
        )
    if hints == {False} and largest:
        log.warning("dims of the config say that it does not batch", extra={"model": config.name})
        largest = 0
    if config.max_batch_size > largest:
        raise _failure(
            f"autofill failed for model '{config.name}': configuration specified max-batch "
            f"{config.max_batch_size} but TensorRT engine only supports max-batch {largest}"
        )
    return config.max_batch_size or largest


def _hints(config: ModelConfig, signature: Signature) -> Iterable[bool]:
    """What each tensor with dims says about batching: it has one dimension less if so."""
    known = {**signature.inputs, **signature.outputs}
    if any(each.allow_ragged_batch for each in config.input):
        yield True
        return
    tensors: tuple[ModelInput | ModelOutput, ...] = (*config.input, *config.output)
    for tensor in tensors:
        dims = tensor.dims if tensor.reshape is None else tensor.reshape.shape
        if tensor.dims and tensor.name in known and not known[tensor.name].on_host:
            yield len(known[tensor.name].dims) == len(dims) + 1


def _failure(text: str) -> InferenceError:
    return InferenceError(Code.INTERNAL, text)


# Tensors.


def _inputs(config: ModelConfig, found: Sequence[Binding]) -> tuple[ModelInput, ...]:
    if not config.input:
        named = [ModelInput(name=each.name, is_shape_tensor=each.on_host) for each in found]
        return tuple(_filled_input(each, config, found) for each in named)
    return tuple(_filled_input(each, config, found) for each in config.input)


def _outputs(config: ModelConfig, found: Sequence[Binding]) -> tuple[ModelOutput, ...]:
    if not config.output:
        named = [ModelOutput(name=each.name, is_shape_tensor=each.on_host) for each in found]
        return tuple(_filled_output(each, config, found) for each in named)
    return tuple(_filled_output(each, config, found) for each in config.output)


def _filled_input(tensor: ModelInput, config: ModelConfig, found: Sequence[Binding]) -> ModelInput:
    data_type, dims, reshape = _missing(tensor, config, found)
    return replace(tensor, data_type=data_type, dims=dims, reshape=reshape)


def _filled_output(
    tensor: ModelOutput, config: ModelConfig, found: Sequence[Binding]
) -> ModelOutput:
    data_type, dims, reshape = _missing(tensor, config, found)
    return replace(tensor, data_type=data_type, dims=dims, reshape=reshape)


def _missing(
    tensor: ModelInput | ModelOutput, config: ModelConfig, found: Sequence[Binding]
) -> tuple[DataType, tuple[int, ...], TensorReshape | None]:
    """What the engine says where the config says nothing; unknown names are for the checks."""
    binding = next((each for each in found if each.name == tensor.name), None)
    if binding is None:
        return tensor.data_type, tensor.dims, tensor.reshape
    typed = tensor.data_type is not DataType.TYPE_INVALID
    data_type = tensor.data_type if typed else binding.data_type
    if tensor.dims:
        return data_type, tensor.dims, tensor.reshape
    dims = binding.dims[1:] if config.batching else binding.dims
    scalar = config.batching and not dims
    return data_type, dims or (1,), TensorReshape() if scalar else tensor.reshape
