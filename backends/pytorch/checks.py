"""Completion, description and checks of a config.

Programs of torch.export define all tensors, and are completed by the rules of ONNX models. Other
files define some; drafts of configs learn more by running them on zeros.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from backends.pytorch.exported import load_exported
from backends.pytorch.inductor import load_inductor
from backends.pytorch.model_file import FAILURES, FileKind, kind_of
from backends.pytorch.parameters import integer
from backends.pytorch.signature import DATATYPES, Program, ProgramSignature, Size, TensorSlot
from backends.pytorch.torchscript import load_torchscript, load_traced
from gateway.backend import Description
from gateway.config import ModelConfig, ModelInput, ModelOutput, TensorReshape
from gateway.config.data_type import DataType
from gateway.config.scheduling import DynamicBatching
from gateway.errors import Code, InferenceError
from gateway.tensor import format_shape

DEFAULT_MAX_BATCH_SIZE = 4
BATCH = "batch"
TYPES = {datatype: dtype for dtype, datatype in DATATYPES.items()}
NOT_TOLD = "the file does not tell data_type and dims"


def complete_from(config: ModelConfig, file: Path, settings: Mapping[str, str]) -> ModelConfig:
    """The config with the inputs and outputs of a program of torch.export, if they are missing."""
    return _fill(config, load_exported(file, "cpu").signature, settings)


def describe_from(config: ModelConfig, file: Path, settings: Mapping[str, str]) -> Description:
    """A description of any file, with notes on its gaps."""
    match kind_of(file):
        case FileKind.EXPORTED:
            return Description(complete_from(config, file, settings))
        case FileKind.INDUCTOR:
            program: Program = load_inductor(file, None, 1)
            signature = _survey(program, program.signature.inputs) or program.signature
            return _described(config, signature, settings, {})
        case FileKind.TRACED:
            return _describe_traced(config, file, settings)
        case _:
            signature = load_torchscript(file, "cpu", (), ()).signature
            return _described(config, signature, settings, {})


def _describe_traced(config: ModelConfig, file: Path, settings: Mapping[str, str]) -> Description:
    program = load_traced(file)
    slots = program.signature.inputs
    notes = {
        each.names[0]: f"traced with shape {format_shape([int(size) for size in each.shape])}"
        for each in slots
        if each.shape is not None
    }
    batched = tuple(
        replace(each, shape=(BATCH, *each.shape[1:])) if each.shape else each for each in slots
    )
    signature = _survey(program, batched) or _survey(program, slots) or program.signature
    return _described(config, signature, settings, notes)


def _described(
    config: ModelConfig,
    signature: ProgramSignature,
    settings: Mapping[str, str],
    notes: Mapping[str, str],
) -> Description:
    found = _fill(config, signature, settings)
    gaps = {
        each.names[0]: NOT_TOLD
        for each in (*signature.inputs, *(signature.outputs or ()))
        if each.datatype is None or each.shape is None
    }
    return Description(found, {**notes, **gaps})


# Signatures from runs.


def _survey(program: Program, inputs: Sequence[TensorSlot]) -> ProgramSignature | None:
    """The signature with the outputs of two runs on zeros of different sizes."""
    if any(each.datatype is None or each.shape is None for each in inputs):
        return None
    try:
        with torch.inference_mode():
            smaller, larger = (program.run(_zeros(inputs, size)) for size in (2, 3))
    except FAILURES:
        return None  # no fault of the file: it may need values other than zero
    outputs = program.signature.outputs or tuple(
        TensorSlot(names=(f"OUTPUT__{place}",)) for place in range(len(smaller))
    )
    return ProgramSignature(tuple(inputs), tuple(map(_seen, outputs, smaller, larger)))


def _zeros(slots: Sequence[TensorSlot], size: int) -> list[Any]:
    return [
        torch.zeros(
            [each if isinstance(each, int) and each >= 0 else size for each in slot.shape or ()],
            dtype=TYPES[slot.datatype] if slot.datatype else None,
        )
        for slot in slots
    ]


def _seen(slot: TensorSlot, smaller: Any, larger: Any) -> TensorSlot:
    if not isinstance(smaller, torch.Tensor) or smaller.dim() != larger.dim():
        return slot
    pairs = zip(smaller.shape, larger.shape, strict=True)
    shape: tuple[Size, ...] = tuple(a if a == b else BATCH for a, b in pairs)
    return replace(slot, datatype=DATATYPES.get(smaller.dtype), shape=shape)


# Completion.


def _fill(
    config: ModelConfig, signature: ProgramSignature, settings: Mapping[str, str]
) -> ModelConfig:
    """The config with its missing side, and batching if every tensor's first size is free."""
    outputs = signature.outputs or ()
    slots = (*signature.inputs, *outputs)
    possible = bool(outputs) and all(_is_batched(slot) for slot in slots)
    if config.batching and not possible:
        raise InferenceError(
            Code.INVALID_ARG,
            f"autofill failed for model '{config.name}': model does not support batching while "
            "non-zero max_batch_size is specified",
        )
    size = config.max_batch_size or (_largest_batch(slots, settings) if possible else 0)
    inputs = tuple(_input(slot, size > 0) for slot in signature.inputs if not slot.optional)
    return replace(
        config,
        max_batch_size=size,
        input=config.input or inputs,
        output=config.output or tuple(_output(slot, size > 0) for slot in outputs),
        dynamic_batching=_dynamic_batching(config, size),
    )


def _is_batched(slot: TensorSlot) -> bool:
    return bool(slot.shape) and not isinstance(slot.shape[0], int)  # type: ignore[index]


def _largest_batch(slots: Sequence[TensorSlot], settings: Mapping[str, str]) -> int:
    try:
        default = integer(settings.get("default-max-batch-size", str(DEFAULT_MAX_BATCH_SIZE)))
    except ValueError as error:
        raise InferenceError(
            Code.INVALID_ARG, f"--backend-config=default-max-batch-size: {error}"
        ) from None
    return min([default, *(most for slot in slots for place, most in slot.limits if not place)])


def _dynamic_batching(config: ModelConfig, size: int) -> DynamicBatching | None:
    chosen = config.dynamic_batching or config.sequence_batching
    if size > 1 and chosen is None:
        return DynamicBatching(preferred_batch_size=(size,))
    return config.dynamic_batching


def _input(slot: TensorSlot, batching: bool) -> ModelInput:
    dims, reshape = _dims(slot, batching)
    return ModelInput(name=slot.names[0], data_type=_data_type(slot), dims=dims, reshape=reshape)


def _output(slot: TensorSlot, batching: bool) -> ModelOutput:
    dims, reshape = _dims(slot, batching)
    return ModelOutput(name=slot.names[0], data_type=_data_type(slot), dims=dims, reshape=reshape)


def _data_type(slot: TensorSlot) -> DataType:
    return DataType.of(slot.datatype) if slot.datatype else DataType.TYPE_INVALID


def _dims(slot: TensorSlot, batching: bool) -> tuple[tuple[int, ...], TensorReshape | None]:
    """The dims of a slot; [1] and an empty reshape for a batch dimension only."""
    if slot.shape is None:
        return (), None
    sizes = tuple(size if isinstance(size, int) else -1 for size in slot.shape)[int(batching) :]
    return (sizes, None) if sizes else ((1,), TensorReshape() if batching else None)


def check_config(config: ModelConfig) -> None:
    """Raise for the first tensor that PyTorch models cannot have."""
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
