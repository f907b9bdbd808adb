"""Tensors: bytes on the wire to values and back, without copying."""

import numpy as np
import pytest

from gateway.errors import Code, InferenceError
from gateway.tensor import (
    SIZES,
    Datatype,
    Tensor,
    array_tensor,
    format_shape,
    join_elements,
    split_elements,
    text_tensor,
)

A_AND_BC = b"\x01\x00\x00\x00a\x02\x00\x00\x00bc"
"""The protocol's example of BYTES on the wire."""

ON_THE_WIRE = [
    (Datatype.BOOL, b"\x01\x00", [True, False]),
    (Datatype.UINT8, b"\x01\xff", [1, 255]),
    (Datatype.UINT16, b"\x01\x00\xff\xff", [1, 65535]),
    (Datatype.UINT32, b"\x01\x00\x00\x00\xff\xff\xff\xff", [1, 2**32 - 1]),
    (Datatype.UINT64, b"\x01" + b"\x00" * 7 + b"\xff" * 8, [1, 2**64 - 1]),
    (Datatype.INT8, b"\x01\xff", [1, -1]),
    (Datatype.INT16, b"\x01\x00\xfe\xff", [1, -2]),
    (Datatype.INT32, b"\x01\x00\x00\x00\xfe\xff\xff\xff", [1, -2]),
    (Datatype.INT64, b"\x01" + b"\x00" * 7 + b"\xfe" + b"\xff" * 7, [1, -2]),
    (Datatype.FP16, b"\x00\x3c\x00\xc0", [1.0, -2.0]),
    (Datatype.FP32, b"\x00\x00\x80\x3f\x00\x00\x00\xc0", [1.0, -2.0]),
    (Datatype.FP64, b"\x00" * 6 + b"\xf0\x3f" + b"\x00" * 7 + b"\xc0", [1.0, -2.0]),
]


@pytest.mark.parametrize(("datatype", "wire", "values"), ON_THE_WIRE)
def test_the_wire_form_is_little_endian_and_row_major(
    datatype: Datatype, wire: bytes, values: list[object]
) -> None:
    tensor = Tensor("X", datatype, (2, 1), wire)
    assert tensor.array().tolist() == [[value] for value in values]
    assert bytes(array_tensor("X", datatype, tensor.array()).raw()) == wire
    assert SIZES[datatype] * 2 == len(wire)


def test_every_byte_but_zero_is_true() -> None:
    array = Tensor("X", Datatype.BOOL, (2, 2), b"\x00\x01\x02\xff").array()
    assert array.view(np.uint8).tolist() == [[0, 1], [1, 1]]
    assert Tensor("X", Datatype.BOOL, (0, 2), b"").array().shape == (0, 2)


def test_booleans_that_are_well_formed_are_not_copied() -> None:
    data = np.frombuffer(b"\x00\x01", dtype=np.uint8)
    array = Tensor("X", Datatype.BOOL, (2,), data.data).array()
    assert np.shares_memory(array, data)


def test_bfloat16_shows_its_bits() -> None:
    tensor = Tensor("X", Datatype.BF16, (2,), b"\x80\x3f\x00\xc0")  # 1.0 and -2.0
    assert tensor.array().tolist() == [0x3F80, 0xC000]
    assert bytes(array_tensor("X", Datatype.BF16, tensor.array()).raw()) == b"\x80\x3f\x00\xc0"


def test_bytes_elements_stand_behind_their_lengths() -> None:
    assert join_elements([b"a", b"bc"]) == A_AND_BC
    assert split_elements(A_AND_BC, "X") == (b"a", b"bc")


@pytest.mark.parametrize("data", [A_AND_BC, bytearray(A_AND_BC), (b"a", b"bc")])
def test_both_forms_of_bytes_say_the_same(data: bytes) -> None:
    tensor = Tensor("X", Datatype.BYTES, (1, 2), data)
    assert tensor.elements() == (b"a", b"bc")
    assert tensor.raw() == A_AND_BC
    assert tensor.array().tolist() == [[b"a", b"bc"]]


