import pytest

from gateway.batches.extra_inputs import sequence_inputs, with_sequence_tensors
from gateway.config import ModelConfig, ModelInput, ModelOutput
from gateway.config.data_type import DataType
from gateway.config.scheduling import Control, ControlInput, ControlKind, SequenceBatching, State

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
