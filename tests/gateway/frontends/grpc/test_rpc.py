"""Translation of error codes into gRPC status codes."""

import grpc
import pytest

from gateway.admission.quotas import LIMIT_HEADERS
from gateway.errors import Code, Refusal, RefusalReason, RetryAdvice
from gateway.frontends.grpc.http2_wire import written_details
from gateway.frontends.grpc.status import REFUSAL_STATUS, STATUS, StatusCode, rpc_error


def test_every_code_and_every_reason_has_a_status() -> None:
    assert STATUS.keys() == set(Code)
    assert REFUSAL_STATUS.keys() == set(RefusalReason)


@pytest.mark.parametrize(
    ("advice", "pushback"),
    [
        (RetryAdvice(retry_after_secs=0.3001), "301"),
        (RetryAdvice(retry_after_secs=0.3, retries=False), "-1"),
        (RetryAdvice(), None),
    ],
)
def test_a_refusal_says_when_the_client_may_retry(advice: RetryAdvice, pushback: str) -> None:
    error = rpc_error(Refusal(RefusalReason.DEADLINE_UNREACHABLE, "late", advice))
    assert (error.status, error.details) == (StatusCode.UNAVAILABLE, "late")
    assert dict(error.trailers).get("grpc-retry-pushback-ms") == pushback


@pytest.mark.parametrize("character", ["x", "%", "\n", "\N{SNOWMAN}", "\U0001f600"])
def test_the_trailers_of_a_refusal_are_below_8_kib(character: str) -> None:
    headers = dict.fromkeys(LIMIT_HEADERS, "1234567890")
    advice = RetryAdvice(
        retry_after_secs=60, limit="tokens", predicted_wait_secs=1.5, headers=headers
    )
    error = rpc_error(Refusal(RefusalReason.RATE_LIMITED, character * 10_000, advice))
    assert len(error.details) >= 256
    size = sum(len(name) + 4 * len(value) // 3 for name, value in error.trailers)
    assert size + len(written_details(error.details)) < 8192


def test_statuses_are_those_of_grpc() -> None:
    assert {each.name: each.value for each in StatusCode} == {
        each.name: each.value[0] for each in grpc.StatusCode
    }


@pytest.mark.parametrize(
    ("code", "number"),
    [
        (Code.UNKNOWN, 2),
        (Code.INTERNAL, 13),
        (Code.NOT_FOUND, 5),
        (Code.INVALID_ARG, 3),
        (Code.UNAVAILABLE, 14),
        (Code.UNSUPPORTED, 12),
        (Code.ALREADY_EXISTS, 6),
        (Code.CANCELLED, 1),
    ],
)
def test_a_code_becomes_tritons_status(code: Code, number: int) -> None:
    assert STATUS[code] == number
