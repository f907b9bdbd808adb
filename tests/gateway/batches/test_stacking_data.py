"""The data of several tensors as that of one."""

import numpy as np
import pytest

from gateway.batches.stacking import LOCK_FREE_BYTES, cut, cut_rows, join
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


ROWS = array_tensor("y", Datatype.INT32, np.arange(12, dtype=np.int32).reshape(4, 3))


def test_rows_are_split_in_order() -> None:
    parts = cut_rows(ROWS, [1, 0, 3])
    assert [part.shape for part in parts] == [(1, 3), (0, 3), (3, 3)]
    assert [part.array().tolist() for part in parts] == [
        [[0, 1, 2]],
        [],
        [[3, 4, 5], [6, 7, 8], [9, 10, 11]],
    ]


def test_elements_are_split_by_shapes() -> None:
    parts = cut(ROWS, [(2, 2), (8,)])
    assert [part.array().tolist() for part in parts] == [[[0, 1], [2, 3]], list(range(4, 12))]


def test_strings_are_split_by_number_in_either_form() -> None:
    words = (b"a", b"bc", b"", b"d")
    wire = b"\x01\x00\x00\x00a\x02\x00\x00\x00bc\x00\x00\x00\x00\x01\x00\x00\x00d"
    for data in (words, wire):
        parts = cut_rows(Tensor("y", Datatype.BYTES, (4,), data), [3, 1])
        assert [part.elements() for part in parts] == [words[:3], words[3:]]
