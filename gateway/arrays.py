"""Conversion of arrays and lists of a program to tensors and back."""

from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from gateway.config import ModelInput
from gateway.config.data_type import DataType
from gateway.errors import Code, InferenceError
from gateway.tensor import (
    BF16_BITS,
    BF16_SHIFT,
    NUMPY_TYPES,
    Datatype,
    Tensor,
    array_tensor,
    bf16_floats,
)

TEXT_KINDS = "SUO"
DATATYPES: Mapping[tuple[str, int], Datatype] = {
    (dtype.kind, dtype.itemsize): datatype for datatype, dtype in NUMPY_TYPES.items()
}
"""Datatypes by numpy's kind and size: arrays of either byte order are accepted."""

EXPECTED = "expected a numpy array, or a list of str, bytes, numbers or booleans"


def typed_tensor(name: str, value: Any) -> Tensor | None:
    """A tensor over an array's memory, or of a list of texts; None for a list of anything else.

    An array is copied only if it is not contiguous or of foreign byte order. Texts (str as UTF-8,
    bytes) become BYTES. Raises INVALID_ARG for any other value.
    """
    if isinstance(value, np.ndarray):
        return _of_array(name, value)
    if not isinstance(value, list | tuple):
        _refuse(name, f"found {type(value).__name__}, {EXPECTED}")
    if isinstance(_leaf(value), str | bytes):
        return _of_texts(name, np.array(value, dtype=np.object_))
    return None


def fitted(tensor: Tensor, declared: ModelInput) -> Tensor:
    """The tensor in the model's datatype: for BF16, FP32 is truncated as in Triton's client.

    UINT16 values are the bits of BF16.
    """
    if declared.data_type is not DataType.TYPE_BF16:
        return tensor
    if tensor.datatype is Datatype.FP32:
        bits = (tensor.array().view("<u4") >> BF16_SHIFT).astype(BF16_BITS)
        return array_tensor(tensor.name, Datatype.BF16, bits)
    if tensor.datatype is Datatype.UINT16:
        return Tensor(tensor.name, Datatype.BF16, tensor.shape, tensor.data)
    return tensor


def listed_tensor(declared: ModelInput, values: Any) -> Tensor:
    """A tensor of the declared datatype from a list of numbers or booleans, however nested.

    Raises INVALID_ARG for values of another kind or range, and for lists of different lengths.
    """
    name, datatype = declared.name, declared.datatype
    if datatype is Datatype.BYTES and (leaf := _leaf(values)) is not None:
        _refuse(name, f"found a list of {type(leaf).__name__}, expected one of str or bytes")
    dtype = NUMPY_TYPES.get(datatype, np.dtype(np.float32))
    try:
        found = np.array(values)
        if found.size and not _fits(found.dtype, dtype):
            _refuse(name, f"found a list of {found.dtype}, expected {datatype}")
        array = np.array(values, dtype=dtype)
    except (ValueError, TypeError, OverflowError) as error:
        _refuse(name, f"the list is no {datatype}: {error}")
    if datatype is Datatype.BF16:
        return fitted(array_tensor(name, Datatype.FP32, array), declared)
    return array_tensor(name, datatype, array)


def to_array(tensor: Tensor) -> npt.NDArray[Any]:
    """A read-only array of the tensor's shape: a view of its memory where numpy has its datatype.

    BYTES becomes objects of type bytes; BF16 becomes float32, which is exact.
    """
    array = tensor.array()
    if tensor.datatype is Datatype.BF16:
        array = bf16_floats(array)
    array.flags.writeable = False
    return array


def _of_array(name: str, array: npt.NDArray[Any]) -> Tensor:
    datatype = DATATYPES.get((array.dtype.kind, array.dtype.itemsize))
    if datatype is not None:
        return array_tensor(name, datatype, array)
    if array.dtype.kind in TEXT_KINDS:
        return _of_texts(name, array)
    if array.dtype.name != "bfloat16":
        _refuse(name, f"found an array of {array.dtype}, which no datatype of the protocol is")
    return array_tensor(name, Datatype.BF16, np.ascontiguousarray(array).view(BF16_BITS))


def _of_texts(name: str, array: npt.NDArray[Any]) -> Tensor:
    for element in array.flat:
        if not isinstance(element, str | bytes):
            _refuse(name, f"found {type(element).__name__} among texts, expected str or bytes")
    try:
        return array_tensor(name, Datatype.BYTES, array)
    except UnicodeEncodeError as error:
        _refuse(name, f"a str is no text: {error.reason}; give bytes instead")


def _leaf(values: Any) -> Any:
    """The first value in a list, however deep; None if there is none."""
    while isinstance(values, list | tuple):
        if not values:
            return None
        values = values[0]
    return values


def _fits(found: "np.dtype[Any]", wanted: "np.dtype[Any]") -> bool:
    """Whether a kind of numbers converts to another without truncation; ranges are not checked."""

    if found.kind in "iu" and wanted.kind in "iu":
        return True
    return wanted.kind != "O" and np.can_cast(found, wanted, casting="same_kind")


def _refuse(name: str, message: str) -> NoReturn:
    raise InferenceError(Code.INVALID_ARG, f"input '{name}': {message}")
