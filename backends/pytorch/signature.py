"""Inputs and outputs of a program, and their names in a config."""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.utils._pytree as pytree

from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError
from gateway.tensor import Datatype, format_shape
from gateway.tensor_runtime.signature import input_names, output_names

Value: TypeAlias = torch.Tensor | list[str]
"""Values of a program: tensors, and lists of strings for BYTES."""

REMEMBERED = 1024
"""Limit of checked combinations of shapes that are remembered; clients choose them."""

Size: TypeAlias = int | str
"""A size: exact, -1 for any, or a name that several dimensions share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSlot:
    """One input or output of a program.

    `names` are its names for configs, the best first. `datatype` and `shape` are None if the file
    does not define them; `limits` are the largest sizes, by dimension. An input is `written` if
    the program changes it in place, and `optional` if it may be missing.
    """

    names: tuple[str, ...]
    datatype: Datatype | None = None
    shape: tuple[Size, ...] | None = None
    limits: tuple[tuple[int, int], ...] = ()
    written: bool = False
    optional: bool = False


@dataclass(frozen=True, slots=True)
class ProgramSignature:
    """The slots of a program, in its order; `outputs` is None if only a run defines them."""

    inputs: tuple[TensorSlot, ...]
    outputs: tuple[TensorSlot, ...] | None


class Program(ABC):
    """A loaded model file, for any number of concurrent threads."""

    signature: ProgramSignature

    @abstractmethod
    def run(self, values: Sequence[Value | None]) -> Sequence[Any]:
        """Run with one value per input slot (None if missing); returns one per output."""

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is in the program's own memory, which a later run may change."""
        return False


def numbered(prefix: str, count: int) -> tuple[TensorSlot, ...]:
    """Slots that have nothing but their place: `INPUT__0` and so on."""
    return tuple(TensorSlot(names=(f"{prefix}__{index}",)) for index in range(count))


class SignatureFit:
    """Checks values against the slots of a program, and remembers accepted combinations."""

    def __init__(self, slots: Sequence[TensorSlot]) -> None:
        self._slots = tuple(slots)
        self._known = any(slot.datatype or slot.shape is not None for slot in slots)
        self._passed: set[tuple[object, ...]] = set()

    def check(self, values: Sequence[Value | None]) -> None:
        """Raise INVALID_ARG for the first value whose datatype or shape is not the program's.

        Compiled programs do not check, and would read foreign memory.
        """
        if not self._known:
            return
        kinds = tuple((v.dtype, v.shape) for v in values if isinstance(v, torch.Tensor))
        if len(kinds) == len(self._slots) and kinds in self._passed:
            return
        _check_fit(self._slots, values)
        if len(self._passed) < REMEMBERED:
            self._passed.add(kinds)


def _check_fit(slots: Sequence[TensorSlot], values: Sequence[Value | None]) -> None:
    sizes: dict[str, int] = {}
    for slot, value in zip(slots, values, strict=True):
        if isinstance(value, torch.Tensor):
            for problem in _problems(slot, value, sizes):
                raise InferenceError(Code.INVALID_ARG, f"input '{slot.names[0]}' {problem}")


def _problems(slot: TensorSlot, value: torch.Tensor, sizes: dict[str, int]) -> Iterator[str]:
    if slot.datatype and DATATYPES.get(value.dtype) is not slot.datatype:
        yield (
            f"has datatype {DATATYPES.get(value.dtype, value.dtype)}, the model takes "
            f"{slot.datatype}"
        )
    if slot.shape is None:
        return
    if not _fits(slot, slot.shape, value.shape, sizes):
        expected = format_shape([_known(size, sizes) for size in slot.shape])
        most = "".join(f", dimension {place} at most {limit}" for place, limit in slot.limits)
        yield f"has shape {format_shape(value.shape)}, the model takes {expected}{most}"
        return
    pairs = zip(slot.shape, value.shape, strict=True)
    sizes.update({size: found for size, found in pairs if isinstance(size, str)})


def _fits(
    slot: TensorSlot, shape: Sequence[Size], found: Sequence[int], sizes: dict[str, int]
) -> bool:
    return (
        len(shape) == len(found)
        and all(_known(s, sizes) in (-1, f) for s, f in zip(shape, found, strict=True))
        and all(found[place] <= limit for place, limit in slot.limits)
    )


def _known(size: Size, sizes: dict[str, int]) -> int:
    return sizes.get(size, -1) if isinstance(size, str) else size


DATATYPES = {
    torch.bool: Datatype.BOOL,
    torch.uint8: Datatype.UINT8,
    torch.uint16: Datatype.UINT16,
    torch.uint32: Datatype.UINT32,
    torch.uint64: Datatype.UINT64,
    torch.int8: Datatype.INT8,
    torch.int16: Datatype.INT16,
    torch.int32: Datatype.INT32,
    torch.int64: Datatype.INT64,
    torch.float16: Datatype.FP16,
    torch.float32: Datatype.FP32,
    torch.float64: Datatype.FP64,
    torch.bfloat16: Datatype.BF16,
}
"""PyTorch's types of the protocol's datatypes."""


