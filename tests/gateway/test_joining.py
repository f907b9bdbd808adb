"""The data of several tensors as that of one."""

import numpy as np
import pytest

from gateway.joining import LOCK_FREE_BYTES, join, pad
from gateway.tensor import Datatype, Tensor, array_tensor


@pytest.mark.parametrize("size", [0, 1, LOCK_FREE_BYTES // 2, LOCK_FREE_BYTES])
def test_bytes_of_any_buffer_follow_each_other(size: int) -> None:
    parts = [b"a" * size, bytearray(b"b" * size), memoryview(b"-" + b"c" * size)[1:]]
    joined = join([Tensor("x", Datatype.UINT8, (1, size), part) for part in parts])
    assert not isinstance(joined, tuple)
    assert bytes(joined) == b"a" * size + b"b" * size + b"c" * size


def test_elements_of_either_form_follow_each_other() -> None:
    wire = Tensor("x", Datatype.BYTES, (1,), b"\x02\x00\x00\x00hi")
    split = Tensor("x", Datatype.BYTES, (1,), (b"you",))
    assert join([wire, split]) == (b"hi", b"you")
    assert join([wire, wire]) == b"\x02\x00\x00\x00hi" * 2


def test_rows_are_filled_up_to_a_length_that_may_be_more_than_any_has() -> None:
    tensors = [
        array_tensor("x", Datatype.INT32, np.array(rows, dtype=np.int32))
        for rows in ([[1, 2]], [[3], [4]])
    ]
    assert pad(tensors, 3, -7).tolist() == [[1, 2, -7], [3, -7, -7], [4, -7, -7]]
