"""The gateway and Triton are given the same Python models."""

import json
from pathlib import Path

import pytest

from loadtests.support.servers import LoadTestFailed
from loadtests.support.triton import LONGEST, SHORTEST, of_gateway, of_triton, write_texts

PROGRAMS = ("add_sub", "repeat", "negate", "business", "plus_one", "times_two")


@pytest.fixture
def onnx(tmp_path: Path) -> Path:
    (tmp_path / "stored").mkdir()
    (tmp_path / "stored" / "model.onnx").touch()
    return tmp_path / "stored" / "model.onnx"


def test_both_have_the_same_programs(tmp_path: Path, onnx: Path) -> None:
    pytest.importorskip("onnxruntime")
    ours, theirs = of_gateway(tmp_path / "ours"), of_triton(tmp_path / "theirs", onnx, 2)
    assert {each.name for each in ours.iterdir()} == {each.name for each in theirs.iterdir()}
    for name in (*PROGRAMS, "tokenizer", "pooling"):
        mine = (ours / name / "1" / "model.py").read_text()
        file = "model.py" if name in PROGRAMS else "own.py"
        assert (theirs / name / "1" / file).read_text() == mine


def test_tritons_encoder_answers_hidden_states_and_its_tokenizer_has_a_folder(
    tmp_path: Path, onnx: Path
) -> None:
    pytest.importorskip("onnxruntime")
    theirs = of_triton(tmp_path / "theirs", onnx, 2)
    encoder = (theirs / "minilm" / "config.pbtxt").read_text()
    assert 'name: "last_hidden_state" data_type: TYPE_FP32 dims: [ -1, 384 ]' in encoder
    assert f'"{onnx.parent}"' in (theirs / "tokenizer" / "config.pbtxt").read_text()


def test_a_missing_encoder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LoadTestFailed, match="does not exist"):
        of_triton(tmp_path / "theirs", tmp_path / "nowhere.onnx", 2)


def test_texts_have_the_lengths_of_the_encoders_load_test(tmp_path: Path) -> None:
    write_texts(tmp_path / "texts.json", 100)
    data = json.loads((tmp_path / "texts.json").read_text())["data"]
    lengths = [len(each["text"]["content"][0].split()) for each in data]
    assert len(lengths) == 100
    assert SHORTEST <= min(lengths) < max(lengths) <= LONGEST
