"""Which tensors does a program take and give, as far as its file tells?"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from gateway.errors import Code, InferenceError
from gateway.tensor import Datatype, format_shape

Value: TypeAlias = torch.Tensor | list[str]
"""What a program takes and gives: tensors, and lists of strings where Triton has BYTES."""

REMEMBERED = 1024
"""Combinations of shapes that are not checked again; clients choose them, so there is a limit."""

Size: TypeAlias = int | str
"""A size: exact, -1 for any, or the name of one that other dimensions have as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One tensor that a program takes or gives.

    `names` are what a configuration may call it, the best first. `datatype` and `shape` are None
    where the file does not tell; `limits` are the largest sizes allowed, by dimension. An input
    is `written` if the program changes it in place, and `optional` if it may be left out.
    """

    names: tuple[str, ...]
    datatype: Datatype | None = None
    shape: tuple[Size, ...] | None = None
    limits: tuple[tuple[int, int], ...] = ()
    written: bool = False
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Signature:
    """The slots of a program, in its order. `outputs` is None if only a run can tell."""

    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...] | None


class Program(ABC):
    """A loaded model file that can be run, by any number of threads at a time."""

    signature: Signature

    @abstractmethod
    def run(self, values: Sequence[Value | None]) -> Sequence[Any]:
        """One value per input slot, None for what is left out; one value per output."""

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is in the program's own memory, which a later run may change."""
        return False


def numbered(prefix: str, count: int) -> tuple[Slot, ...]:
    """Slots that have nothing but their place: `INPUT__0` and so on."""
    return tuple(Slot(names=(f"{prefix}__{index}",)) for index in range(count))


class Fit:
    """Holds values to the slots of a program, and remembers what has passed."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = tuple(slots)
        self._told = any(slot.datatype or slot.shape is not None for slot in slots)
        self._passed: set[tuple[object, ...]] = set()

    def check(self, values: Sequence[Value | None]) -> None:
        """Raise INVALID_ARG for the first value whose datatype or shape is not the program's.

        Compiled programs do not look, and would read memory that is not theirs.
        """
        if not self._told:
            return
        kinds = tuple((v.dtype, v.shape) for v in values if isinstance(v, torch.Tensor))
        if len(kinds) == len(self._slots) and kinds in self._passed:
            return
        _check_fit(self._slots, values)
        if len(self._passed) < REMEMBERED:
            self._passed.add(kinds)


def _check_fit(slots: Sequence[Slot], values: Sequence[Value | None]) -> None:
    sizes: dict[str, int] = {}
    for slot, value in zip(slots, values, strict=True):
        if isinstance(value, torch.Tensor):
            for problem in _problems(slot, value, sizes):
                raise InferenceError(Code.INVALID_ARG, f"input '{slot.names[0]}' {problem}")


def _problems(slot: Slot, value: torch.Tensor, sizes: dict[str, int]) -> Iterator[str]:
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


def _fits(slot: Slot, shape: Sequence[Size], found: Sequence[int], sizes: dict[str, int]) -> bool:
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
"""PyTorch's types by ours; there is no other that a tensor on the wire can have."""
