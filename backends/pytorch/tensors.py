"""Tensors of requests as PyTorch's and back, without copies where memory can be shared."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from backends.pytorch.model_file import FAILURES, reason
from backends.pytorch.signature import DATATYPES, TensorSlot, Value
from gateway.cuda_driver import DeviceMemory
from gateway.errors import Code, InferenceError
from gateway.tensor import Datatype, Tensor, array_tensor

TYPES = {datatype: dtype for dtype, datatype in DATATYPES.items()}

ALIGNED_BYTES = 16
"""The alignment of PyTorch's own memory, on which compiled kernels may rely."""

NO_SCALARS = "is a scalar which is not supported."


def to_torch(tensor: Tensor, slot: TensorSlot, device: torch.device) -> Value:
    """The value over the tensor's own memory; BYTES as a list of strings.

    Copied only if the program writes to it, if it moves to another device, or if it does not start
    at a multiple of its element's size: compiled loops may rely on that, and clients choose the
    offsets in a body.
    """
    if tensor.datatype is Datatype.BYTES:
        return _strings(tensor)
    if isinstance(tensor.data, DeviceMemory) and tensor.data.gpu == device.index:
        return on_device(tensor, view_of(tensor.data, device), written=slot.written)
    array = tensor.array()
    if not array.flags.aligned or (slot.written and device.type == "cpu"):
        array = array.copy()
    # DLPack shares read-only memory without the warning that frombuffer and from_numpy give.
    value = torch.from_dlpack(array)
    if tensor.datatype is Datatype.BF16:
        value = value.view(torch.bfloat16)
    return value if device.type == "cpu" else value.to(device)


def _strings(tensor: Tensor) -> list[str]:
    try:
        return [element.decode() for element in tensor.elements()]
    except UnicodeDecodeError as error:
        raise InferenceError(
            Code.INVALID_ARG,
            f"input '{tensor.name}' holds bytes that are no UTF-8 ({error.reason}); strings of "
            "PyTorch models are text",
        ) from None


def view_of(memory: DeviceMemory, device: torch.device) -> torch.Tensor:
    """The bytes of a GPU's memory; the tensor keeps it alive."""
    return torch.as_tensor(_CudaArray(memory), device=device)


def on_device(tensor: Tensor, content: torch.Tensor, *, written: bool) -> torch.Tensor:
    """The value over bytes on the tensor's GPU; copied there for the same reasons as on the host.

    As on the host, BOOL has ones and zeros only.
    """
    if written or content.data_ptr() % ALIGNED_BYTES:
        content = content.clone()
    if tensor.datatype is Datatype.BOOL:
        return (content != 0).reshape(tensor.shape)
    return content.view(TYPES[tensor.datatype]).reshape(tensor.shape)


class _CudaArray:
    """Memory of a GPU as the CUDA array interface."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self.__cuda_array_interface__ = {
            "data": (memory.address, False),
            "typestr": "|u1",
            "shape": (memory.byte_size,),
            "version": 3,
        }


def from_torch(
    name: str, datatype: Datatype, value: Any, copied: bool = False, *, stays: bool = False
) -> Tensor:
    """The tensor over the value's own memory, or over a copy; on the host, unless it stays.

    Raises INVALID_ARG, with Triton's texts, for a value that the config does not declare.
    """
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return _text(name, datatype, value)
    if not isinstance(value, torch.Tensor):
        raise InferenceError(
            Code.INVALID_ARG, f"output '{name}' must be of type Tensor or List[str]."
        )
    if not value.dim():
        raise InferenceError(Code.INVALID_ARG, f"output '{name}' {NO_SCALARS}")
    found = DATATYPES.get(value.dtype)
    if found is not datatype:
        raise _other_datatype(name, datatype, found or value.dtype)
    if stays and value.is_cuda:
        return _on_gpu(name, datatype, value)
    return array_tensor(name, datatype, _array(name, value.clone() if copied else value))


def _text(name: str, datatype: Datatype, value: Sequence[str]) -> Tensor:
    if datatype is not Datatype.BYTES:
        raise _other_datatype(name, datatype, "STRING")
    elements = tuple(text.encode("utf-8", "surrogateescape") for text in value)
    return Tensor(name, Datatype.BYTES, (len(elements),), elements)


def _array(name: str, value: torch.Tensor) -> "np.ndarray[Any, Any]":
    """The value's memory on the host."""
    if value.dtype is torch.bfloat16:
        value = value.contiguous().view(torch.uint16)  # numpy has no such type
    try:
        return value.detach().cpu().numpy()  # type: ignore[no-any-return]
    except FAILURES as error:
        raise InferenceError(
            Code.INTERNAL, f"output '{name}' is no tensor of plain numbers: {reason(error)}"
        ) from None


def _on_gpu(name: str, datatype: Datatype, value: torch.Tensor) -> Tensor:
    """The tensor over the value's memory on its GPU; the stream must still be waited for."""
    whole = value.detach().contiguous()
    memory = DeviceMemory(whole.device.index, whole.data_ptr(), whole.nbytes, whole)
    return Tensor(name, datatype, tuple(whole.shape), memory)


def _other_datatype(name: str, expected: Datatype, found: object) -> InferenceError:
    wanted = "STRING" if expected is Datatype.BYTES else expected
    return InferenceError(
        Code.INVALID_ARG,
        f"configuration expects datatype TYPE_{wanted} for output '{name}', model provides "
        f"TYPE_{found}",
    )
