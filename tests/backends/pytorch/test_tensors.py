"""Tensors become PyTorch's over the same memory, and are returned over it."""

from typing import Any

import numpy as np
import pytest
import torch

from backends.pytorch.signature import DATATYPES, TensorSlot
from backends.pytorch.tensors import ALIGNED_BYTES, from_torch, on_device, to_torch
from gateway.errors import Code, InferenceError
from gateway.tensor import SIZES, Buffer, Datatype, Tensor, text_tensor

CPU = torch.device("cpu")
READ, WRITTEN = TensorSlot(names=("x",)), TensorSlot(names=("x",), written=True)


def address(data: Buffer) -> int:
    found: int = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
    return found


def given(value: Any) -> torch.Tensor:
    assert isinstance(value, torch.Tensor)
    return value


@pytest.mark.parametrize(("dtype", "datatype"), DATATYPES.items())
def test_every_datatype_shares_read_only_memory_in_and_out(
    dtype: torch.dtype, datatype: Datatype
) -> None:
    body = bytes(range(6)) * SIZES[datatype] if datatype is not Datatype.BOOL else bytes([0, 1] * 3)
    value = given(to_torch(Tensor("x", datatype, (2, 3), body), READ, CPU))
    assert (value.dtype, tuple(value.shape), value.data_ptr()) == (dtype, (2, 3), address(body))
    back = from_torch("y", datatype, value)
    assert (back.name, back.datatype, back.shape) == ("y", datatype, (2, 3))
    assert bytes(back.raw()) == body
    assert address(back.raw()) == address(body)


def test_the_memory_stays_while_pytorch_has_it() -> None:
    body = bytearray(np.arange(4, dtype="<f4").tobytes())
    value = given(to_torch(Tensor("x", Datatype.FP32, (4,), memoryview(body)), READ, CPU))
    with pytest.raises(BufferError):
        body.clear()
    assert value.tolist() == [0, 1, 2, 3]


def test_booleans_are_normalised_to_zero_and_one() -> None:
    value = given(to_torch(Tensor("x", Datatype.BOOL, (4,), bytes([0, 1, 2, 255])), READ, CPU))
    assert value.view(torch.uint8).tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize("shape", [(0,), (0, 16), (3, 0)])
def test_tensors_without_elements_pass(shape: tuple[int, ...]) -> None:
    for datatype in (Datatype.FP32, Datatype.BOOL):
        value = given(to_torch(Tensor("x", datatype, shape, b""), READ, CPU))
        assert from_torch("x", datatype, value).shape == shape


def test_an_input_that_the_model_writes_to_is_copied() -> None:
    body = np.zeros(4, dtype="<f4").tobytes()
    given(to_torch(Tensor("x", Datatype.FP32, (4,), body), WRITTEN, CPU)).add_(1)
    assert body == bytes(16)


def test_memory_that_is_not_aligned_is_copied() -> None:
    numbers = np.arange(4, dtype="<f4")
    body = memoryview(b"?" + numbers.tobytes() + b"???")
    views = [body[offset : offset + 16] for offset in (1, 2, 3)]
    odd = [view for view in views if address(view) % 4]
    assert odd
    for view in odd:
        value = given(to_torch(Tensor("x", Datatype.FP32, (4,), view), READ, CPU))
        assert value.data_ptr() % 4 == 0
        assert bytes(from_torch("x", Datatype.FP32, value).raw()) == bytes(view)


def test_bytes_are_lists_of_text_both_ways() -> None:
    tensor = text_tensor("x", ["a", "", "ä€"])
    value = to_torch(tensor, READ, CPU)
    assert value == ["a", "", "ä€"]
    assert from_torch("x", Datatype.BYTES, value) == tensor


def test_bytes_that_are_no_text_are_refused() -> None:
    with pytest.raises(InferenceError, match="'x' holds bytes that are no UTF-8"):
        to_torch(Tensor("x", Datatype.BYTES, (1,), (b"\xff",)), READ, CPU)


