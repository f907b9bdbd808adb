"""Padded rows and pad values."""

import math

import numpy as np
import pytest

from gateway.batches.padding import cut_padded, pad, pad_value
from gateway.errors import Code, InferenceError
from gateway.tensor import Datatype, array_tensor

ROWS = array_tensor("y", Datatype.INT32, np.arange(12, dtype=np.int32).reshape(4, 3))


def test_rows_are_filled_up_to_a_length_that_may_be_more_than_any_has() -> None:
    tensors = [
        array_tensor("x", Datatype.INT32, np.array(rows, dtype=np.int32))
        for rows in ([[1, 2]], [[3], [4]])
    ]
    assert pad(tensors, 3, -7).tolist() == [[1, 2, -7], [3, -7, -7], [4, -7, -7]]


@pytest.mark.parametrize(
    ("datatype", "number"),
    [
        (Datatype.FP16, 65504),
        (Datatype.FP16, -math.inf),
        (Datatype.FP32, math.nan),
        (Datatype.FP64, 1e300),
        (Datatype.INT64, -(2**63)),
        (Datatype.UINT8, 255),
        (Datatype.BOOL, 1),
    ],
)
def test_a_pad_value_is_an_element_of_its_datatype(datatype: Datatype, number: float) -> None:
    np.testing.assert_equal(pad_value("x", datatype, number), np.array(number))


def test_a_pad_value_of_bfloat16_is_its_bits() -> None:
    assert pad_value("x", Datatype.BF16, -2.0) == 0xC000


@pytest.mark.parametrize(
    ("datatype", "number"),
    [
        (Datatype.FP16, 65536),
        (Datatype.BF16, -1e39),
        (Datatype.FP32, 1e39),
        (Datatype.FP64, 10**400),
        (Datatype.INT64, 2**63),
        (Datatype.INT8, 0.5),
        (Datatype.INT8, math.inf),
        (Datatype.BOOL, 2),
        (Datatype.BYTES, 0),
    ],
)
def test_a_pad_value_that_its_datatype_cannot_hold_is_refused(
    datatype: Datatype, number: float
) -> None:
    with pytest.raises(InferenceError, match=f"datatype {datatype} cannot hold") as caught:
        pad_value("x", datatype, number)
    assert caught.value.code is Code.INVALID_ARG


def test_padded_rows_are_cut_back_to_their_own_length() -> None:
    parts = cut_padded(ROWS, [1, 2, 1], [3, 2, 0])
    assert [part.array().tolist() for part in parts] == [[[0, 1, 2]], [[3, 4], [6, 7]], [[]]]
