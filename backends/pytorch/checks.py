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
from backends.pytorch.signature import DATATYPES, Program, ProgramSignature, Size, TensorSlot
from backends.pytorch.torchscript import load_torchscript, load_traced
from gateway.backend import Description
from gateway.batches.shapes import ANY_SIZE
from gateway.config import ModelConfig, ModelInput, ModelOutput
from gateway.config.data_type import DataType
from gateway.errors import Code, InferenceError
from gateway.tensor import format_shape
from gateway.tensor_runtime.completion import DEFAULT_BATCH_SIZE, USUAL_BATCH_SIZE, complete
from gateway.tensor_runtime.parameters import as_integer
from gateway.tensor_runtime.signature import ModelSignature, ModelTensor

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


def _fill(config: ModelConfig, found: ProgramSignature, settings: Mapping[str, str]) -> ModelConfig:
    """The config with its missing side, and batching if every tensor's first size is free."""
    slots = (*found.inputs, *(found.outputs or ()))
    possible = bool(found.outputs) and all(_is_batched(slot) for slot in slots)
    size = _largest_batch(slots, settings) if possible else None
    required = [slot for slot in found.inputs if not slot.optional]
    signature = ModelSignature(_by_name(required), _by_name(found.outputs or ()))
    return complete(config, signature, size)


def _by_name(slots: Sequence[TensorSlot]) -> dict[str, ModelTensor]:
    return {slot.names[0]: _tensor(slot) for slot in slots}


def _tensor(slot: TensorSlot) -> ModelTensor:
    data_type = DataType.of(slot.datatype) if slot.datatype else DataType.TYPE_INVALID
    shape = slot.shape
    if shape is not None:
        shape = tuple(size if isinstance(size, int) else ANY_SIZE for size in shape)
    return ModelTensor(slot.names[0], str(slot.datatype), data_type, shape)


def _is_batched(slot: TensorSlot) -> bool:
    return bool(slot.shape) and not isinstance(slot.shape[0], int)  # type: ignore[index]


def _largest_batch(slots: Sequence[TensorSlot], settings: Mapping[str, str]) -> int:
    try:
        default = as_integer(settings.get(DEFAULT_BATCH_SIZE, str(USUAL_BATCH_SIZE)))
    except ValueError as error:
        raise InferenceError(
            Code.INVALID_ARG, f"--backend-config={DEFAULT_BATCH_SIZE}: {error}"
        ) from None
    limits = [most for slot in slots for place, most in slot.limits if not place]
    return min([max(0, default), *limits])


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
