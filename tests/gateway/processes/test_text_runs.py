"""Runs of responses with one text each."""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest

from gateway.errors import Code, InferenceError
from gateway.messages import InferResponse, Phases, Usage
from gateway.processes.text_runs import RUN_BYTES, read_run, take_run
from gateway.tensor import Datatype, Tensor
from tests.builders import FLAG, text_response, text_tensor


def read(responses: deque[InferResponse]) -> Sequence[InferResponse]:
    """The leading run."""
    payload = take_run(responses)
    assert payload is not None
    return read_run(payload).responses()


def test_texts_of_an_output_travel_together_with_their_tokens() -> None:
    sent = [
        text_response("a", tokens=2),
        text_response(""),
        text_response("\x00\U0001f600", tokens=0),
    ]
    responses = deque(sent)
    assert read(responses) == sent
    assert not responses


@pytest.mark.parametrize("shape", [(1,), (1, 1), ()])
def test_texts_in_the_wire_form_and_of_any_dims_of_one_travel_so(shape: tuple[int, ...]) -> None:
    output = Tensor("text_output", Datatype.BYTES, shape, b"\x01\x00\x00\x00x")
    (found,) = read(deque([InferResponse(outputs=(output,))]))
    assert found.outputs == (replace(output, data=(b"x",)),)


OTHERS = {
    "final": text_response("x", final=True),
    "without an output": FLAG,
    "of another output": InferResponse(outputs=(text_tensor("other", ["x"]),)),
    "of two outputs": replace(
        text_response("x"), outputs=(text_tensor("text_output", ["x"]), text_tensor("b", ["y"]))
    ),
    "of two elements": InferResponse(outputs=(text_tensor("text_output", ["x", "y"]),)),
    "of other dims": InferResponse(
        outputs=(Tensor("text_output", Datatype.BYTES, (1, 1), (b"x",)),)
    ),
    "of numbers": InferResponse(outputs=(Tensor("text_output", Datatype.FP32, (1,), bytes(4)),)),
    "with a parameter": replace(text_response("x"), parameters={"key": 1}),
    "with phases": replace(text_response("x"), phases=Phases(1, 2, 3)),
    "with tokens of the prompt": replace(text_response("x"), usage=Usage(prompt_tokens=1)),
    "with the reason of its end": replace(text_response("x"), usage=Usage(0, 1, "stop")),
    "with an error": InferResponse(error=InferenceError(Code.INTERNAL, "no")),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_a_response_with_more_than_a_text_ends_a_run(other: InferResponse) -> None:
    text = text_response("text", tokens=1)
    responses = deque([text, other])
    assert read(responses) == [text]
    assert [*responses] == [other]


@pytest.mark.parametrize(
    "other",
    [each for name, each in OTHERS.items() if "of other" not in name and "of another" not in name],
)
def test_a_response_with_more_than_a_text_is_in_no_run(other: InferResponse) -> None:
    responses = deque([other])
    assert take_run(responses) is None
    assert [*responses] == [other]


def test_a_run_ends_with_the_text_that_reaches_its_size() -> None:
    responses = deque([text_response("x" * (RUN_BYTES // 2))] * 3)
    assert len(read(responses)) == 2
    assert len(responses) == 1


def test_without_responses_there_is_no_run() -> None:
    assert take_run(deque()) is None


@pytest.mark.parametrize(
    "found",
    [
        ["text_output", [1], [], []],
        ["text_output", [1], [b"x"], []],
        ["text_output", [1], [b"x"], [1, 2]],
        ["text_output", [1], [b"x"], [-1]],
        ["text_output", [1], ["x"], [1]],
        ["text_output", [1], [b"x"]],
        ["text_output", [2], [b"x"], [1]],
        {},
    ],
    ids=[
        "empty",
        "without tokens",
        "more tokens",
        "negative",
        "no bytes",
        "short",
        "two",
        "no array",
    ],
)
def test_a_malformed_run_is_an_error(found: object) -> None:
    with pytest.raises(InferenceError, match="malformed texts of another process: ") as caught:
        read_run(msgspec.msgpack.encode(found))
    assert caught.value.code is Code.INTERNAL
