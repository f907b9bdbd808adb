"""Completion of a config from the model, and checks of a config against it.

Both follow Triton's rules for ONNX models, in its words. Completion looks at whole sides: inputs or
outputs that a config lists are kept.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from backends.onnxruntime.model_file import ModelTensor, OnnxSignature
from gateway.batches.shapes import batched_shape_problems, whole_shape_problems
from gateway.batches.stacking import sequence_inputs, with_sequence_tensors
from gateway.config import ModelConfig, ModelInput, ModelOutput, TensorReshape
from gateway.config.data_type import DataType
from gateway.config.scheduling import DynamicBatching
from gateway.errors import Code, InferenceError
from gateway.tensor import format_shape

log = logging.getLogger("sluice.onnxruntime")


def is_complete(config: ModelConfig) -> bool:
    """Whether nothing is missing; batching then is as configured."""
    return bool((config.input or config.batch_input) and config.output)


def complete(config: ModelConfig, signature: OnnxSignature, default_batch_size: int) -> ModelConfig:
    """The config with the model's tensors, batch size and dynamic batching filled in.

    Raises InferenceError if it asks for batches of a model without them, or if the model has a
    tensor that the protocol lacks.
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


def _without_sequence_tensors(signature: OnnxSignature, config: ModelConfig) -> OnnxSignature:
    """The signature without controls and states, which the server feeds itself."""
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


def _batches(signature: OnnxSignature) -> bool:
    every = (*signature.inputs.values(), *signature.outputs.values())
    return all(tensor.dims[:1] == (-1,) for tensor in every)


def _default(config: ModelConfig, size: int) -> int:
    log.warning("batch size chosen", extra={"model": config.name, "max_batch_size": size})
    return size


def _dynamic_batching(config: ModelConfig) -> DynamicBatching | None:
    if config.max_batch_size <= 1 or config.dynamic_batching or config.sequence_batching:
        return config.dynamic_batching
    return DynamicBatching(preferred_batch_size=(config.max_batch_size,))


def _inputs(signature: OnnxSignature, config: ModelConfig) -> tuple[ModelInput, ...]:
    return tuple(
        ModelInput(name=each.name, data_type=each.data_type, dims=dims, reshape=reshape)
        for each, dims, reshape in _shaped(signature.inputs, config)
    )


def _outputs(signature: OnnxSignature, config: ModelConfig) -> tuple[ModelOutput, ...]:
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


def check(config: ModelConfig, signature: OnnxSignature) -> None:
    """Raise INVALID_ARG for the first contradiction.

    A model may have more outputs than the config lists, but not more inputs.
    """
    problem = next(_problems(config, signature), "")
    if problem:
        raise InferenceError(Code.INVALID_ARG, problem)


def _problems(config: ModelConfig, signature: OnnxSignature) -> Iterator[str]:
    yield from _control_problems(config, signature)
    yield from _count_problems(config, signature)
    for each in config.input:
        yield from _input_problems(each, config, signature)
    for batch_input in config.batch_input:
        for name in batch_input.target_name:
            yield from _name_problems(name, "input", signature.inputs)
            yield from _type_problems(
                name, "input", batch_input.data_type, signature.inputs[name], config
            )
    for output in config.output:
        yield from _output_problems(output, config, signature)
    yield from _sequence_problems(config, signature)


def _control_problems(config: ModelConfig, signature: OnnxSignature) -> Iterator[str]:
    for name in _controls(config):
        if name not in signature.inputs:
            yield (
                f"configuration specified sequence control '{name}', but model does not provide "
                "that input"
            )


def _sequence_problems(config: ModelConfig, signature: OnnxSignature) -> Iterator[str]:
    """Controls and states are checked like other tensors."""
    if config.sequence_batching is None:
        return
    for tensor in sequence_inputs(config.sequence_batching):
        yield from _input_problems(tensor, config, signature)
    for output in with_sequence_tensors(config).output[len(config.output) :]:
        yield from _output_problems(output, config, signature)


def _controls(config: ModelConfig) -> list[str]:
    batching = config.sequence_batching
    return [each.name for each in batching.control_input] if batching else []


def _states(config: ModelConfig) -> list[str]:
    batching = config.sequence_batching
    return [each.input_name for each in batching.state] if batching else []


def _count_problems(config: ModelConfig, signature: OnnxSignature) -> Iterator[str]:
    names = {each.name for each in config.input if each.name not in signature.initializers}
    names.update(name for each in config.batch_input for name in each.target_name)
    names.update(_controls(config), _states(config))
    if len(names) != len(signature.inputs):
        yield (
            f"unable to load model '{config.name}', configuration expects {len(names)} inputs, "
            f"model provides {len(signature.inputs)}"
        )


def _input_problems(
    tensor: ModelInput, config: ModelConfig, signature: OnnxSignature
) -> Iterator[str]:
    known = {**signature.inputs, **signature.initializers}
    yield from _name_problems(tensor.name, "input", known)
    found = known[tensor.name]
    yield from _optional_problems(tensor, config)
    yield from _type_problems(tensor.name, "input", tensor.data_type, found, config)
    if tensor.allow_ragged_batch:
        yield from whole_shape_problems(config.name, tensor.name, found.dims, (-1,))
    else:
        yield from _shape_problems(tensor, found, config)


def _output_problems(
    tensor: ModelOutput, config: ModelConfig, signature: OnnxSignature
) -> Iterator[str]:
    yield from _name_problems(tensor.name, "output", signature.outputs)
    found = signature.outputs[tensor.name]
    yield from _type_problems(tensor.name, "output", tensor.data_type, found, config)
    scattered = {name for each in config.batch_output for name in each.target_name}
    if tensor.name not in scattered:
        yield from _shape_problems(tensor, found, config)


def _name_problems(name: str, role: str, known: Iterable[str]) -> Iterator[str]:
    if name not in known:
        allowed = ", ".join(sorted(known))
        yield f"unexpected inference {role} '{name}', allowed {role}s are: {allowed}"


def _optional_problems(tensor: ModelInput, config: ModelConfig) -> Iterator[str]:
    if tensor.optional and config.batching:
        yield (
            f"unable to load model '{config.name}', optional input '{tensor.name}' is not "
            "supported for models that support batching"
        )
    if tensor.optional and tensor.allow_ragged_batch:
        yield (
            f"unable to load model '{config.name}', optional input '{tensor.name}' cannot allow "
            "ragged batches"
        )


def _type_problems(
    name: str, role: str, expected: DataType, found: ModelTensor, config: ModelConfig
) -> Iterator[str]:
    if found.data_type is not expected:
        yield (
            f"unable to load model '{config.name}', configuration expects datatype {expected} for "
            f"{role} '{name}', model provides {found.data_type}"
        )


def _shape_problems(
    tensor: ModelInput | ModelOutput, found: ModelTensor, config: ModelConfig
) -> Iterator[str]:
    dims = tensor.dims if tensor.reshape is None else tensor.reshape.shape
    if not config.batching:
        yield from whole_shape_problems(config.name, tensor.name, found.dims, dims)
        return
    if found.dims[:1] != (-1,):
        yield (
            f"model '{config.name}', tensor '{tensor.name}': for the model to support batching the "
            "shape should have at least 1 dimension and the first dimension must be -1; but shape "
            f"expected by the model is {format_shape(found.dims)}"
        )
    yield from batched_shape_problems(config.name, tensor.name, found.dims, dims)
