"""Padded batches."""

import numpy as np
import pytest

from gateway.batches.stacking import Stacking
from gateway.errors import Code, InferenceError
from gateway.tensor import SIZES, Datatype, Tensor
from tests.gateway.batches.batch_parts import NUMERIC, echo, floats, one_to_one, only, request

# Padding.


def padded(datatype: Datatype = Datatype.FP32, pad: str = "-1", **parameters: str) -> Stacking:
    config = one_to_one(datatype, parameters={"padded_inputs": f'{{"X": {pad}}}', **parameters})
    return Stacking(config)


def test_shorter_sequences_are_padded_and_cut_back() -> None:
    requests = [
        request(floats([[1, 2, 3]])),
        request(floats([[4], [5]])),
        request(floats([[6, 7]])),
    ]
    gathered = padded().gather(requests)["X"]
    assert gathered.array().tolist() == [[1, 2, 3], [4, -1, -1], [5, -1, -1], [6, 7, -1]]
    assert [each.array().tolist() for each in only(echo(padded(), requests))] == [
        [[1, 2, 3]],
        [[4], [5]],
        [[6, 7]],
    ]


def test_rows_cut_from_a_padded_output_are_views_where_they_can_be() -> None:
    requests = [request(floats([[1, 2, 3]])), request(floats([[4]]))]
    batch = np.zeros((2, 3), dtype=np.float32)
    found = only(list(padded().scatter({"Y": floats(batch, "Y")}, requests)))
    batch[:] = 9
    assert [each.array().tolist() for each in found] == [[[9, 9, 9]], [[9]]]


def test_sequences_may_have_items_of_several_numbers() -> None:
    config = one_to_one(dims=(-1, 2), parameters={"padded_inputs": '{"X": 0}'})
    requests = [request(floats(np.ones((1, length, 2)))) for length in (1, 3)]
    gathered = Stacking(config).gather(requests)["X"]
    assert gathered.shape == (2, 3, 2)
    assert gathered.array()[0].tolist() == [[1, 1], [0, 0], [0, 0]]
    assert [each.shape for each in only(echo(Stacking(config), requests))] == [(1, 1, 2), (1, 3, 2)]


def test_outputs_that_are_not_padded_are_cut_by_rows_only() -> None:
    config = one_to_one(parameters={"padded_inputs": '{"X": 0}', "padded_outputs": "[]"})
    requests = [request(floats([[1, 2]])), request(floats([[3]]))]
    found = only(list(Stacking(config).scatter({"Y": floats([[7], [8]], "Y")}, requests)))
    assert [each.array().tolist() for each in found] == [[[7]], [[8]]]


def test_sequences_of_one_length_are_not_touched() -> None:
    requests = [request(floats([[1, 2]])), request(floats([[3, 4]]))]
    assert padded().gather(requests)["X"].array().tolist() == [[1, 2], [3, 4]]
    assert padded().gather(requests[:1])["X"] is requests[0].inputs[0]


def test_an_output_of_another_length_than_the_padded_one_is_refused() -> None:
    requests = [request(floats([[1, 2, 3]])), request(floats([[4]]))]
    with pytest.raises(InferenceError, match="expected length 3, to which"):
        list(padded().scatter({"Y": floats(np.zeros((2, 4)), "Y")}, requests))


@pytest.mark.parametrize("datatype", NUMERIC)
def test_every_datatype_of_numbers_may_be_padded(datatype: Datatype) -> None:
    size = SIZES[datatype]
    requests = [
        request(Tensor("X", datatype, (1, length), b"\0" * length * size)) for length in (1, 2)
    ]
    gathered = padded(datatype, "1").gather(requests)["X"].array()
    one = 0x3F80 if datatype is Datatype.BF16 else 1
    assert gathered.tolist() == [[0, one], [0, 0]]


@pytest.mark.parametrize(
    ("datatype", "pad"),
    [
        (Datatype.UINT8, "256"),
        (Datatype.UINT8, "-1"),
        (Datatype.INT64, "0.5"),
        (Datatype.INT64, "NaN"),
        (Datatype.INT32, "Infinity"),
        (Datatype.INT64, "9223372036854775808"),
        (Datatype.BOOL, "2"),
        (Datatype.BYTES, "0"),
    ],
)
def test_a_pad_value_that_the_datatype_cannot_hold_is_refused(datatype: Datatype, pad: str) -> None:
    with pytest.raises(InferenceError) as caught:
        padded(datatype, pad)
    assert caught.value.code is Code.INVALID_ARG
    assert "padded input 'X' is padded with" in caught.value.message


def test_a_pad_value_may_be_infinite_where_there_is_infinity() -> None:
    requests = [request(floats([[1, 2]])), request(floats([[3]]))]
    assert padded(pad="-Infinity").gather(requests)["X"].array()[1].tolist() == [3, -np.inf]
