import numpy as np
import pytest

from gateway.config import ModelConfig
from gateway.config.data_type import DataType
from gateway.config.scheduling import Control, ControlInput, ControlKind, SequenceBatching
from gateway.messages import SequenceTag
from gateway.sequences.inputs import Controls
from gateway.tensor import Datatype, Tensor

START = ControlKind.CONTROL_SEQUENCE_START
END = ControlKind.CONTROL_SEQUENCE_END
READY = ControlKind.CONTROL_SEQUENCE_READY
ID = ControlKind.CONTROL_SEQUENCE_CORRID
FLAGS = (
    Control(kind=START, int32_false_true=(-1, 7)),
    Control(kind=END, fp32_false_true=(0.5, 2.5)),
    Control(kind=READY, bool_false_true=(True, False)),
)


def controls(*given: Control, max_batch_size: int = 4) -> Controls:
    named = tuple(
        ControlInput(name=str(number), control=(each,)) for number, each in enumerate(given)
    )
    batching = SequenceBatching(control_input=named)
    return Controls(ModelConfig(max_batch_size=max_batch_size, sequence_batching=batching))


def values(tensors: tuple[Tensor, ...]) -> list[object]:
    return [tensor.array().item() for tensor in tensors]


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        (True, False, [7, 0.5, False]),
        (False, False, [-1, 0.5, False]),
        (False, True, [-1, 2.5, False]),
        (True, True, [7, 2.5, False]),
    ],
)
def test_flags_have_the_values_that_the_config_gives_them(
    start: bool, end: bool, expected: list[object]
) -> None:
    found = controls(*FLAGS).of(SequenceTag(1, start=start, end=end))
    assert values(found) == expected
    assert [each.datatype for each in found] == [Datatype.INT32, Datatype.FP32, Datatype.BOOL]


def test_of_a_slot_without_a_request_nothing_is_true() -> None:
    identity = Control(kind=ID, data_type=DataType.TYPE_UINT64)
    assert values(controls(*FLAGS, identity).of_nobody()) == [-1, 0.5, True, 0]
    text = Control(kind=ID, data_type=DataType.TYPE_STRING)
    assert controls(text).of_nobody()[0].elements() == (b"",)


@pytest.mark.parametrize(("max_batch_size", "shape"), [(0, (1,)), (1, (1, 1)), (8, (1, 1))])
def test_controls_have_one_element(max_batch_size: int, shape: tuple[int, ...]) -> None:
    identity = Control(kind=ID, data_type=DataType.TYPE_INT64)
    found = controls(*FLAGS, identity, max_batch_size=max_batch_size)
    assert {each.shape for each in found.of(SequenceTag(1))} == {shape}
    assert {each.shape for each in found.of_nobody()} == {shape}


@pytest.mark.parametrize(
    ("data_type", "expected"),
    [
        (DataType.TYPE_UINT64, 2**40 + 2**31 + 5),
        (DataType.TYPE_INT64, 2**40 + 2**31 + 5),
        (DataType.TYPE_UINT32, 2**31 + 5),
        (DataType.TYPE_INT32, 5 - 2**31),
    ],
)
def test_of_an_id_that_is_too_long_the_low_bytes_are_told(
    data_type: DataType, expected: int
) -> None:
    found = controls(Control(kind=ID, data_type=data_type)).of(SequenceTag(2**40 + 2**31 + 5))
    assert values(found) == [expected]


def test_a_negative_id_is_told_as_its_bits() -> None:
    found = controls(Control(kind=ID, data_type=DataType.TYPE_UINT64)).of(SequenceTag(-1))
    assert found[0].array().dtype == np.uint64
    assert values(found) == [2**64 - 1]


def test_an_id_may_be_text() -> None:
    found = controls(Control(kind=ID, data_type=DataType.TYPE_STRING)).of(SequenceTag("né"))
    assert found[0].elements() == ("né".encode(),)
    own = controls(Control(kind=ID, data_type=DataType.TYPE_STRING)).of(SequenceTag(3))
    assert own[0].elements() == (b"3",)
