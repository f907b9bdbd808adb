"""Completion of a config from the engine, and checks of a config against it.

Both follow Triton's rules for TensorRT, in its words. A tensor's entry in a config is kept, and
decides whether the model batches.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from backends.tensorrt.engines import Binding, EngineSignature
from gateway.batches.shapes import batched_shape_problems, whole_shape_problems
from gateway.batches.stacking import with_sequence_tensors
from gateway.config import ModelConfig, ModelInput, ModelOutput, TensorReshape
from gateway.config.data_type import DataType
from gateway.errors import Code, InferenceError
from gateway.tensor import format_shape
from gateway.tensor_runtime.checks import (
    control_problems,
    count_problems,
    name_problems,
    raise_first,
)
from gateway.tensor_runtime.completion import sequence_tensors, with_batching

log = logging.getLogger("sluice.tensorrt")


def is_complete(config: ModelConfig) -> bool:
    """Whether the config is complete without the engine."""
    tensors: tuple[ModelInput | ModelOutput, ...] = (*config.input, *config.output)
    whole = all(each.dims and each.data_type is not DataType.TYPE_INVALID for each in tensors)
    return bool(config.max_batch_size and config.input and config.output and whole)


def complete(
    config: ModelConfig, signature: EngineSignature, profiles: Sequence[int]
) -> ModelConfig:
    """The config with the engine's tensors, its batch size and dynamic batching filled in.

    The batch size is the largest of the profiles. Raises InferenceError if the config has larger
    batches, or if its tensors contradict each other in whether the model batches.
    """
    size = _batch_size(config, signature.largest_batch(profiles), signature)
    config = replace(config, max_batch_size=size)
    fed, kept = sequence_tensors(config)
    fed |= {name for each in config.batch_input for name in each.target_name}
    inputs = [each for each in signature.inputs.values() if each.name not in fed]
    outputs = [each for each in signature.outputs.values() if each.name not in kept]
    return replace(
        config,
        input=_inputs(config, inputs),
        output=_outputs(config, outputs),
        dynamic_batching=with_batching(config).dynamic_batching,
    )


# Batching.


def _batch_size(config: ModelConfig, largest: int, signature: EngineSignature) -> int:
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


def _hints(config: ModelConfig, signature: EngineSignature) -> Iterable[bool]:
    """For each tensor with dims, whether it batches: then it has one dimension less."""
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
    """Values of the engine for missing ones in the config; unknown names are checked later."""
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


def check(config: ModelConfig, signature: EngineSignature, profiles: Sequence[int]) -> None:
    """Raise INVALID_ARG for the first contradiction.

    `profiles` are those of the instance. An engine may have more outputs than the config lists,
    but not more inputs.
    """
    raise_first(_problems(config, signature, profiles))


def _problems(
    config: ModelConfig, signature: EngineSignature, profiles: Sequence[int]
) -> Iterator[str]:
    yield from control_problems(config, signature.inputs)
    whole = with_sequence_tensors(config)
    scattered = {name for each in config.batch_output for name in each.target_name}
    for tensor in whole.input:
        yield from name_problems(tensor.name, "input", signature.inputs)
        found = signature.inputs[tensor.name]
        yield from _type_problems(tensor.data_type, "input", found, config)
        yield from _mark_problems(tensor, "input", found, config)
        yield from _optional_problems(tensor, config)
        yield from _input_shape_problems(tensor, found, config)
    for batch_input in config.batch_input:
        for name in batch_input.target_name:
            yield from name_problems(name, "input", signature.inputs)
            yield from _type_problems(
                batch_input.data_type, "input", signature.inputs[name], config
            )
    yield from count_problems(config, len(signature.inputs))
    for output in whole.output:
        yield from name_problems(output.name, "output", signature.outputs)
        found = signature.outputs[output.name]
        yield from _type_problems(output.data_type, "output", found, config)
        yield from _mark_problems(output, "output", found, config)
        if output.name not in scattered:
            yield from _shape_problems(output, found, config)
    yield from _batch_problems(config, signature, profiles)


def _type_problems(
    expected: DataType, role: str, found: Binding, config: ModelConfig
) -> Iterator[str]:
    if found.data_type is not expected:
        yield (
            f"unexpected datatype {expected} for inference {role} '{found.name}', expecting "
            f"{found.data_type} for '{config.name}'"
        )


def _mark_problems(
    tensor: ModelInput | ModelOutput, role: str, found: Binding, config: ModelConfig
) -> Iterator[str]:
    named = f"{role} '{tensor.name}' for model '{config.name}' is"
    if found.on_host and not tensor.is_shape_tensor:
        yield (
            f"{named} a shape tensor but the model configuration doesn't mark it as a shape tensor."
        )
    if tensor.is_shape_tensor and not found.on_host:
        yield f"{named} incorrectly marked as a shape tensor in the model configuration."
    if found.on_host and config.batching:
        yield (
            f"{named} a shape tensor, which is served without batches only: set max_batch_size to "
            f"0 (found {config.max_batch_size}) and give each tensor's whole shape"
        )


def _optional_problems(tensor: ModelInput, config: ModelConfig) -> Iterator[str]:
    if tensor.optional:
        yield (
            f"unable to load model '{config.name}', optional input '{tensor.name}' is not "
            "supported: a TensorRT engine needs every input"
        )


def _input_shape_problems(tensor: ModelInput, found: Binding, config: ModelConfig) -> Iterator[str]:
    if tensor.allow_ragged_batch:
        yield from _unbatched_problems(tensor.name, found, (-1,), config)
    else:
        yield from _shape_problems(tensor, found, config)


def _shape_problems(
    tensor: ModelInput | ModelOutput, found: Binding, config: ModelConfig
) -> Iterator[str]:
    dims = tensor.dims if tensor.reshape is None else tensor.reshape.shape
    if not config.batching:
        yield from _unbatched_problems(tensor.name, found, dims, config)
        return
    if not found.dims:
        yield (
            f"model '{config.name}', tensor '{tensor.name}': for the model to support batching the "
            "shape should have at least 1 dimension; but shape expected by the model is "
            f"{format_shape(found.dims)}"
        )
    yield from batched_shape_problems(config.name, tensor.name, found.dims, dims)


def _unbatched_problems(
    name: str, found: Binding, dims: Sequence[int], config: ModelConfig
) -> Iterator[str]:
    scalar = not found.dims and tuple(dims) == (1,)
    if not scalar:
        yield from whole_shape_problems(config.name, name, found.dims, dims)


def _batch_problems(
    config: ModelConfig, signature: EngineSignature, profiles: Sequence[int]
) -> Iterator[str]:
    ragged = any(each.allow_ragged_batch for each in config.input)
    largest = signature.largest_batch(profiles)
    if config.max_batch_size > largest and not ragged:
        yield (
            f"unexpected configuration maximum batch size {config.max_batch_size} for "
            f"'{config.name}', model maximum is {largest}"
        )
