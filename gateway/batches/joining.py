"""How does the data of several tensors become that of one? One allocation, no work per row."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gateway.errors import Code, InferenceError
from gateway.tensor import BF16_BITS, NUMPY_TYPES, Buffer, Datatype, Tensor

LOCK_FREE_BYTES = 65536
"""From here on numpy copies, which lets other threads run; below, joining bytes is quicker."""


def join(tensors: Sequence[Tensor]) -> Buffer | tuple[bytes, ...]:
    """The data of the tensors one after the other: rows below rows, or flat behind flat."""
    if tensors[0].datatype is Datatype.BYTES and any(
        isinstance(tensor.data, tuple) for tensor in tensors
    ):
        return tuple(itertools.chain.from_iterable(tensor.elements() for tensor in tensors))
    parts = [tensor.raw() for tensor in tensors]
    size = sum(map(len, parts))
    return _copied(parts, size) if size >= LOCK_FREE_BYTES else b"".join(parts)


def _copied(parts: Sequence[Buffer], size: int) -> memoryview:
    whole = np.empty(size, dtype=np.uint8)
    end = 0
    for part in parts:
        start, end = end, end + len(part)
        whole[start:end] = np.frombuffer(part, dtype=np.uint8)
    return whole.data


def pad(tensors: Sequence[Tensor], length: int, value: Any) -> npt.NDArray[Any]:
    """The rows of the tensors below each other, each filled up with `value` to `length`.

    The length is the first dimension after the batch; all others must agree.
    """
    arrays = [tensor.array() for tensor in tensors]
    rows = sum(len(array) for array in arrays)
    whole = np.empty((rows, length, *arrays[0].shape[2:]), dtype=arrays[0].dtype)
    end = 0
    for array in arrays:
        start, end = end, end + len(array)
        whole[start:end, : array.shape[1]] = array
        whole[start:end, array.shape[1] :] = value
    return whole


def pad_value(name: str, datatype: Datatype, number: float) -> Any:
    """The number as an element of an array of that datatype (BF16: as its bits).

    Raises InferenceError INVALID_ARG if the datatype cannot hold it.
    """
    dtype = NUMPY_TYPES[Datatype.FP32] if datatype is Datatype.BF16 else NUMPY_TYPES.get(datatype)
    if dtype is None or not _holds(dtype, number):
        raise InferenceError(
            Code.INVALID_ARG,
            f"padded input '{name}' is padded with {number}, which its datatype {datatype} cannot "
            "hold",
        )
    if datatype is Datatype.BF16:
        return (np.array(number, dtype=dtype).view("<u4") >> 16).astype(BF16_BITS)[()]
    return dtype.type(number)


def _holds(dtype: Any, number: float) -> bool:
    if dtype.kind == "f":
        return not float(np.finfo(dtype).max) < abs(number) < math.inf
    limits = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    return limits[0] <= number <= limits[1] and number == int(number)
