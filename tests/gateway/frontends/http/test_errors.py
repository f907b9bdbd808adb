"""Statuses and bodies of error codes."""

import asyncio
import json
import re
from unittest.mock import Mock

import pytest
from starlette.requests import Request
from starlette.types import Message

from gateway.errors import (
    Code,
    InferenceError,
    Refusal,
    RefusalReason,
    RetryAdvice,
    RetryLater,
)
from gateway.frontends.http import errors
from gateway.frontends.http.errors import (
    CLOSING,
    MAX_LOGGED,
    MAX_MESSAGE,
    OPENAI_REFUSALS,
    REFUSAL_STATUS,
    STATUS,
    error_body,
    error_response,
    plain_error,
    refused,
)
from gateway.frontends.http.openai.answers import openai_refused
from gateway.frontends.http.sse import refused_stream
from gateway.observability.request_context import LoggedRequest
from tests.builders import soon


def test_the_time_of_a_retry_is_that_of_the_error() -> None:
    later = RetryLater("one is being started", 40)
    assert error_response(later).headers["retry-after"] == "40"
    assert refused_stream("/", later).headers["retry-after"] == "40"
    request = Request({"type": "http", "path": "/v1/completions", "headers": []})
    assert openai_refused(request, later).headers["retry-after"] == "40"
    assert error_response(InferenceError(Code.UNAVAILABLE, "full")).headers["retry-after"] == "1"
    assert "retry-after" not in error_response(InferenceError(Code.NOT_FOUND, "no")).headers


def test_every_code_and_every_reason_has_a_status() -> None:
    assert STATUS.keys() == set(Code)
    assert REFUSAL_STATUS.keys() == OPENAI_REFUSALS.keys() == set(RefusalReason)


def test_a_refusal_has_the_headers_of_its_advice() -> None:
    advice = RetryAdvice(retry_after_secs=1.25, predicted_wait_secs=2.5, headers={"x-left": "0"})
    refusal = Refusal(RefusalReason.DEADLINE_UNREACHABLE, "too late", advice)
    response = error_response(refusal)
    assert (response.status_code, response.body) == (503, b'{"error":"too late"}')
    expected = {
        "x-refused-reason": "deadline_unreachable",
        "x-should-retry": "true",
        "x-left": "0",
        "retry-after": "2",
        "retry-after-ms": "1250",
        "x-predicted-wait-ms": "2500",
    }
    assert expected.items() <= dict(response.headers).items()


def test_a_refusal_that_no_retry_helps_names_no_time() -> None:
    advice = RetryAdvice(retry_after_secs=1.25, retries=False)
    refusal = Refusal(RefusalReason.DEADLINE_UNREACHABLE, "no", advice)
    request = Request({"type": "http", "path": "/v1/completions", "headers": []})
    for response in (error_response(refusal), openai_refused(request, refusal)):
        assert response.headers["x-should-retry"] == "false"
        assert not {"retry-after", "retry-after-ms"} & set(response.headers)


@pytest.mark.parametrize(
    ("reason", "limit", "status", "kind", "code"),
    [
        (RefusalReason.RATE_LIMITED, "requests", 429, "requests", "rate_limit_exceeded"),
        (RefusalReason.RATE_LIMITED, "tokens", 429, "tokens", "rate_limit_exceeded"),
        (RefusalReason.OVERLOADED, "", 503, "server_error", "server_overloaded"),
        (RefusalReason.DEADLINE_UNREACHABLE, "", 503, "server_error", "deadline_unreachable"),
        (RefusalReason.DEADLINE_EXCEEDED, "", 504, "server_error", "deadline_exceeded"),
    ],
)
def test_a_refusal_has_openais_type_and_code(
    reason: RefusalReason, limit: str, status: int, kind: str, code: str
) -> None:
    request = Request({"type": "http", "path": "/v1/completions", "headers": []})
    response = openai_refused(request, Refusal(reason, "no", RetryAdvice(limit=limit)))
    assert response.status_code == status
    error = {"message": "no", "type": kind, "param": None, "code": code}
    assert json.loads(response.body) == {"error": error}
    assert response.headers["x-refused-reason"] == reason


