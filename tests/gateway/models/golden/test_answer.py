"""Answers and errors of golden requests are compared with the expected ones."""

from typing import Any

import numpy as np
import pytest

from gateway.errors import Code, InferenceError
from gateway.messages import InferResponse, Usage
from gateway.models.golden.answer import ExpectedAnswer, ExpectedError, GoldenAnswer
from gateway.models.golden.tensor_checks import Cosine, Mismatch, OutputChecks
from gateway.models.golden.text_checks import read_text_checks
from gateway.openai_contract import RESPONSE
from gateway.stream import ResponseStream
from gateway.strict_json import StrictObject
from gateway.tensor import Datatype, Tensor, text_tensor
from tests.builders import soon, text_response

FINE = OutputChecks(Datatype.BYTES, [lambda array: None])
FLOATS = OutputChecks(Datatype.FP32, [Cosine(np.ones((1, 2)), 0.9)])
REFUSED = InferenceError(Code.INVALID_ARG, "the prompt is too long")


async def never(model: str, one: str, other: str) -> float:
    raise AssertionError("no check compares meanings")


async def problem(expected: ExpectedAnswer, answer: GoldenAnswer) -> str:
    """The reason why the answer is not the expected one; "" if it is."""
    try:
        await expected.check(answer, never)
    except Mismatch as mismatch:
        return str(mismatch)
    return ""


def expects(output: str = "text_output", **checks: Any) -> ExpectedAnswer:
    texts = {output: read_text_checks(StrictObject(checks))}
    return ExpectedAnswer(tensors={}, texts=texts, text_output=output)


def fails(code: Code | None = None, **checks: Any) -> ExpectedAnswer:
    message = read_text_checks(StrictObject(checks))
    error = ExpectedError(code=code, message=message)
    return ExpectedAnswer(tensors={}, texts={}, error=error)


@pytest.mark.parametrize(
    ("expected", "error", "text"),
    [
        (fails(), REFUSED, ""),
        (fails(Code.INVALID_ARG, contains="too long"), REFUSED, ""),
        (fails(), None, "was answered, expected an error"),
        (
            fails(Code.UNAVAILABLE),
            REFUSED,
            "failed: Invalid argument: the prompt is too long; expected Unavailable",
        ),
        (
            fails(contains="too short"),
            REFUSED,
            "error: text does not contain 'too short': 'the prompt is too long'",
        ),
        (expects(equals=""), REFUSED, "failed: Invalid argument: the prompt is too long"),
    ],
)
async def test_an_error_is_compared_by_code_and_text(
    expected: ExpectedAnswer, error: InferenceError | None, text: str
) -> None:
    assert await problem(expected, GoldenAnswer(error=error)) == text


async def test_the_texts_of_all_responses_are_one_and_the_last_usage_has_the_reason() -> None:
    answer = GoldenAnswer()
    stream = ResponseStream()
    stream.put(text_response("It is "))
    usage = Usage(finish_reason="length")
    stream.put(InferResponse(outputs=(text_tensor("text_output", ["Paris"]),), usage=usage))
    stream.end()
    await soon(answer.read(stream))
    assert await problem(expects(equals="It is Paris"), answer) == ""
    stopped = ExpectedAnswer(
        tensors={}, texts={}, text_output="text_output", finish_reasons=("stop",)
    )
    assert await problem(stopped, answer) == "finish reason is 'length', expected 'stop'"


async def test_an_error_among_the_responses_is_that_of_the_answer() -> None:
    answer = GoldenAnswer()
    stream = ResponseStream()
    stream.put(InferResponse(error=REFUSED))
    stream.end()
    await soon(answer.read(stream))
    assert answer.error is REFUSED


async def test_a_tensor_is_compared_only_if_one_response_has_it() -> None:
    expected = ExpectedAnswer(tensors={"text_output": FINE}, texts={})
    answer = GoldenAnswer(responses=[text_response("a"), text_response("b")])
    text = "output 'text_output' is in 2 responses, expected 1"
    assert await problem(expected, answer) == text
    assert await problem(expected, GoldenAnswer(responses=[text_response("a")])) == ""


@pytest.mark.parametrize(
    ("expected", "output", "text"),
    [
        (FLOATS, text_tensor("y", ["a", "b"]), "datatype is BYTES, expected FP32"),
        (FINE, Tensor("y", Datatype.FP32, (1,), b"1234"), "datatype is FP32, expected BYTES"),
        (FLOATS, Tensor("y", Datatype.FP32, (1, 2), b"123"), "data are no FP32 of shape [1,2]"),
        (FINE, Tensor("y", Datatype.BYTES, (1,), b"\xff"), "data are no BYTES of shape [1]"),
    ],
    ids=["texts", "floats", "short", "truncated"],
)
async def test_an_output_of_another_datatype_or_size_differs(
    expected: OutputChecks, output: Tensor, text: str
) -> None:
    whole = ExpectedAnswer(tensors={"y": expected}, texts={})
    assert (
        await problem(whole, GoldenAnswer([InferResponse(outputs=(output,))]))
        == f"output 'y': {text}"
    )


@pytest.mark.parametrize(
    ("output", "text"),
    [
        (Tensor("y", Datatype.INT32, (1,), b"1234"), "datatype is INT32, expected BYTES"),
        (Tensor("y", Datatype.BYTES, (1,), b"\xff"), "incomplete string length indicator"),
    ],
    ids=["numbers", "truncated"],
)
async def test_an_output_without_text_differs(output: Tensor, text: str) -> None:
    found = await problem(
        expects("y", equals="a"), GoldenAnswer([InferResponse(outputs=(output,))])
    )
    assert found.startswith(f"output 'y': {text}")


async def test_an_answer_that_is_too_large_is_not_read_to_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.models.golden.answer.MOST_BYTES", 100)
    answer = GoldenAnswer()
    stream = ResponseStream()
    for _ in range(3):
        stream.put(text_response("x" * 60))
    await soon(answer.read(stream))
    assert stream.cancelled
    assert await problem(expects(equals=""), answer) == "answer has more than 100 bytes"


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ('{"choices": [{"message": {"content": "Paris"}}]}', ""),
        ('{"choices": [{"message": {"content": null}}]}', "text is not 'Paris': ''"),
        ('{"choices": []}', "answer is no chat completion: '{\"choices\": []}'"),
        ("[]", "answer is no chat completion: '[]'"),
        ("{", "answer is no chat completion: '{'"),
        (b"\xff{", "answer is no chat completion: '\ufffd{'"),
    ],
)
async def test_the_text_of_a_chat_is_that_of_its_message(body: str | bytes, text: str) -> None:
    element = body.encode() if isinstance(body, str) else body
    output = Tensor(RESPONSE, Datatype.BYTES, (1,), (element,))
    response = InferResponse(outputs=(output,), final=True)
    assert await problem(expects(RESPONSE, equals="Paris"), GoldenAnswer([response])) == text