_INDEXED = re.compile(r".*?__(\d+)")
"""The first `__` counts, as in Triton."""


def places(names: Sequence[str], slots: Sequence[TensorSlot] | None) -> tuple[int, ...]:
    """The place of each name; it may lie behind the last slot, which the caller checks.

    Triton's rules, the first that holds for all names: they are names of arguments, they end in
    `__<index>`, or else they are in the order of the arguments.
    """
    known = {name: place for place, slot in enumerate(slots or ()) for name in slot.names}
    if all(name in known for name in names):
        return tuple(known[name] for name in names)
    indexed = [_INDEXED.fullmatch(name) for name in names]
    if all(indexed):
        return tuple(int(match[1]) for match in indexed if match)
    return tuple(range(len(names)))


def place_inputs(config: ModelConfig, slots: Sequence[TensorSlot]) -> dict[str, int]:
    """The place of each input; INVALID_ARG if they are not those of the program."""
    names = input_names(config)
    required = sum(not slot.optional for slot in slots)
    if not required <= len(names) <= len(slots):
        raise InferenceError(
            Code.INVALID_ARG,
            f"unable to load model '{config.name}', configuration expects {len(names)} inputs, "
            f"model provides {len(slots)}",
        )
    found = dict(zip(names, places(names, slots), strict=True))
    _check_places(config, "input", found, len(slots))
    for place, slot in enumerate(slots):
        if not slot.optional and place not in found.values():
            raise InferenceError(
                Code.INVALID_ARG,
                f"unable to load model '{config.name}', no input of the configuration is for "
                f"argument {place} ('{slot.names[0]}'), found {', '.join(names)}",
            )
    return found


def place_outputs(config: ModelConfig, slots: Sequence[TensorSlot] | None) -> dict[str, int]:
    """The place of each output; INVALID_ARG if the program is known to lack it."""
    names = output_names(config)
    found = dict(zip(names, places(names, slots), strict=True))
    if slots is not None:
        for name, place in found.items():
            check_place(name, place, len(slots))
    return found


def check_place(output: str, place: int, count: int) -> None:
    """Raise INVALID_ARG if the program has fewer outputs."""
    if place >= count:
        raise InferenceError(
            Code.INVALID_ARG,
            f"The output {output} in the model configuration refers to an output index which "
            f"doesn't exist. This model has {count} outputs",
        )


def _check_places(config: ModelConfig, role: str, found: dict[str, int], count: int) -> None:
    taken: dict[int, str] = {}
    for name, place in found.items():
        if place >= count:
            problem = f"refers to argument {place}, expected one of 0 to {count - 1}"
        elif place in taken:
            problem = f"refers to argument {place} as {role} '{taken[place]}' does"
        else:
            taken[place] = name
            continue
        raise InferenceError(
            Code.INVALID_ARG, f"unable to load model '{config.name}', {role} '{name}' {problem}"
        )


def input_slots(spec: Any, argument_names: Sequence[str] = ()) -> tuple[TensorSlot, ...]:
    """A slot for each leaf of an input spec, which nests (args, kwargs).

    An exported program takes and returns its tensors as one flat list; its call spec defines their
    nesting. Triton names the leaves ARGS[i], KWARGS[k] and RESULT[..], with one bracket per level.

    `argument_names` are those of `forward()`, if they are known.
    """
    args, kwargs = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    shallow = dict(zip(argument_names, args, strict=False)) | kwargs
    aliases = {place: name for name, place in shallow.items() if isinstance(place, int)}
    arguments = [*args, *kwargs.values()]
    if len(arguments) == 1 and isinstance(arguments[0], dict):
        aliases |= {place: key for key, place in arguments[0].items() if isinstance(place, int)}
    paths = {place: path for path, place in [*_paths(args, "ARGS"), *_paths(kwargs, "KWARGS")]}
    return tuple(
        TensorSlot(names=tuple(filter(None, (aliases.get(place), f"INPUT__{place}", paths[place]))))
        for place in range(spec.num_leaves)
    )


def output_slots(spec: Any) -> tuple[TensorSlot, ...]:
    """A slot for each leaf of an output spec; the keys of a dict are names as well."""
    try:
        tree = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    except (TypeError, ValueError, KeyError):
        return numbered("OUTPUT", spec.num_leaves)  # a type that only its own library can build
    keys = tree if isinstance(tree, dict) else {}
    aliases = {place: str(key) for key, place in keys.items() if isinstance(place, int)}
    paths = {place: path for path, place in _paths(tree, "RESULT")}
    return tuple(
        TensorSlot(
            names=tuple(filter(None, (aliases.get(place), f"OUTPUT__{place}", paths.get(place))))
        )
        for place in range(spec.num_leaves)
    )


def _paths(tree: Any, prefix: str) -> Iterator[tuple[str, int]]:
    if isinstance(tree, int):
        yield prefix, tree
    elif isinstance(tree, dict):
        for key, below in tree.items():
            yield from _paths(below, f"{prefix}[{key}]")
    elif isinstance(tree, list | tuple):
        for index, below in enumerate(tree):
            yield from _paths(below, f"{prefix}[{index}]")
