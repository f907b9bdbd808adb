from pathlib import Path

import pytest

from gateway.config import ModelConfig
from gateway.config.data_type import DataType
from gateway.config.scheduling import InitialState, SequenceBatching, State
from gateway.errors import Code, InferenceError
from gateway.sequences.inputs import read_initial_states

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


def test_of_a_file_what_is_needed_is_read(folder: Path) -> None:
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
