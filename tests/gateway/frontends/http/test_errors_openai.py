"""Errors in OpenAI's form."""

import orjson
import pytest

from gateway.errors import Code, InferenceError
from gateway.frontends.http.errors import (
    MAX_MESSAGE,
    OPENAI_STATUS,
    OPENAI_TYPES,
    openai_error_body,
    openai_form,
    openai_refusal,
)
from gateway.openai_contract import OpenAiRefusal
from gateway.resumption.recording import KeyReused


def test_every_code_has_a_status_and_every_status_a_type() -> None:
    assert OPENAI_STATUS.keys() == set(Code)
    assert set(OPENAI_STATUS.values()) <= OPENAI_TYPES.keys()


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        (Code.INVALID_ARG, 400, "BadRequestError"),
        (Code.NOT_FOUND, 404, "NotFoundError"),
        (Code.CANCELLED, 499, "ClientClosedRequestError"),
        (Code.INTERNAL, 500, "InternalServerError"),
        (Code.UNAVAILABLE, 503, "ServiceUnavailableError"),
    ],
)
def test_an_error_is_written_as_vllm_writes_it(code: Code, status: int, kind: str) -> None:
    found, body = openai_form(InferenceError(code, "no"))
    error = {"message": "no", "type": kind, "param": None, "code": status}
    assert (found, orjson.loads(body)) == (status, {"error": error})


def test_a_key_that_was_used_for_something_else_has_a_status_of_its_own() -> None:
    status, body = openai_form(KeyReused())
    assert (status, orjson.loads(body)["error"]["type"]) == (422, "UnprocessableEntityError")


def test_a_refusal_names_the_member_of_the_body() -> None:
    status, body = openai_form(openai_refusal(Code.INVALID_ARG, "no", "stop"))
    assert (status, orjson.loads(body)["error"]["param"]) == (400, "stop")


def test_an_error_written_by_the_model_is_unchanged() -> None:
    error = OpenAiRefusal(Code.INVALID_ARG, "plain", status=418, body=b'{"error": 1}')
    assert openai_form(error) == (418, b'{"error": 1}')


@pytest.mark.parametrize(("status", "kind"), [(405, OPENAI_TYPES[400]), (507, OPENAI_TYPES[500])])
def test_a_status_without_a_type_has_that_of_its_class(status: int, kind: str) -> None:
    assert orjson.loads(openai_error_body(status, "no"))["error"]["type"] == kind


def test_a_very_long_message_loses_its_middle() -> None:
    message = orjson.loads(openai_error_body(400, "a" * MAX_MESSAGE + "b"))["error"]["message"]
    assert len(message) == MAX_MESSAGE + len("...")
    assert message.endswith("ab")
