"""How do our tensors become PyTorch's and come back, without copies where memory can be shared?"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from backends.pytorch.failures import FAILURES, reason
from backends.pytorch.signature import DATATYPES, Slot, Value
from gateway.errors import Code, InferenceError
from gateway.tensor import Datatype, Tensor, array_tensor

NO_SCALARS = "is a scalar which is not supported."


def to_torch(tensor: Tensor, slot: Slot, device: torch.device) -> Value:
    """The value over the tensor's own memory; BYTES as a list of strings.

    Copied only if the program writes to it, if it goes to another device, or if it does not start
    at a multiple of its element's size: compiled loops may rely on that, and a client decides
    where its tensors start in a body.
    """
    if tensor.datatype is Datatype.BYTES:
        return _strings(tensor)
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


def from_torch(name: str, datatype: Datatype, value: Any, copied: bool = False) -> Tensor:
    """The tensor over the value's own memory, or over a copy.

    Raises INVALID_ARG, with Triton's texts, for a value that the configuration does not announce.
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


def _other_datatype(name: str, expected: Datatype, found: object) -> InferenceError:
    wanted = "STRING" if expected is Datatype.BYTES else expected
    return InferenceError(
        Code.INVALID_ARG,
        f"configuration expects datatype TYPE_{wanted} for output '{name}', model provides "
        f"TYPE_{found}",
    )
