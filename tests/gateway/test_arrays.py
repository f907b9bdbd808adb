"""Arrays and lists become tensors, and tensors arrays."""

from typing import Any

import numpy as np
import pytest

from gateway.arrays import fitted, listed_tensor, to_array, typed_tensor
from gateway.config import ModelInput
from gateway.config.data_type import DataType
from gateway.errors import Code, InferenceError
from gateway.tensor import NUMPY_TYPES, Datatype, Tensor


def declared(data_type: str) -> ModelInput:
    return ModelInput(name="x", data_type=DataType(data_type), dims=(-1,))


@pytest.mark.parametrize(("datatype", "dtype"), NUMPY_TYPES.items(), ids=str)
def test_every_datatype_that_numpy_has_goes_there_and_back_without_a_copy(
    datatype: Datatype, dtype: Any
) -> None:
    given = np.array([[0, 1, 1]], dtype=dtype)
    tensor = typed_tensor("x", given)
    assert tensor is not None
    assert (tensor.datatype, tensor.shape) == (datatype, (1, 3))
    found = to_array(tensor)
    assert found.dtype == dtype
    assert np.shares_memory(found, given)
    assert found.tolist() == given.tolist()
    assert not found.flags.writeable


@pytest.mark.parametrize(
    "given",
    [
        np.arange(6, dtype=">i4").reshape(2, 3),
        np.asfortranarray(np.arange(6, dtype=np.int32).reshape(2, 3)),
        np.arange(12, dtype=np.int32)[::2].reshape(2, 3) // 2,
    ],
    ids=["big-endian", "columns first", "strided"],
)
def test_arrays_of_another_layout_mean_the_same_values(given: Any) -> None:
    tensor = typed_tensor("x", given)
    assert tensor is not None
    assert to_array(tensor).tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    "given",
    [
        ["ä", "b"],
        ("ä", b"b"),
        np.array(["ä", "b"]),
        np.array(["ä", b"b"], dtype=object),
        np.array(["ä".encode(), b"b"]),
    ],
)
def test_texts_are_utf8_and_bytes_are_themselves(given: Any) -> None:
    tensor = typed_tensor("x", given)
    assert tensor is not None
    assert (tensor.datatype, tensor.shape) == (Datatype.BYTES, (2,))
    assert to_array(tensor).tolist() == ["ä".encode(), b"b"]


def test_nested_texts_keep_their_shape() -> None:
    tensor = typed_tensor("x", [["a"], ["b"]])
    assert tensor is not None
    assert tensor.shape == (2, 1)


@pytest.mark.parametrize(
    ("data_type", "given", "found"),
    [
        ("TYPE_INT32", [1, -2], [1, -2]),
        ("TYPE_UINT8", [[255]], [[255]]),
        ("TYPE_FP32", [1, 2.5], [1.0, 2.5]),
        ("TYPE_FP16", (0.5,), [0.5]),
        ("TYPE_BOOL", [True, False], [True, False]),
        ("TYPE_INT64", [True, 3], [1, 3]),
        ("TYPE_BF16", [1.5, 2], [1.5, 2.0]),
        ("TYPE_INT64", [], []),
        ("TYPE_STRING", [], []),
    ],
)
def test_a_list_has_the_datatype_of_the_models_input(
    data_type: str, given: Any, found: list[Any]
) -> None:
    assert typed_tensor("x", given) is None
    tensor = listed_tensor(declared(data_type), given)
    assert tensor.datatype is DataType(data_type).datatype
    assert to_array(tensor).tolist() == found


@pytest.mark.parametrize(
    ("data_type", "given", "text"),
    [
        ("TYPE_INT32", [1.5], "found a list of float64, expected INT32"),
        ("TYPE_UINT8", [256], "the list is no UINT8"),
        ("TYPE_UINT8", [-1], "the list is no UINT8"),
        ("TYPE_BOOL", [1], "found a list of int64, expected BOOL"),
        ("TYPE_STRING", [1], "found a list of int, expected one of str or bytes"),
        ("TYPE_INT32", [[1], [1, 2]], "the list is no INT32"),
        ("TYPE_INT32", [None], "found a list of object, expected INT32"),
        ("TYPE_INT32", [1, "a"], "found a list of"),
        ("TYPE_INT64", [2**64], "found a list of object, expected INT64"),
    ],
)
def test_a_list_of_other_things_is_refused(data_type: str, given: Any, text: str) -> None:
    with pytest.raises(InferenceError, match=text) as caught:
        listed_tensor(declared(data_type), given)
    assert caught.value.code is Code.INVALID_ARG
    assert caught.value.message.startswith("input 'x': ")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (5, "found int, expected a numpy array, or a list"),
        ("text", "found str, expected a numpy array, or a list"),
        (None, "found NoneType"),
        (["a", 5], "found int among texts, expected str or bytes"),
        (["a", ["b"]], "found list among texts"),
        (np.array([None]), "found NoneType among texts"),
        (["\ud800"], "a str is no text"),
        (np.array([1j]), "found an array of complex128"),
        (np.array(["2025-01-01"], dtype="datetime64[D]"), "found an array of datetime64"),
    ],
)
def test_what_can_be_no_tensor_is_refused(given: Any, text: str) -> None:
    with pytest.raises(InferenceError) as caught:
        typed_tensor("x", given)
    assert caught.value.code is Code.INVALID_ARG
    assert text in caught.value.message


def test_bf16_takes_the_upper_half_of_float32_and_its_own_bits() -> None:
    bits = np.array([0x3FC0, 0x4049], dtype=np.uint16)
    numbers = (bits.astype("<u4") << 16 | 0xFFFF).view("<f4")
    for given in (numbers, bits):
        tensor = typed_tensor("x", given)
        assert tensor is not None
        found = fitted(tensor, declared("TYPE_BF16"))
        assert found.datatype is Datatype.BF16
        assert to_array(found).tolist() == [1.5, 3.140625]
        assert fitted(tensor, declared("TYPE_FP32")) is tensor


def test_bytes_that_are_cut_short_are_an_error_and_no_array() -> None:
    with pytest.raises(InferenceError, match="incomplete string"):
        to_array(Tensor("x", Datatype.BYTES, (1,), b"\x05\0\0\0ab"))
