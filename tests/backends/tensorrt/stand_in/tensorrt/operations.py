"""Computation of the stand-in's engines: each output by one operation on inputs.

An operation tells the output's shape from those of its inputs (and the values of shape tensors),
or -1 for sizes that only its values tell.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Shape = tuple[int, ...]

NUMPY = {
    "FLOAT": np.dtype("<f4"),
    "HALF": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "INT8": np.dtype("<i1"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype("<u1"),
    "FP8": np.dtype("<u1"),
}

COMPUTE: Mapping[str, Callable[..., Array]] = {
    "identity": lambda x: x,
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "negate": lambda x: -x,
    "rows": lambda x: np.arange(len(x), dtype=x.dtype),
    "nonzero": lambda x: np.flatnonzero(x).astype(np.int64),
    "share": lambda x: np.arange(1000 // len(x), dtype=x.dtype),
    "fill": lambda value, sizes: np.full(tuple(sizes), value),
    "sizes": lambda x: np.array(x.shape),
    "lookup": lambda indices: np.array([10, 11, 12, 13])[indices],
}


def through_layers(x: Array, layers: Sequence[Any]) -> Array:
    for each in layers:
        x = np.maximum(x, 0) if each == "RELU" else x @ np.array(each, np.float32)
    return x


def output_shape(operation: str, shapes: Sequence[Shape], values: Sequence[Array | None]) -> Shape:
    """Of an output, whose inputs have these shapes, and values where they are on the host."""
    match operation:
        case "rows":
            return shapes[0][:1]
        case "share":
            return (1000 // shapes[0][0],)
        case "nonzero":
            return (-1,)
        case "sizes":
            return (len(shapes[0]),)
        case "fill":
            assert values[1] is not None
            return tuple(int(size) for size in values[1])
        case _:
            return shapes[0]
