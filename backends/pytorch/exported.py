"""Programs of `torch.export.save`.

`torch.export.load` imports large parts of PyTorch at its first call. They are imported here,
because a backend has imported all modules when it is created.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch._inductor.sizevars
import torch.export._trace
import torch.fx.experimental.validator
import torch.utils._pytree as pytree
import torch.utils.serialization.config
from torch.export.graph_signature import ConstantArgument, InputKind
from torch.export.passes import move_to_device_pass

from backends.pytorch.signature import (
    DATATYPES,
    Program,
    ProgramSignature,
    Size,
    TensorSlot,
    Value,
    input_slots,
    output_slots,
)

USER = InputKind.USER_INPUT


class ExportedProgram(Program):
    """A program of `torch.export`, run without compilation.

    Arguments that were no tensors at the export keep their values.
    """

    def __init__(self, exported: Any) -> None:
        self._module = exported.module()
        call = exported.module_call_graph[0].signature
        self._in_spec = call.in_spec
        self._constants = _constants(exported)
        self.signature = _signature(exported, call, self._constants)
        tensors = (*self._module.parameters(), *self._module.buffers())
        self._own = {tensor.untyped_storage().data_ptr() for tensor in tensors}

    def run(self, values: Sequence[Value | None]) -> Sequence[Any]:
        flat = [self._constants.get(place, value) for place, value in enumerate(values)]
        args, kwargs = pytree.tree_unflatten(flat, self._in_spec)
        found: Sequence[Any] = pytree.tree_leaves(self._module(*args, **kwargs))
        return found

    def owns(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._own


def load_exported(path: Path, device: str | None) -> ExportedProgram:
    """Load the program; `device` None keeps its tensors on their exported devices."""
    exported = torch.export.load(str(path))
    return ExportedProgram(move_to_device_pass(exported, device) if device else exported)


def _constants(exported: Any) -> dict[int, Any]:
    """The arguments that are no tensors, by their place."""
    arguments = [each.arg for each in exported.graph_signature.input_specs if each.kind is USER]
    return {
        place: each.value
        for place, each in enumerate(arguments)
        if isinstance(each, ConstantArgument)
    }


def _signature(exported: Any, call: Any, constants: Mapping[int, Any]) -> ProgramSignature:
    facts = {node.name: node.meta.get("val") for node in exported.graph.nodes}
    graph = exported.graph_signature
    written = _written(exported.graph.nodes) | set(graph.user_inputs_to_mutate.values())
    limits = {str(symbol): bounds for symbol, bounds in exported.range_constraints.items()}
    slots = input_slots(call.in_spec, call.forward_arg_names or ())
    inputs = [
        replace(
            _known(slot, facts.get(name), limits),
            written=name in written,
            optional=place in constants,
        )
        for place, (slot, name) in enumerate(zip(slots, graph.user_inputs, strict=True))
    ]
    outputs = [
        _known(slot, facts.get(name), limits)
        for slot, name in zip(output_slots(call.out_spec), graph.user_outputs, strict=True)
    ]
    return ProgramSignature(tuple(inputs), tuple(outputs))


def _written(nodes: Iterable[Any]) -> set[str]:
    """The nodes that an in-place operation may write: its tensor may be a view of them."""
    found: set[str] = set()
    for node in reversed(list(nodes)):
        schema = getattr(node.target, "_schema", None)
        if node.name in found or (schema is not None and schema.is_mutable):
            found.update(each.name for each in node.all_input_nodes)
    return found


def _known(slot: TensorSlot, fact: Any, limits: Mapping[str, Any]) -> TensorSlot:
    """The slot with the datatype and the shape that the graph's example tensor has."""
    if not isinstance(fact, torch.Tensor):
        return slot
    sizes = tuple(_size(size) for size in fact.shape)
    return replace(
        slot,
        datatype=DATATYPES.get(fact.dtype),
        shape=sizes,
        limits=tuple(
            (place, int(limits[size].upper))
            for place, size in enumerate(sizes)
            if isinstance(size, str) and size in limits and limits[size].upper.is_Integer
        ),
    )


def _size(size: Any) -> Size:
    return size if isinstance(size, int) else str(size)
