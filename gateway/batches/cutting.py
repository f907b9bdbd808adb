"""How does an output of a batch become that of each request? Slices of the batch's buffer."""

import math
from collections.abc import Sequence
from itertools import accumulate

from gateway.tensor import SIZES, Datatype, Tensor, array_tensor

Shape = tuple[int, ...]


def cut_rows(tensor: Tensor, rows: Sequence[int]) -> list[Tensor]:
    """A part of the tensor for each number of rows; they must add up to its first dimension."""
    below = tensor.shape[1:]
    shapes = {count: (count, *below) for count in set(rows)}
    return cut(tensor, [shapes[count] for count in rows])


def cut(tensor: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
    """A part of the tensor for each shape, in the order of its data; none of it is copied.

    The elements of the shapes must add up to those of the tensor.
    """
    name, datatype = tensor.name, tensor.datatype
    is_bytes = datatype is Datatype.BYTES
    data = tensor.elements() if is_bytes else memoryview(tensor.raw())
    size = 1 if is_bytes else SIZES[datatype]
    sizes = {shape: math.prod(shape) * size for shape in set(shapes)}
    parts: list[Tensor] = []
    end = 0
    for shape in shapes:
        start, end = end, end + sizes[shape]
        parts.append(Tensor(name, datatype, shape, data[start:end]))
    return parts


def cut_padded(tensor: Tensor, rows: Sequence[int], lengths: Sequence[int]) -> list[Tensor]:
    """Parts as `cut_rows` makes them, each cut back to its length: the dimension after the batch.

    Only a part of several rows that are shorter than the longest is copied.
    """
    array = tensor.array()
    starts = accumulate(rows, initial=0)
    return [
        array_tensor(tensor.name, tensor.datatype, array[start : start + count, :length])
        for start, count, length in zip(starts, rows, lengths, strict=False)
    ]
