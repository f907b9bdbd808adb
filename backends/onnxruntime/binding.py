"""One run whose inputs and outputs lie on a GPU, or on the host, each as it is wanted."""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from backends.onnxruntime.element_types import BFLOAT16
from backends.onnxruntime.signature import Signature
from gateway.backend import ModelContext
from gateway.config import InstanceKind
from gateway.device_memory import DeviceMemory
from gateway.tensor import NUMPY_TYPES, Datatype, Tensor

ALIGNED_BYTES = 256
"""As the runtime's own memory of a GPU; kernels may rely on less, but on some of it."""

HOST = "cpu"
STRINGS = "tensor(string)"


@dataclass(frozen=True, slots=True)
class Place:
    """A GPU as ONNX Runtime names it."""

    device: str
    number: int


def place_of(context: ModelContext, signature: Signature) -> Place | None:
    """Where an instance computes; None on the host, and for strings, which cannot be bound."""
    every = (*signature.inputs.values(), *signature.initializers.values())
    if context.group.kind is not InstanceKind.KIND_GPU or any(
        each.kind == STRINGS for each in (*every, *signature.outputs.values())
    ):
        return None
    return Place("cuda", context.device)


Lying = Mapping[str, tuple[Tensor, DeviceMemory]]
"""Inputs by name, and where on the GPU they lie."""


def usable_on(gpu: int | None, inputs: Iterable[Tensor]) -> Lying:
    """The inputs that a run on that GPU can take from where they are; none without a GPU.

    BOOL must have ones and zeros only, which is seen to on the host.
    """
    if gpu is None:
        return {}
    return {
        tensor.name: (tensor, data)
        for tensor in inputs
        if isinstance(data := tensor.data, DeviceMemory)
        and data.gpu == gpu
        and data.address % ALIGNED_BYTES == 0
        and tensor.datatype is not Datatype.BOOL
    }


def bind(session: Any, place: Place, values: Mapping[str, Any], there: Lying) -> Any:
    """A binding with inputs of the host, and others that lie at the place."""
    binding = session.io_binding()
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    for name, (tensor, memory) in there.items():
        element = NUMPY_TYPES.get(tensor.datatype, BFLOAT16)
        where = (place.device, place.number)
        binding.bind_input(name, *where, element, tensor.shape, memory.address)
    return binding


def bind_outputs(binding: Any, place: Place, names: Sequence[str], staying: Set[str]) -> None:
    """Have the runtime allocate outputs: those that stay at the place, others on the host."""
    for name in names:
        where = (place.device, place.number) if name in staying else (HOST, 0)
        binding.bind_output(name, *where)
