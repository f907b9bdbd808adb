"""Inputs that describe its batch to a model."""

import pytest

from gateway.batches.stacking import (
    VALUES,
    batch_tensors,
    sequence_inputs,
    with_sequence_tensors,
)
from gateway.config import BatchInput, BatchInputKind, ModelConfig, ModelInput, ModelOutput
from gateway.config.data_type import DataType
from gateway.config.scheduling import Control, ControlInput, ControlKind, SequenceBatching, State
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


START = ControlKind.CONTROL_SEQUENCE_START
ID = ControlKind.CONTROL_SEQUENCE_CORRID
X = ModelInput(name="x", data_type=DataType.TYPE_FP32, dims=(4,))
Y = ModelOutput(name="y", data_type=DataType.TYPE_FP32, dims=(4,))
KEPT = State(input_name="in", output_name="out", data_type=DataType.TYPE_INT8, dims=(2, -1))
CONFIG = ModelConfig(name="m", input=(X,), output=(Y,))


def with_batching(config: ModelConfig, **fields: object) -> ModelConfig:
    batching = SequenceBatching(**fields)  # type: ignore[arg-type]  # by its field names
    return ModelConfig(
        name="m", input=config.input, output=config.output, sequence_batching=batching
    )


def test_a_config_without_sequences_stays_as_it_is() -> None:
    assert with_sequence_tensors(CONFIG) is CONFIG


def test_controls_and_states_are_tensors_of_the_model() -> None:
    start = Control(kind=START, bool_false_true=(False, True))
    config = with_batching(
        CONFIG, control_input=(ControlInput(name="s", control=(start,)),), state=(KEPT,)
    )
    found = with_sequence_tensors(config)
    assert [(each.name, each.data_type, each.dims) for each in found.input] == [
        ("x", DataType.TYPE_FP32, (4,)),
        ("s", DataType.TYPE_BOOL, (1,)),
        ("in", DataType.TYPE_INT8, (2, -1)),
    ]
    assert [(each.name, each.data_type, each.dims) for each in found.output] == [
        ("y", DataType.TYPE_FP32, (4,)),
        ("out", DataType.TYPE_INT8, (2, -1)),
    ]


def test_a_state_that_clients_see_is_an_output_once() -> None:
    shown = ModelConfig(name="m", output=(Y, ModelOutput(name="out")))
    found = with_sequence_tensors(with_batching(shown, state=(KEPT,)))
    assert [each.name for each in found.output] == ["y", "out"]


@pytest.mark.parametrize(
    ("control", "data_type"),
    [
        (Control(kind=START, int32_false_true=(0, 1)), DataType.TYPE_INT32),
        (Control(kind=START, fp32_false_true=(0.0, 1.0)), DataType.TYPE_FP32),
        (Control(kind=START, bool_false_true=(False, True)), DataType.TYPE_BOOL),
        (Control(kind=ID, data_type=DataType.TYPE_STRING), DataType.TYPE_STRING),
    ],
)
def test_the_encoding_of_a_control_gives_its_data_type(
    control: Control, data_type: DataType
) -> None:
    batching = SequenceBatching(control_input=(ControlInput(name="c", control=(control,)),))
    assert [each.data_type for each in sequence_inputs(batching)] == [data_type]
