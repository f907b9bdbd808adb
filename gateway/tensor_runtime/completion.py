"""Completion of a config from the model, by Triton's rules, in its words."""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from enum import Enum, auto
from typing import TypeVar

from gateway.batches.stacking import sequence_inputs
from gateway.config import ModelConfig, ModelInput, ModelOutput, TensorReshape
from gateway.config.data_type import DataType
from gateway.config.scheduling import DynamicBatching
from gateway.errors import Code, InferenceError
from gateway.tensor_runtime.signature import ModelSignature, ModelTensor

log = logging.getLogger("sluice.tensors")

DEFAULT_BATCH_SIZE = "default-max-batch-size"
"""The option of `--backend-config` with the batch size of models without one."""
USUAL_BATCH_SIZE = 4

Side = TypeVar("Side", ModelInput, ModelOutput)


class ListedTensors(Enum):
    """The rule for tensors that a config lists already."""

    KEPT = auto()
    """A side that lists tensors is kept as it is, as on Triton for ONNX models."""
    FILLED = auto()
    """Listed tensors get what they lack, and missing inputs are added, as for TensorFlow models."""


def is_complete(config: ModelConfig) -> bool:
    """Whether nothing is missing; batching then is as configured."""
    return bool((config.input or config.batch_input) and config.output)


def complete(
    config: ModelConfig,
    signature: ModelSignature,
    batch_size: int | None,
    listed: ListedTensors = ListedTensors.KEPT,
) -> ModelConfig:
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
    inputs, outputs = (_filled if listed is ListedTensors.FILLED else _kept)(config, own)
    return replace(
        config,
        input=inputs,
        output=outputs,
        dynamic_batching=with_batching(config).dynamic_batching,
    )


Sides = tuple[tuple[ModelInput, ...], tuple[ModelOutput, ...]]


def _kept(config: ModelConfig, own: ModelSignature) -> Sides:
    return (
        config.input if config.input or config.batch_input else _inputs(own, config),
        config.output or _outputs(own, config),
    )


def _filled(config: ModelConfig, own: ModelSignature) -> Sides:
    derived = {name for each in config.batch_input for name in each.target_name}
    known = {each.name for each in config.input}
    missing = {name: each for name, each in own.inputs.items() if name not in known.union(derived)}
    _require_ranks(missing, config, "and dimensions are not defined")
    if not config.output:
        _require_ranks(own.outputs, config, "which is not supported")
    wanted = {each.name for each in config.output} or set(own.outputs)
    own = replace(own, outputs={name: own.outputs[name] for name in own.outputs if name in wanted})
    inputs = _inputs(own, config)
    outputs = _outputs(own, config)
    added = tuple(each for each in inputs if each.name in missing)
    return (
        (*_with_own(config.input, inputs, config), *added),
        _with_own(config.output, outputs, config) or outputs,
    )


def _require_ranks(tensors: Mapping[str, ModelTensor], config: ModelConfig, problem: str) -> None:
    for each in tensors.values():
        if each.dims is None:
            raise _unknown_rank(each.name, config, problem)


def _unknown_rank(name: str, config: ModelConfig, problem: str) -> InferenceError:
    return InferenceError(
        Code.INVALID_ARG,
        f"unable to autofill for '{config.name}': the rank of model tensor '{name}' is 0 {problem}",
    )


def _with_own(
    listed: tuple[Side, ...], found: tuple[Side, ...], config: ModelConfig
) -> tuple[Side, ...]:
    """The listed tensors; each without data type or dims has those of the model."""
    own = {each.name: each for each in found}
    return tuple(
        _completed(each, own[each.name], config) if each.name in own else each for each in listed
    )


def _completed(tensor: Side, own: Side, config: ModelConfig) -> Side:
    if tensor.data_type is DataType.TYPE_INVALID:
        tensor = replace(tensor, data_type=own.data_type)
    if tensor.dims:
        return tensor
    if not own.dims:
        raise _unknown_rank(own.name, config, "and dimensions are not defined")
    return replace(tensor, dims=own.dims, reshape=own.reshape)


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