def test_an_output_that_is_not_contiguous_is_laid_out() -> None:
    value = torch.arange(6, dtype=torch.float32).reshape(2, 3).T
    found = from_torch("y", Datatype.FP32, value)
    assert found.shape == (3, 2)
    assert found.array().tolist() == [[0, 3], [1, 4], [2, 5]]
    halves = from_torch("y", Datatype.BF16, value.bfloat16())
    assert halves.shape == (3, 2)
    assert bytes(halves.raw()) == bytes(value.bfloat16().contiguous().view(torch.uint8).numpy())


def test_an_output_of_the_models_own_memory_is_copied() -> None:
    value = torch.zeros(2)
    found = from_torch("y", Datatype.FP32, value, copied=True)
    value.add_(1)
    assert found.array().tolist() == [0, 0]


@pytest.mark.parametrize(
    ("datatype", "value", "text"),
    [
        (
            Datatype.FP32,
            torch.zeros(1, dtype=torch.int64),
            "configuration expects datatype TYPE_FP32 for output 'y', model provides TYPE_INT64",
        ),
        (Datatype.FP32, ["text"], "TYPE_FP32 for output 'y', model provides TYPE_STRING"),
        (Datatype.BYTES, torch.zeros(1), "TYPE_STRING for output 'y', model provides TYPE_FP32"),
        (Datatype.FP32, torch.zeros(1, dtype=torch.complex64), "provides TYPE_torch.complex64"),
        (Datatype.FP32, torch.tensor(1.0), "output 'y' is a scalar which is not supported."),
        (Datatype.FP32, 1.0, "output 'y' must be of type Tensor or List[str]."),
        (Datatype.FP32, [torch.zeros(1)], "output 'y' must be of type Tensor or List[str]."),
        (Datatype.FP32, torch.eye(2).to_sparse(), "output 'y' is no tensor of plain numbers"),
    ],
)
def test_an_output_that_the_config_does_not_announce_is_refused(
    datatype: Datatype, value: Any, text: str
) -> None:
    with pytest.raises(InferenceError) as refused:
        from_torch("y", datatype, value)
    assert refused.value.code in (Code.INVALID_ARG, Code.INTERNAL)
    assert text in refused.value.message


# On a GPU: the bytes that a client has there, here memory of the host.


def on_gpu(body: bytes, offset: int = 0) -> torch.Tensor:
    room = torch.zeros(len(body) + ALIGNED_BYTES + offset, dtype=torch.uint8)
    start = -room.data_ptr() % ALIGNED_BYTES + offset
    room[start : start + len(body)] = torch.frombuffer(bytearray(body), dtype=torch.uint8)
    return room[start : start + len(body)]


@pytest.mark.parametrize(("dtype", "datatype"), DATATYPES.items())
@pytest.mark.parametrize("offset", [0, 1, 8])
def test_every_datatype_is_read_from_bytes_on_a_gpu(
    dtype: torch.dtype, datatype: Datatype, offset: int
) -> None:
    body = bytes(range(6)) * SIZES[datatype]
    content = on_gpu(body, offset)
    value = on_device(Tensor("x", datatype, (2, 3), b""), content, written=False)
    assert (value.dtype, tuple(value.shape)) == (dtype, (2, 3))
    if datatype is Datatype.BOOL:
        assert value.view(torch.uint8).flatten().tolist() == [0, 1, 1, 1, 1, 1]
    else:
        assert bytes(value.flatten().view(torch.uint8).tolist()) == body
        assert (value.data_ptr() == content.data_ptr()) == (offset == 0)
    assert value.data_ptr() % ALIGNED_BYTES == 0 or datatype is Datatype.BOOL


def test_written_inputs_are_copied_on_the_gpu() -> None:
    content = on_gpu(bytes(8))
    value = on_device(Tensor("x", Datatype.FP32, (2,), b""), content, written=True)
    value += 1
    assert content.tolist() == [0] * 8
