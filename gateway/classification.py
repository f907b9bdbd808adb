"""The classification extension: the best elements of an output with their labels; pure."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gateway.errors import Code, InferenceError
from gateway.tensor import NUMPY_TYPES, Datatype, Tensor

MAX_ELEMENTS = 1_000_000
UNSUPPORTED = frozenset({Datatype.BOOL, Datatype.FP16})
CLASSIFIED = NUMPY_TYPES.keys() - UNSUPPORTED
"""Datatypes whose elements can be ranked."""


def classify(tensor: Tensor, classes: int, labels: Sequence[str], *, batching: bool) -> Tensor:
    """The `classes` largest elements (of each item of a batch) as `value:index[:label]`.

    The result is BYTES of shape [n], or [batch, n]; equal elements keep their order, NaN is last.
    INVALID_ARG for a datatype or a size that the extension does not support.
    """
    if tensor.datatype not in CLASSIFIED:
        raise InferenceError(
            Code.INVALID_ARG,
            f"class result not available for output due to unsupported type '{tensor.datatype}'",
        )
    if tensor.count > MAX_ELEMENTS:
        raise InferenceError(Code.INVALID_ARG, "classification output tensor too large")
    batch = tensor.shape[:1] if batching else ()
    items = tensor.array().reshape((*batch, -1) if tensor.count else (*batch, 0))
    rows = items if batching else items[np.newaxis]
    texts = tuple(text for row in rows for text in _best(row, classes, labels))
    return Tensor(tensor.name, Datatype.BYTES, (*batch, min(classes, rows.shape[1])), texts)


def _best(row: npt.NDArray[Any], classes: int, labels: Sequence[str]) -> list[bytes]:
    # The complement of an integer reverses its order without leaving its range.
    reverse = -row if row.dtype.kind == "f" else ~row
    return [_text(row[index], index, labels) for index in _smallest(reverse, classes).tolist()]


def _smallest(values: npt.NDArray[Any], count: int) -> npt.NDArray[np.intp]:
    """The indices of the smallest values, in order; only candidates are sorted."""

    candidates = np.arange(len(values))
    if count < len(values):
        limit = np.partition(values, count - 1)[count - 1]
        if limit == limit:
            candidates = np.flatnonzero(values <= limit)
    return candidates[np.argsort(values[candidates], kind="stable")[:count]]


def _text(value: Any, index: int, labels: Sequence[str]) -> bytes:
    number = f"{value:f}" if isinstance(value, np.floating) else str(value)
    label = f":{labels[index]}" if index < len(labels) else ""
    return f"{number}:{index}{label}".encode("utf-8", "surrogatepass")
