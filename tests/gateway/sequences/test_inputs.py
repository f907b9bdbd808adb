from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gateway.config import ModelConfig, ModelOutput, TensorReshape
from gateway.config.data_type import DataType
from gateway.config.scheduling import (
    Control,
    ControlInput,
    ControlKind,
    InitialState,
    SequenceBatching,
    State,
)
from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest, InferResponse, RequestedOutput, SequenceTag
from gateway.sequences.inputs import ControlInputs, ImplicitStates, read_initial_states, zeros
from gateway.tensor import Datatype, Tensor, array_tensor

START = ControlKind.CONTROL_SEQUENCE_START
END = ControlKind.CONTROL_SEQUENCE_END
READY = ControlKind.CONTROL_SEQUENCE_READY
ID = ControlKind.CONTROL_SEQUENCE_CORRID
FLAGS = (
    Control(kind=START, int32_false_true=(-1, 7)),
    Control(kind=END, fp32_false_true=(0.5, 2.5)),
    Control(kind=READY, bool_false_true=(True, False)),
)


def controls(*given: Control, max_batch_size: int = 4) -> ControlInputs:
    named = tuple(
        ControlInput(name=str(number), control=(each,)) for number, each in enumerate(given)
    )
    batching = SequenceBatching(control_input=named)
    return ControlInputs(ModelConfig(max_batch_size=max_batch_size, sequence_batching=batching))


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
def test_flags_have_the_values_of_the_config(
    start: bool, end: bool, expected: list[object]
) -> None:
    found = controls(*FLAGS).of(SequenceTag(1, start=start, end=end))
    assert values(found) == expected
    assert [each.datatype for each in found] == [Datatype.INT32, Datatype.FP32, Datatype.BOOL]


def test_of_a_slot_without_a_request_nothing_is_true() -> None:
    identity = Control(kind=ID, data_type=DataType.TYPE_UINT64)
    assert values(controls(*FLAGS, identity).of_empty_slot()) == [-1, 0.5, True, 0]
    text = Control(kind=ID, data_type=DataType.TYPE_STRING)
    assert controls(text).of_empty_slot()[0].elements() == (b"",)


@pytest.mark.parametrize(("max_batch_size", "shape"), [(0, (1,)), (1, (1, 1)), (8, (1, 1))])
def test_controls_have_one_element(max_batch_size: int, shape: tuple[int, ...]) -> None:
    identity = Control(kind=ID, data_type=DataType.TYPE_INT64)
    found = controls(*FLAGS, identity, max_batch_size=max_batch_size)
    assert {each.shape for each in found.of(SequenceTag(1))} == {shape}
    assert {each.shape for each in found.of_empty_slot()} == {shape}


@pytest.mark.parametrize(
    ("data_type", "expected"),
    [
        (DataType.TYPE_UINT64, 2**40 + 2**31 + 5),
        (DataType.TYPE_INT64, 2**40 + 2**31 + 5),
        (DataType.TYPE_UINT32, 2**31 + 5),
        (DataType.TYPE_INT32, 5 - 2**31),
    ],
)
def test_an_id_that_is_too_long_is_sent_as_its_low_bytes(
    data_type: DataType, expected: int
) -> None:
    found = controls(Control(kind=ID, data_type=data_type)).of(SequenceTag(2**40 + 2**31 + 5))
    assert values(found) == [expected]


def test_a_negative_id_is_sent_as_its_bits() -> None:
    found = controls(Control(kind=ID, data_type=DataType.TYPE_UINT64)).of(SequenceTag(-1))
    assert found[0].array().dtype == np.uint64
    assert values(found) == [2**64 - 1]


def test_an_id_may_be_text() -> None:
    found = controls(Control(kind=ID, data_type=DataType.TYPE_STRING)).of(SequenceTag("né"))
    assert found[0].elements() == ("né".encode(),)
    own = controls(Control(kind=ID, data_type=DataType.TYPE_STRING)).of(SequenceTag(3))
    assert own[0].elements() == (b"3",)


SUM = State(input_name="in", output_name="out", data_type=DataType.TYPE_INT32, dims=(2,))
TEXT = State(input_name="was", output_name="is", data_type=DataType.TYPE_STRING, dims=(2, -1))


