"""Parts of the output of a batch."""

import numpy as np

from gateway.batches.stacking import cut, cut_padded, cut_rows
from gateway.tensor import Datatype, Tensor, array_tensor

ROWS = array_tensor("y", Datatype.INT32, np.arange(12, dtype=np.int32).reshape(4, 3))


def test_rows_are_dealt_out_in_order() -> None:
    parts = cut_rows(ROWS, [1, 0, 3])
    assert [part.shape for part in parts] == [(1, 3), (0, 3), (3, 3)]
    assert [part.array().tolist() for part in parts] == [
        [[0, 1, 2]],
        [],
        [[3, 4, 5], [6, 7, 8], [9, 10, 11]],
    ]


def test_elements_are_dealt_out_by_shapes() -> None:
    parts = cut(ROWS, [(2, 2), (8,)])
    assert [part.array().tolist() for part in parts] == [[[0, 1], [2, 3]], list(range(4, 12))]


def test_strings_are_dealt_out_by_number_whatever_their_form() -> None:
    words = (b"a", b"bc", b"", b"d")
    wire = b"\x01\x00\x00\x00a\x02\x00\x00\x00bc\x00\x00\x00\x00\x01\x00\x00\x00d"
    for data in (words, wire):
        parts = cut_rows(Tensor("y", Datatype.BYTES, (4,), data), [3, 1])
        assert [part.elements() for part in parts] == [words[:3], words[3:]]


def test_padded_rows_are_cut_back_to_their_own_length() -> None:
    parts = cut_padded(ROWS, [1, 2, 1], [3, 2, 0])
    assert [part.array().tolist() for part in parts] == [[[0, 1, 2]], [[3, 4], [6, 7]], [[]]]
