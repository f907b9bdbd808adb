"""What a model is told about its batch."""

import pytest

from gateway.batches.extra_inputs import VALUES, batch_tensors
from gateway.config import BatchInput, BatchInputKind
from gateway.config.data_type import DataType
from gateway.tensor import Datatype


def test_every_kind_has_values() -> None:
    assert VALUES.keys() == set(BatchInputKind)


@pytest.mark.parametrize("data_type", [DataType.TYPE_INT32, DataType.TYPE_FP32])
def test_every_target_gets_the_values_in_the_datatype_of_the_config(data_type: DataType) -> None:
    told = BatchInput(target_name=("a", "b"), data_type=data_type, source_input=("x",))
    found = batch_tensors(told, [(1, 3), (2, 2)])
    assert [each.name for each in found] == ["a", "b"]
    assert {each.datatype for each in found} == {Datatype(data_type.removeprefix("TYPE_"))}
    assert [each.array().tolist() for each in found] == [[3, 4]] * 2


def test_an_item_without_dims_has_an_empty_shape() -> None:
    told = BatchInput(
        kind=BatchInputKind.BATCH_ITEM_SHAPE, target_name=("a",), data_type=DataType.TYPE_INT32
    )
    assert batch_tensors(told, [(2,), (1,)])[0].shape == (3, 0)