def states(
    *given: State, batched: bool = True, outputs: tuple[str, ...] = ("y",)
) -> ImplicitStates:
    return ImplicitStates(
        ModelConfig(
            max_batch_size=4 if batched else 0,
            output=tuple(ModelOutput(name=name) for name in outputs),
            sequence_batching=SequenceBatching(state=given),
        ),
        {},
    )


def number(name: str, *values: int) -> Tensor:
    return array_tensor(name, Datatype.INT32, np.array([values], "<i4"))


def asking(*names: str) -> InferRequest:
    return InferRequest(model="m", outputs=tuple(RequestedOutput(name) for name in names))


def names(response: InferResponse) -> list[str]:
    return [each.name for each in response.outputs]


def test_without_a_value_a_state_begins_with_zeros() -> None:
    found = states(SUM, TEXT).initial
    assert found["in"].array().tolist() == [[0, 0]]
    assert (found["was"].shape, found["was"].elements()) == ((1, 2, 1), (b"", b""))
    assert states(SUM, batched=False).initial["in"].shape == (2,)


@pytest.mark.parametrize(
    ("datatype", "size"), [(Datatype.BOOL, 6), (Datatype.FP64, 48), (Datatype.BF16, 12)]
)
def test_zeros_have_the_size_of_their_shape(datatype: Datatype, size: int) -> None:
    assert zeros("x", datatype, (2, 3)).raw() == bytes(size)


def test_values_of_the_config_take_precedence() -> None:
    config = ModelConfig(sequence_batching=SequenceBatching(state=(SUM,)))
    given = number("in", 5, 6)
    assert ImplicitStates(config, {"in": given}).initial == {"in": given}


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ((), ["y", "z", "out", "is"]),
        (("y",), ["y", "out", "is"]),
        (("y", "is"), ["y", "is", "out"]),
    ],
)
def test_the_model_is_asked_for_its_states_by_name(
    asked: tuple[str, ...], found: list[str]
) -> None:
    every = states(SUM, TEXT, outputs=("y", "z")).asked(asking(*asked))
    assert [each.name for each in every] == found


def test_without_states_the_requested_outputs_are_those_of_the_client() -> None:
    assert [states().asked(asking(*names)) for names in ((), ("y",))] == [
        (),
        (RequestedOutput("y"),),
    ]


@pytest.mark.parametrize(
    ("outputs", "asked", "seen"),
    [
        (("y",), (), ["y"]),
        (("y",), ("y",), ["y"]),
        (("y", "out"), (), ["y", "out"]),
        (("y", "out"), ("y",), ["y"]),
        (("y", "out"), ("out", "y"), ["y", "out"]),
    ],
)
def test_clients_see_the_states_that_are_outputs_if_they_ask(
    outputs: tuple[str, ...], asked: tuple[str, ...], seen: list[str]
) -> None:
    response = InferResponse(outputs=(number("y", 1, 2), number("out", 3, 4)), final=True)
    shown, found = states(SUM, outputs=outputs).take(response, asking(*asked), shared=False)
    assert names(shown) == seen
    assert shown.final
    assert found["in"].array().tolist() == [[3, 4]]


def test_a_response_without_states_is_unchanged() -> None:
    response = InferResponse(outputs=(number("y", 1),))
    assert states(SUM).take(response, asking(), shared=True) == (response, {})


def test_the_state_of_a_shared_execution_does_not_keep_the_others() -> None:
    batch = bytearray(np.arange(8, dtype="<i4").tobytes())
    view = Tensor("out", Datatype.INT32, (1, 2), memoryview(batch)[8:16])
    response = InferResponse(outputs=(view,))
    _, alone = states(SUM).take(response, asking(), shared=False)
    _, shared = states(SUM).take(response, asking(), shared=True)
    batch[8:16] = bytes(8)
    assert alone["in"].array().tolist() == [[0, 0]]
    assert shared["in"].array().tolist() == [[2, 3]]


def test_only_shapes_that_may_differ_matter() -> None:
    found = states(SUM, TEXT)
    kept = {"in": number("in", 1, 2), "was": zeros("was", Datatype.BYTES, (1, 2, 3))}
    assert found.shapes(kept) == ((1, 2, 3),)
    assert states(SUM).shapes(kept) == ()


