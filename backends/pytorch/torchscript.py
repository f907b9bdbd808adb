"""TorchScript modules."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from backends.pytorch.signature import (
    DATATYPES,
    Program,
    ProgramSignature,
    TensorSlot,
    Value,
    numbered,
)
from gateway.errors import Code, InferenceError

OUTPUT_KINDS = "output must be of type Tensor, List[str] or Tuple containing one of these two types"


class TorchScriptProgram(Program):
    """A module of `torch.jit.save`.

    `inputs` and `outputs` are the names in the config: a module whose only argument or result is a
    dict or a list does not define its keys or its length.
    """

    def __init__(self, module: Any, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        self._module = module
        self._forward = module.forward
        arguments = list(module.forward.schema.arguments)[1:]
        self._pack, slots = _packing(arguments, inputs)
        self._unpack, results = _unpacking(module.forward.schema.returns, outputs)
        self.signature = ProgramSignature(_as_traced(slots, module, self._pack), results)
        tensors = (*module.parameters(), *module.buffers())
        self._own = {tensor.untyped_storage().data_ptr() for tensor in tensors}

    def run(self, values: Sequence[Value | None]) -> Sequence[Any]:
        return self._unpack(self._forward(*self._pack(self.signature.inputs, values)))

    def owns(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._own


def load_torchscript(
    path: Path, device: str | None, inputs: Sequence[str], outputs: Sequence[str]
) -> TorchScriptProgram:
    """Load the module; `device` None keeps its tensors on their saved devices."""
    module = torch.jit.load(str(path), map_location=device)
    return TorchScriptProgram(module.eval(), inputs, outputs)


def load_traced(path: Path) -> TorchScriptProgram:
    """Load a traced module with the shapes of its example, for a description only.

    The optimiser may rely on these shapes, so requests of other shapes could fail.
    """
    module = torch.jit.load(str(path), map_location="cpu", _restore_shapes=True)
    return TorchScriptProgram(module.eval(), (), ())


def example_values(program: TorchScriptProgram) -> list[Value | None] | None:
    """Zeros of the shapes that a module was traced with; None if its file lacks them."""
    values: list[Value | None] = []
    for slot in program.signature.inputs:
        if slot.datatype is None or slot.shape is None:
            return None
        types = {datatype: dtype for dtype, datatype in DATATYPES.items()}
        sizes = [int(size) for size in slot.shape]
        values.append(torch.zeros(sizes, dtype=types[slot.datatype]))
    return values


# Arguments.

Pack = Callable[[Sequence[TensorSlot], Sequence[Value | None]], Sequence[Any]]


def _packing(arguments: Sequence[Any], names: Sequence[str]) -> tuple[Pack, tuple[TensorSlot, ...]]:
    kinds = [_kind(argument) for argument in arguments]
    if kinds == ["Dict"]:
        return _pack_dict, tuple(TensorSlot(names=(name,), optional=True) for name in names)
    if kinds == ["List"]:
        return _pack_list, numbered("INPUT", len(names))
    if "Dict" in kinds:
        raise InferenceError(
            Code.INTERNAL,
            "Multiple inputs of kind DictType were detected. Only a single input of type Dict(str, "
            "Tensor) is supported.",
        )
    return _pack_arguments, tuple(
        TensorSlot(names=(each.name,), optional=_is_optional(each)) for each in arguments
    )


def _kind(argument: Any) -> str:
    """Dict, List, or else one value; raises for arguments that no request can fill."""
    text = str(argument.type)
    if text == "Dict[str, Tensor]":
        return "Dict"
    if text == "List[Tensor]":
        return "List"
    if text in ("Tensor", "List[str]", "Optional[Tensor]") or argument.has_default_value():
        return "value"
    raise InferenceError(
        Code.INTERNAL,
        f"An input of type '{text}' was detected in the model. Only a single input of type "
        "Dict(str, Tensor) or input(s) of type Tensor are supported.",
    )


def _is_optional(argument: Any) -> bool:
    return argument.has_default_value() or str(argument.type).startswith("Optional[")


def _pack_dict(slots: Sequence[TensorSlot], values: Sequence[Value | None]) -> Sequence[Any]:
    given = zip(slots, values, strict=True)
    return ({slot.names[0]: value for slot, value in given if value is not None},)


def _pack_list(slots: Sequence[TensorSlot], values: Sequence[Value | None]) -> Sequence[Any]:
    return ([value for value in values if value is not None],)


def _pack_arguments(slots: Sequence[TensorSlot], values: Sequence[Value | None]) -> Sequence[Any]:
    """Missing arguments at the end have their defaults; others are None."""
    packed = list(values)
    while packed and packed[-1] is None:
        packed.pop()
    return packed + [None] * (sum(not slot.optional for slot in slots) - len(packed))


def _as_traced(slots: tuple[TensorSlot, ...], module: Any, pack: Pack) -> tuple[TensorSlot, ...]:
    """The slots with facts of the graph: writes in place, and the shapes of its trace."""
    graph = module.inlined_graph
    writers = graph.alias_db()
    values = list(graph.inputs())[1:]
    traced = list(module.graph.inputs())[1:]
    if pack is not _pack_arguments:
        written = any(writers.has_writers(value) for value in values)
        return tuple(replace(slot, written=written) for slot in slots)
    return tuple(
        replace(
            slot,
            written=writers.has_writers(value),
            datatype=DATATYPES.get(_tensor_fact(example, "dtype")),
            shape=_tensor_fact(example, "sizes"),
        )
        for slot, value, example in zip(slots, values, traced, strict=True)
    )


def _tensor_fact(value: Any, fact: str) -> Any:
    """A fact of a value's type in a graph; None if it is no tensor or unknown."""
    kind = value.type()
    if kind.kind() != "TensorType":
        return None
    found = getattr(kind, fact)()
    return tuple(found) if isinstance(found, list) else found


# Results.

Unpack = Callable[[Any], Sequence[Any]]


def _unpacking(
    returns: Sequence[Any], names: Sequence[str]
) -> tuple[Unpack, tuple[TensorSlot, ...] | None]:
    kind = returns[0].type if len(returns) == 1 else None
    match str(kind).partition("[")[0] if kind else "":
        case "Tensor":
            return _only, numbered("OUTPUT", 1)
        case "List" if str(kind) == "List[str]":
            return _only, numbered("OUTPUT", 1)
        case "List" if str(kind) == "List[Tensor]":
            return list, None
        case "Dict" if str(kind) == "Dict[str, Tensor]":
            return _by_key(names), tuple(TensorSlot(names=(name,)) for name in names)
    if kind is not None and kind.kind() == "TupleType":
        return list, numbered("OUTPUT", len(kind.elements()))
    raise InferenceError(Code.INTERNAL, f"{OUTPUT_KINDS}, the model returns {kind}")


def _only(result: Any) -> Sequence[Any]:
    return (result,)


def _by_key(names: Sequence[str]) -> Unpack:
    def unpack(result: Mapping[str, Any]) -> Sequence[Any]:
        for name in names:
            if name not in result:
                found = ", ".join(sorted(result))
                raise InferenceError(
                    Code.INTERNAL, f"output tensor '{name}' is not found; the model gives {found}"
                )
        return [result[name] for name in names]

    return unpack
