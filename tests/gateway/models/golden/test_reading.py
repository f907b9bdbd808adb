"""Files of golden requests are read strictly, and errors have the path of the member."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gateway.config import ModelConfig, ModelInput, ModelOutput
from gateway.config.data_type import DataType
from gateway.errors import InferenceError
from gateway.generation import INPUTS, OUTPUTS
from gateway.models.golden.reading import read_golden
from gateway.openai_contract import read_request
from tests.builders import TEXT
from tests.gateway.models.golden.files import CAPITAL, write_golden

NUMBERS = ModelConfig(
    name="m",
    max_batch_size=2,
    input=(ModelInput(name="x", data_type=DataType.TYPE_FP32, dims=(2,)),),
    output=(
        ModelOutput(name="y", data_type=DataType.TYPE_FP32, dims=(2,)),
        ModelOutput(name="z", data_type=DataType.TYPE_STRING, dims=(1,)),
        ModelOutput(name="w", data_type=DataType.TYPE_STRING, dims=(1,)),
    ),
)
LLM = ModelConfig(name="llm", input=INPUTS, output=OUTPUTS)
X: dict[str, Any] = {"name": "x", "shape": [1, 2], "data": [1, 2]}
EQUALS: dict[str, Any] = {"outputs": {"y": {"equals": [1.5, 2]}}}


def read(folder: Path, content: Any, config: ModelConfig = NUMBERS, version: int = 1) -> Any:
    write_golden(folder, "g", content)
    found = read_golden(config, folder, version)
    return found[0] if found else None


def test_tensors_are_in_the_json_or_in_an_npz_file(tmp_path: Path) -> None:
    (tmp_path / "golden").mkdir()
    np.savez(tmp_path / "golden" / "g.npz", x=np.array([[3, 4]], np.float32))
    golden = read(tmp_path, {"request": {"inputs": [X]}, "expect": EQUALS, "secs": 3, "why": "so"})
    assert golden.request.inputs[0].array().tolist() == [[1, 2]]
    assert (golden.name, golden.secs, golden.why) == ("g", 3, "so")
    packed = {"name": "x", "data": "npz:x"}
    golden = read(tmp_path, {"request": {"inputs": [packed]}, "expect": EQUALS})
    assert golden.request.inputs[0].array().tolist() == [[3, 4]]
    assert golden.secs == 10


def test_a_chat_is_the_body_of_a_request_to_the_model(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0}
    expect = {"text": {"prefix": "Hello"}, "finish_reason": "stop"}
    golden = read(tmp_path, {"request": {"chat": chat}, "expect": expect}, LLM)
    assert read_request(golden.request) == ("chat/completions", {"model": "llm", **chat})
    assert golden.expected.finish_reasons == ("stop",)


def test_a_text_is_the_input_of_texts(tmp_path: Path) -> None:
    given = {**CAPITAL, "request": {"text": "Capital?", "parameters": {"max_tokens": 4}}}
    golden = read(tmp_path, given, TEXT)
    assert golden.request.inputs[0].elements() == (b"Capital?",)
    assert golden.request.parameters == {"max_tokens": 4}


def test_requests_for_other_versions_are_not_read(tmp_path: Path) -> None:
    given = {**CAPITAL, "versions": [3, 4]}
    assert read(tmp_path, given, TEXT, 4) is not None
    assert read(tmp_path, given, TEXT, 5) is None


def test_hidden_files_are_ignored(tmp_path: Path) -> None:
    (tmp_path / "golden" / "..data").mkdir(parents=True)
    assert read(tmp_path, CAPITAL, TEXT) is not None


def with_expect(expect: Any) -> dict[str, Any]:
    return {"request": {"inputs": [X]}, "expect": expect}


def with_input(**members: Any) -> dict[str, Any]:
    return {"request": {"inputs": [{**X, **members}]}, "expect": EQUALS}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([], "is [], expected an object"),
        ({"request": {}}, "request: has none, expected inputs, text or chat"),
        ({"request": {"inputs": [X], "text": ""}}, "request: has inputs and text, expected"),
        ({"expect": {}}, "request: is missing"),
        ({"request": {"inputs": [X]}}, "expect: is missing"),
        ({**with_expect(EQUALS), "whys": 1}, "whys: is no member, expected one of request, expect"),
        ({**with_expect(EQUALS), "versions": [True]}, "versions: is [true], expected a list of"),
        ({**with_expect(EQUALS), "secs": 0}, "secs: is 0, expected a number from 0.001 to 3600"),
        ({**with_expect(EQUALS), "secs": "1"}, 'secs: is "1", expected a number'),
        (with_input(data=[1]), "request.inputs[0].data: has 1 elements, expected 2 for the shape"),
        (with_input(data="x"), "request.inputs[0].data: is \"x\", expected a list or 'npz:KEY'"),
        (with_input(data=None), "request.inputs[0].data: is null, expected a list or 'npz:KEY'"),
        (with_input(data=["a", 1]), "request.inputs[0].data: "),
        (with_input(shape=[2, -1]), "request.inputs[0].shape: is [2, -1], expected a list of"),
        (with_input(shape=[2, 1]), "request: [request id: <id_unknown>] unexpected shape"),
        (with_input(datatype="FP31"), 'request.inputs[0].datatype: is "FP31", expected'),
        (with_input(datatype="FP64"), "data-type is 'FP64', but model 'm' expects 'FP32'"),
        (with_input(size=1), "request.inputs[0].size: is no member"),
        (
            with_input(name="q"),
            'request.inputs[0].datatype: is "", expected a datatype such as FP32: the model\'s '
            "inputs are x",
        ),
        (
            {"request": {"text": ""}, "expect": EQUALS},
            "request.text: model 'm' has no input",
        ),
        (
            {"request": {"chat": {}}, "expect": EQUALS},
            "request.chat: model 'm' does not serve chat/completions",
        ),
        (
            {"request": {"inputs": [X], "parameters": {"a": []}}, "expect": EQUALS},
            "request.parameters.a: is [], expected a text, a number or a boolean",
        ),
        (with_expect({}), "expect: has no check"),
        (with_expect({"output": {}}), "expect.output: is no member, expected one of outputs, text"),
        (with_expect({"outputs": {"q": {}}}), "expect.outputs.q: is no output of model 'm', expec"),
        (with_expect({"outputs": {"y": {}}}), "expect.outputs.y: has no check, expected one of eq"),
        (
            with_expect({"outputs": {"y": {"matches": ""}}}),
            "expect.outputs.y.matches: is no",
        ),
        (with_expect({"outputs": {"y": {"close": [1, "a"]}}}), "expect.outputs.y.close: "),
        (with_expect({"outputs": {"z": {"close": ["a"]}}}), "expect.outputs.z.close: is no member"),
        (with_expect({"text": {"equals": ""}}), "expect.text: model 'm' has not exactly one text"),
        (with_expect({"finish_reason": 1}), "expect.finish_reason: is 1, expected a text, or a"),
        (with_expect({"error": {"code": "NO"}}), 'expect.error.code: is "NO", expected one of'),
        (
            with_expect({"error": {}, "text": {}}),
            "expect.text: is no member, expected one of er",
        ),
    ],
)
def test_a_file_with_an_error_is_refused_by_the_path_of_the_member(
    tmp_path: Path, content: Any, text: str
) -> None:
    with pytest.raises(InferenceError) as caught:
        read(tmp_path, content)
    assert caught.value.message.startswith("golden request 'g': ")
    assert text in caught.value.message


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"{", "is no JSON: "),
        (b'{"request": 1, "request": 2}', "an object repeats the member 'request'"),
        (b"[" * 100_000, "is no JSON: "),
        (b"\xff", "is no JSON: "),
    ],
    ids=["cut", "repeated", "deep", "no_text"],
)
def test_a_file_that_is_no_json_is_refused(tmp_path: Path, content: bytes, text: str) -> None:
    write_golden(tmp_path, "g", {})
    (tmp_path / "golden" / "g.json").write_bytes(content)
    with pytest.raises(InferenceError) as caught:
        read_golden(NUMBERS, tmp_path, 1)
    assert text in caught.value.message


def test_the_model_and_the_stream_of_a_chat_are_no_members(tmp_path: Path) -> None:
    for name in ("model", "stream"):
        content = {"request": {"chat": {name: True}}, "expect": {"text": {"equals": ""}}}
        with pytest.raises(InferenceError, match=rf"request\.chat\.{name}: is set by the server"):
            read(tmp_path, content, LLM)


def test_other_files_are_refused_by_name(tmp_path: Path) -> None:
    write_golden(tmp_path, "g", CAPITAL)
    (tmp_path / "golden" / "g.jsn").touch()
    with pytest.raises(InferenceError, match=r"has 'g\.jsn', expected NAME\.json and NAME\.npz"):
        read_golden(TEXT, tmp_path, 1)


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "golden").mkdir()
    (tmp_path / "secret.json").write_text("{}")
    (tmp_path / "golden" / "g.json").symlink_to(tmp_path / "secret.json")
    with pytest.raises(InferenceError, match=r"is outside the golden directory of model 'text'"):
        read_golden(TEXT, tmp_path, 1)