def test_a_state_that_clients_see_reshaped_keeps_the_shape_of_its_model() -> None:
    shown = ModelOutput(name="out", dims=(2,), reshape=TensorReshape(shape=(2, 1)))
    state = replace(SUM, dims=(2, 1))
    config = ModelConfig(
        max_batch_size=4, output=(shown,), sequence_batching=SequenceBatching(state=(state,))
    )
    given = InferResponse(outputs=(number("out", 3, 4),))
    response, found = ImplicitStates(config, {}).take(given, asking(), shared=False)
    assert response.outputs[0].shape == (1, 2)
    assert found["in"].shape == (1, 2, 1)


INT32, STRING = DataType.TYPE_INT32, DataType.TYPE_STRING


def model(
    file: str | None = None, data_type: DataType = INT32, dims: tuple[int, ...] = (2,)
) -> ModelConfig:
    given = InitialState(
        name="i", data_type=data_type, dims=dims, data_file=file, zero_data=None if file else True
    )
    state = State(
        input_name="in", output_name="out", data_type=data_type, dims=dims, initial_state=(given,)
    )
    other = State(input_name="other", output_name="o", data_type=INT32, dims=(1,))
    return ModelConfig(
        name="m", max_batch_size=4, sequence_batching=SequenceBatching(state=(state, other))
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    inside = tmp_path / "m" / "initial_state"
    inside.mkdir(parents=True)
    (inside / "numbers").write_bytes(bytes(range(12)))
    (inside / "texts").write_bytes(b"\x01\x00\x00\x00a\x02\x00\x00\x00bc")
    (tmp_path / "m" / "config.pbtxt").write_text("secret")
    return tmp_path / "m"


def refusal(config: ModelConfig, folder: Path) -> tuple[Code, str]:
    with pytest.raises(InferenceError) as caught:
        read_initial_states(config, folder)
    assert str(folder) not in caught.value.message
    return caught.value.code, caught.value.message


def test_only_states_with_a_value_have_one(folder: Path) -> None:
    found = read_initial_states(model(), folder)
    assert list(found) == ["in"]
    assert (found["in"].shape, found["in"].raw()) == ((1, 2), bytes(8))


def test_the_needed_part_of_a_file_is_read(folder: Path) -> None:
    found = read_initial_states(model("numbers"), folder)["in"]
    assert (found.shape, found.raw()) == ((1, 2), bytes(range(8)))


def test_strings_stand_behind_their_lengths(folder: Path) -> None:
    found = read_initial_states(model("texts", STRING), folder)["in"]
    assert found.elements() == (b"a", b"bc")


@pytest.mark.parametrize(
    ("config", "code", "message"),
    [
        (
            model("numbers", dims=(4,)),
            Code.INVALID_ARG,
            "initial_state setting expects 16 bytes, but the data provided from numbersonly has "
            "12 bytes.",
        ),
        (
            model("texts", STRING, dims=(3,)),
            Code.INVALID_ARG,
            "initial_state setting expects 3 string elements, but the data provided from texts "
            "has 2",
        ),
        (
            model("none"),
            Code.INTERNAL,
            "failed to open text file for read m/initial_state/none: No such file or directory",
        ),
        (
            model("../config.pbtxt"),
            Code.INVALID_ARG,
            "initial state file '../config.pbtxt' is outside the initial_state directory of model "
            "'m'",
        ),
        (
            model("."),
            Code.INTERNAL,
            "failed to open text file for read m/initial_state/.: Not a regular file",
        ),
        (
            model("a\0b"),
            Code.INTERNAL,
            "failed to open text file for read m/initial_state/a\0b: Invalid name",
        ),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(
    folder: Path, config: ModelConfig, code: Code, message: str
) -> None:
    assert refusal(config, folder) == (code, message)


def test_a_file_that_is_cut_inside_a_string_is_refused(folder: Path) -> None:
    (folder / "initial_state" / "cut").write_bytes(b"\x09\x00\x00\x00a")
    code, message = refusal(model("cut", STRING, dims=(1,)), folder)
    assert (code, "incomplete string data" in message) == (Code.INVALID_ARG, True)