@pytest.mark.parametrize(
    ("shape", "count"), [((), 1), ((0,), 0), ((3, 0), 0), ((2, 3), 6), ((1,), 1)]
)
def test_the_shape_says_how_many_elements_there_are(shape: tuple[int, ...], count: int) -> None:
    assert Tensor("X", Datatype.INT8, shape, b"").count == count


@pytest.mark.parametrize("datatype", list(Datatype))
def test_a_tensor_without_elements_has_no_bytes(datatype: Datatype) -> None:
    tensor = Tensor("X", datatype, (0, 3), b"")
    assert tensor.array().shape == (0, 3)
    assert bytes(array_tensor("X", datatype, tensor.array()).raw()) == b""


def test_an_array_is_a_view_of_what_came() -> None:
    data = bytearray(8)
    array = Tensor("X", Datatype.INT32, (2,), data).array()
    data[4] = 7
    assert array.tolist() == [0, 7]


def test_a_tensor_is_a_view_of_the_array_it_is_made_of() -> None:
    array = np.zeros(2, dtype=np.float32)
    tensor = array_tensor("X", Datatype.FP32, array)
    array[0] = 1.0
    assert bytes(tensor.raw()) == b"\x00\x00\x80\x3f\x00\x00\x00\x00"


def test_an_array_of_another_layout_is_laid_out_for_the_wire() -> None:
    columns = np.array([[1, 2], [3, 4]], dtype=">i2").T
    tensor = array_tensor("X", Datatype.INT16, columns)
    assert tensor.shape == (2, 2)
    assert bytes(tensor.raw()) == b"\x01\x00\x03\x00\x02\x00\x04\x00"


def test_a_scalar_keeps_its_empty_shape() -> None:
    tensor = array_tensor("X", Datatype.INT8, np.array(5))
    assert (tensor.shape, bytes(tensor.raw())) == ((), b"\x05")


def test_an_array_of_objects_becomes_bytes() -> None:
    array = np.array([[b"a"], ["bc"], ["\u00e9"]], dtype=np.object_)
    tensor = array_tensor("X", Datatype.BYTES, array)
    assert (tensor.shape, tensor.elements()) == ((3, 1), (b"a", b"bc", b"\xc3\xa9"))


def test_texts_become_bytes() -> None:
    tensor = text_tensor("X", ["a", "\u00e9"])
    assert (tensor.datatype, tensor.shape) == (Datatype.BYTES, (2,))
    assert tensor.elements() == (b"a", b"\xc3\xa9")


@pytest.mark.parametrize(
    ("wire", "text"),
    [
        (
            b"\x1e\x00\x00\x00abc",
            "incomplete string data for inference input 'X', expecting string of length 30 but "
            "only 3 bytes available",
        ),
        (
            A_AND_BC + b"\xff\xff\xff\xff",
            "incomplete string data for inference input 'X', expecting string of length "
            "4294967295 but only 0 bytes available",
        ),
    ],
)
def test_a_cut_element_is_refused(wire: bytes, text: str) -> None:
    with pytest.raises(InferenceError) as caught:
        Tensor("X", Datatype.BYTES, (1,), wire).elements()
    assert (caught.value.code, caught.value.message) == (Code.INVALID_ARG, text)


@pytest.mark.parametrize("left", [1, 2, 3])
def test_a_cut_length_is_refused(left: int) -> None:
    with pytest.raises(InferenceError) as caught:
        Tensor("X", Datatype.BYTES, (3,), A_AND_BC + b"\x00" * left).elements()
    assert caught.value.code is Code.INVALID_ARG
    assert "incomplete string length indicator for inference input 'X'" in caught.value.message
    assert f"expecting 4 bytes but only {left} bytes available" in caught.value.message


@pytest.mark.parametrize(
    ("shape", "text"), [((), "[]"), ((1, 16), "[1,16]"), ((1, -1, 16), "[1,-1,16]")]
)
def test_messages_show_shapes_without_blanks(shape: tuple[int, ...], text: str) -> None:
    assert format_shape(shape) == text