@pytest.mark.parametrize("reason", RefusalReason)
def test_the_frontend_does_not_repeat_lines_of_the_admission(
    reason: RefusalReason, caplog: pytest.LogCaptureFixture
) -> None:
    refused("/v2", Refusal(reason, "no", RetryAdvice()))
    is_logged = reason in (RefusalReason.OVERLOADED, RefusalReason.DEADLINE_EXCEEDED)
    assert bool(caplog.records) is is_logged


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (Code.UNKNOWN, 400),
        (Code.INTERNAL, 500),
        (Code.NOT_FOUND, 404),
        (Code.INVALID_ARG, 400),
        (Code.UNAVAILABLE, 503),
        (Code.UNSUPPORTED, 501),
        (Code.ALREADY_EXISTS, 400),
        (Code.CANCELLED, 400),
    ],
)
def test_a_code_becomes_tritons_status(code: Code, status: int) -> None:
    response = error_response(InferenceError(code, "no such model"))
    assert response.status_code == status
    assert response.body == b'{"error":"no such model"}'
    assert response.headers["content-type"] == "application/json"


@pytest.mark.parametrize("code", list(Code))
def test_only_unavailable_has_retry_after(code: Code) -> None:
    headers = error_response(InferenceError(code, "no")).headers
    assert ("retry-after" in headers) is (code is Code.UNAVAILABLE)


@pytest.mark.parametrize(
    ("message", "body"),
    [
        ("", b'{"error":""}'),
        ('say "hi"\n', b'{"error":"say \\"hi\\"\\n"}'),
        ("caf\u00e9", '{"error":"caf\u00e9"}'.encode()),
    ],
)
def test_the_body_is_json_for_every_message(message: str, body: bytes) -> None:
    assert error_body(message) == body


def test_a_long_message_is_sent_without_its_middle() -> None:
    longest = "x" * MAX_MESSAGE
    assert error_body(longest) == b'{"error":"%b"}' % longest.encode()
    name = "n" * 1_000_000
    found = json.loads(error_body(f"unexpected inference input '{name}' for model 'm'"))["error"]
    assert re.fullmatch(r"unexpected inference input 'n+\.\.\.n+' for model 'm'", found)
    assert len(found) == MAX_MESSAGE + len("...")


def test_a_plain_error_has_the_status_it_is_given() -> None:
    response = plain_error(405, "Method Not Allowed")
    assert (response.status_code, response.body) == (405, b'{"error":"Method Not Allowed"}')


PIECE: Message = {"type": "http.request", "body": b"x", "more_body": True}
END: Message = {"type": "http.request", "body": b"x", "more_body": False}
GONE: Message = {"type": "http.disconnect"}


@pytest.mark.parametrize("messages", [[END], [PIECE, PIECE, END], [PIECE, GONE], [GONE]])
async def test_the_last_answer_of_a_connection_comes_before_the_body_and_its_end_behind(
    messages: list[Message],
) -> None:
    sent, left = list[Message](), iter(messages)

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        assert [each["type"] for each in sent] == ["http.response.start", "http.response.body"]
        assert (sent[1]["body"], sent[1]["more_body"]) == (b'{"error":"no"}', True)
        return next(left)

    response = plain_error(429, "no", dict(CLOSING))
    await soon(response({"type": "http"}, receive, send))
    assert (b"connection", b"close") in sent[0]["headers"]
    assert sent[2:] == [{"type": "http.response.body", "body": b""}]
    assert list(left) == []


async def test_a_body_without_an_end_is_dropped_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(errors, "LINGER_SECS", 0.01)
    sent = list[Message]()

    async def send(message: Message) -> None:
        sent.append(message)

    async def endless() -> Message:
        await asyncio.sleep(0)
        return PIECE

    async def silent() -> Message:
        return await asyncio.get_running_loop().create_future()

    for receive in (endless, silent):
        sent.clear()
        await soon(plain_error(429, "no", dict(CLOSING))({"type": "http"}, receive, send))
        assert len(sent) == 3


async def test_the_line_of_a_refusal_has_no_body_that_was_not_read_and_no_wait_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(errors, "LINGER_SECS", 0.1)

    async def silent() -> Message:
        return await asyncio.get_running_loop().create_future()

    async def send(_: Message) -> None:
        return

    request = LoggedRequest(Mock(), "http", "/v2/models/{model}/infer")
    request.bytes_in = 1 << 30
    with request:
        await soon(plain_error(429, "no", dict(CLOSING))({"type": "http"}, silent, send))
    line = request.members()
    assert "bytes_in" not in line
    assert line["duration_ms"] < 100


def test_a_client_cannot_fill_the_log_with_its_input(
    caplog: pytest.LogCaptureFixture,
) -> None:
    message = "x" * 10 * MAX_LOGGED
    response = refused("/v2", InferenceError(Code.INVALID_ARG, message))
    assert response.body == error_body(message)
    (record,) = caplog.records
    assert vars(record)["reason"] == "x" * MAX_LOGGED
