"""The best elements of an output, as text (classification extension)."""

import numpy as np
import pytest

from gateway.classification import MAX_ELEMENTS, classify
from gateway.errors import Code, InferenceError
from gateway.tensor import NUMPY_TYPES, Datatype, Tensor, array_tensor, text_tensor

LABELS = ("zero", "one", "two")


def tensor(values: object, datatype: Datatype = Datatype.FP32) -> Tensor:
    return array_tensor("Y", datatype, np.array(values, dtype=NUMPY_TYPES[datatype]))


def best(found: Tensor) -> list[str]:
    assert (found.name, found.datatype) == ("Y", Datatype.BYTES)
    return [element.decode() for element in found.elements()]


def test_the_largest_elements_come_first_with_index_and_label() -> None:
    found = classify(tensor([0.1, 0.9, 0.5, 0.7]), 3, LABELS, batching=False)
    assert found.shape == (3,)
    assert best(found) == ["0.900000:1:one", "0.700000:3", "0.500000:2:two"]


def test_each_item_of_a_batch_is_ranked_by_itself() -> None:
    found = classify(tensor([[1, 2, 3], [9, 8, 7]]), 2, (), batching=True)
    assert found.shape == (2, 2)
    assert best(found) == ["3.000000:2", "2.000000:1", "9.000000:0", "8.000000:1"]


@pytest.mark.parametrize(
    ("batching", "shape", "texts"),
    [
        (False, (4,), ["4.000000:3", "3.000000:2", "2.000000:1", "1.000000:0"]),
        (True, (2, 2), ["2.000000:1", "1.000000:0", "4.000000:1", "3.000000:0"]),
    ],
)
def test_there_are_no_more_classes_than_elements(
    batching: bool, shape: tuple[int, ...], texts: list[str]
) -> None:
    found = classify(tensor([[[1], [2]], [[3], [4]]]), 99, (), batching=batching)
    assert (found.shape, best(found)) == (shape, texts)


@pytest.mark.parametrize(
    ("datatype", "values", "texts"),
    [
        (Datatype.INT32, [3, -5, 3, 7], ["7:3", "3:0", "3:2", "-5:1"]),
        (Datatype.INT8, [-128, 127], ["127:1", "-128:0"]),
        (Datatype.UINT8, [0, 255, 7], ["255:1", "7:2", "0:0"]),
        (Datatype.INT64, [2**62 + 1, 2**62], [f"{2**62 + 1}:0", f"{2**62}:1"]),
        (Datatype.UINT64, [2**64 - 1, 0], [f"{2**64 - 1}:0", "0:1"]),
        (Datatype.FP64, [0.1, 1e6], ["1000000.000000:1", "0.100000:0"]),
        (Datatype.FP32, [0.5, 0.5, 0.9], ["0.900000:2", "0.500000:0", "0.500000:1"]),
        (Datatype.FP32, [np.nan, 1, np.inf], ["inf:2", "1.000000:1", "nan:0"]),
    ],
)
def test_numbers_are_ranked_by_value_then_by_index(
    datatype: Datatype, values: list[float], texts: list[str]
) -> None:
    assert best(classify(tensor(values, datatype), 9, (), batching=False)) == texts


@pytest.mark.parametrize(
    ("shape", "batching", "expected"),
    [((0,), False, (0,)), ((0, 3), True, (0, 0)), ((3, 0), True, (3, 0))],
)
def test_nothing_has_no_classes(
    shape: tuple[int, ...], batching: bool, expected: tuple[int, ...]
) -> None:
    found = classify(Tensor("Y", Datatype.FP32, shape, b""), 2, LABELS, batching=batching)
    assert (found.shape, found.elements()) == (expected, ())


@pytest.mark.parametrize(
    "unranked",
    [
        tensor([True], Datatype.BOOL),
        tensor([1], Datatype.FP16),
        Tensor("Y", Datatype.BF16, (1,), b"\0\0"),
        text_tensor("Y", ["a"]),
    ],
)
def test_some_datatypes_have_no_classes(unranked: Tensor) -> None:
    with pytest.raises(InferenceError) as caught:
        classify(unranked, 1, (), batching=False)
    assert caught.value.code is Code.INVALID_ARG
    assert caught.value.message == (
        f"class result not available for output due to unsupported type '{unranked.datatype}'"
    )


def test_an_output_has_at_most_a_million_elements_to_rank() -> None:
    assert MAX_ELEMENTS == 1_000_000
    zeros = np.zeros(MAX_ELEMENTS, dtype=np.uint8)
    whole = classify(tensor(zeros, Datatype.UINT8), 1, (), batching=False)
    assert best(whole) == ["0:0"]
    with pytest.raises(InferenceError, match="classification output tensor too large"):
        classify(tensor([*zeros, 0], Datatype.UINT8), 1, (), batching=False)


@pytest.mark.parametrize("classes", [1, 3, 19, 20, 21])
def test_few_classes_are_the_beginning_of_all(classes: int) -> None:
    random = np.random.default_rng(classes)
    for _ in range(200):
        values = random.integers(0, 6, 20).astype(np.float32)
        values[random.integers(0, 20, random.integers(0, 20))] = np.nan
        everything = best(classify(tensor(values), 20, (), batching=False))
        assert best(classify(tensor(values), classes, (), batching=False)) == everything[:classes]
