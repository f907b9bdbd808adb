"""Tensors: names, types, memory that is shared, and DLPack both ways."""

import gc
from typing import Any

import numpy as np
import pytest
import torch

from backends.python.worker.sluice_worker.errors import TritonModelException
from backends.python.worker.sluice_worker.tensor import Tensor

NUMERIC = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64"),
)


def text(call: Any, *arguments: Any) -> str:
    with pytest.raises(TritonModelException) as caught:
        call(*arguments)
    return str(caught.value)


@pytest.mark.parametrize(("number", "dtype"), list(enumerate(NUMERIC, 1)))
def test_numbers_survive_the_wire_in_both_directions(number: int, dtype: str) -> None:
    array = np.array([[0, 1, 1], [1, 0, 1]], dtype)
    tensor = Tensor("x", array)
    assert (tensor.name(), tensor.shape(), tensor.triton_dtype()) == ("x", [2, 3], number)
    assert tensor.is_cpu()
    assert tensor.as_numpy() is array
    datatype, shape, data = tensor.wire()
    back = Tensor.received("x", datatype, list(shape), data)
    np.testing.assert_array_equal(back.as_numpy(), array)
    assert back.as_numpy().dtype == array.dtype


def test_texts_become_bytes() -> None:
    array = np.array([["é", 3], [b"\xff", None]], dtype=object)
    datatype, shape, data = Tensor("x", array).wire()
    assert (datatype, list(shape)) == ("BYTES", [2, 2])
    back = Tensor.received("x", datatype, list(shape), data)
    assert back.as_numpy().tolist() == [["é".encode(), b"3"], [b"\xff", b"None"]]
    assert back.triton_dtype() == 13


def test_byte_strings_and_empty_arrays() -> None:
    assert bytes(Tensor("x", np.array([b"ab"])).wire()[2]) == b"\2\0\0\0ab"
    empty = Tensor("x", np.array([], dtype=object))
    assert (empty.shape(), bytes(empty.wire()[2])) == ([0], b"")
    assert Tensor.received("x", "BYTES", [0], b"").as_numpy().shape == (0,)
    assert Tensor("x", np.zeros((0, 3))).wire() == ("FP64", (0, 3), b"")


def test_an_array_that_is_not_contiguous_is_copied_and_scalars_keep_their_shape() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert bytes(Tensor("x", array.T).wire()[2]) == array.T.tobytes()
    large = np.arange(20_000, dtype=np.float32).reshape(100, 200)
    assert bytes(Tensor("x", large.T).wire()[2]) == large.T.tobytes()
    assert Tensor("x", np.array(3, np.float32)).wire()[1] == ()


def test_received_memory_may_be_changed() -> None:
    tensor = Tensor.received("x", "FP32", [2], np.array([1, 2], np.float32).tobytes())
    tensor.as_numpy()[0] = 9
    assert np.frombuffer(tensor.wire()[2], np.float32).tolist() == [9, 2]


def test_writable_memory_is_not_copied() -> None:
    memory = bytearray(8)
    tensor = Tensor.received("x", "FP32", [2], memoryview(memory))
    tensor.as_numpy()[:] = 1
    assert memory == np.ones(2, np.float32).tobytes()


@pytest.mark.parametrize("array", [np.zeros(1, np.complex64), np.array(["x"]), np.zeros(1, ">f4")])
def test_types_that_no_datatype_carries_are_refused(array: Any) -> None:
    assert text(Tensor, "x", array) == "NumPy dtype is not supported."


def test_names_and_arrays_are_checked() -> None:
    assert text(Tensor, "", np.zeros(1)) == "Tensor name cannot be an empty string."
    assert text(Tensor.from_dlpack, "", np.zeros(1)) == "Tensor name cannot be an empty string."
    with pytest.raises(TypeError):
        Tensor("x", [1, 2])
    with pytest.raises(TypeError):
        Tensor(None, np.zeros(1))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", NUMERIC)
def test_torch_and_a_tensor_share_memory_both_ways(dtype: str) -> None:
    source = torch.zeros((2, 3), dtype=getattr(torch, dtype))
    tensor = Tensor.from_dlpack("x", source)
    tensor.as_numpy()[1, 2] = 1
    assert source[1, 2] == 1
    back = torch.from_dlpack(tensor)
    assert (back.dtype, tuple(back.shape)) == (source.dtype, (2, 3))
    back[0, 0] = 1
    assert source[0, 0] == 1
    assert tensor.__dlpack_device__() == (1, 0)


def test_a_capsule_can_be_taken_once() -> None:
    capsule = torch.utils.dlpack.to_dlpack(torch.arange(3))
    assert Tensor.from_dlpack("x", capsule).as_numpy().tolist() == [0, 1, 2]
    assert text(Tensor.from_dlpack, "x", capsule).startswith("Provided tensor is not supported.")


def test_memory_lives_until_its_last_view() -> None:
    tensor = Tensor.from_dlpack("x", torch.full((100_000,), 7, dtype=torch.int32))
    array = tensor.as_numpy()
    del tensor
    gc.collect()
    assert int(array.sum()) == 700_000
    back = torch.from_dlpack(Tensor("y", np.full(100_000, 3, np.int64)))
    gc.collect()
    assert int(back.sum()) == 300_000


def test_bfloat16_has_dlpack_alone() -> None:
    source = torch.tensor([1.5, -2], dtype=torch.bfloat16)
    tensor = Tensor.from_dlpack("x", source)
    assert (tensor.triton_dtype(), tensor.wire()[:2]) == (14, ("BF16", [2]))
    assert text(tensor.as_numpy) == (
        "Tensor dtype is BF16 and cannot be converted to NumPy. Use to_dlpack() and from_dlpack() "
        "instead."
    )
    received = Tensor.received("x", "BF16", [2], bytes(tensor.wire()[2]))
    back = torch.utils.dlpack.from_dlpack(received.to_dlpack())
    assert back.tolist() == [1.5, -2]
    assert back.dtype is torch.bfloat16


def test_tensors_that_dlpack_cannot_carry_are_refused() -> None:
    texts = Tensor("x", np.array(["a"], dtype=object))
    assert text(texts.to_dlpack) == "DLPack does not have support for string tensors."
    part = torch.zeros((4, 4))[:, :2]
    expected = (
        "DLPack tensor is not contiguous. Only contiguous DLPack tensors that are stored in "
        "C-Order are supported."
    )
    assert text(Tensor.from_dlpack, "x", part) == expected
    assert text(Tensor.from_dlpack, "x", np.zeros((4, 4))[:, :2]) == expected
    assert text(Tensor.from_dlpack, "x", 5) == (
        "Provided tensor is not supported. Tensor must be a DLPack capsule or have `__dlpack__` "
        "and `__dlpack_device__` attributes"
    )
    assert "which is not supported" in text(
        Tensor.from_dlpack, "x", torch.zeros(2, dtype=torch.complex64)
    )


def test_numpy_reads_what_may_not_be_changed() -> None:
    tensor = Tensor("x", np.frombuffer(b"\1\2\3", np.uint8))
    assert np.from_dlpack(tensor).tolist() == [1, 2, 3]
