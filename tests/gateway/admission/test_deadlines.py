"""The deadlines that headers and the parameter `deadline_ms` name."""

import time
from datetime import UTC, datetime
from typing import Any

import pytest

from gateway.admission.deadlines import deadline_of, read_wishes, timed
from gateway.errors import Code, InferenceError
from gateway.messages import Deadline, InferRequest

RECEIVED_NS = 1_000_000_000_000
WALL_NS = 1_800_000_000 * 10**9
"""2027-01-15T08:00:00Z"""
MS = 1_000_000
SECOND = 1000 * MS
RPC_NS = RECEIVED_NS + 2 * SECOND


def deadline(*headers: str, rpc_end_ns: int = 0, streams: bool = False) -> Deadline | None:
    """The deadline of a request with these headers, such as `x-request-timeout-ms: 5`."""
    pairs = [each.encode().split(b": ") for each in headers]
    wishes = read_wishes([(n, v) for n, v in pairs], rpc_end_ns, streams=streams)
    return None if wishes is None else wishes.deadline(RECEIVED_NS, WALL_NS)


def held(at_ns: int, *, streams: bool = False) -> Deadline:
    """A deadline that the server holds."""
    if streams:
        return Deadline(first_ns=at_ns, held_first_ns=at_ns, asked=True)
    return Deadline(whole_ns=at_ns, held_whole_ns=at_ns, asked=True)


def test_a_request_without_times_has_none() -> None:
    assert deadline("host: here", "x-request-id: 5") is None
    assert timed(InferRequest(model="m", parameters={"deadline_ms": 0})).deadline is None


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("header", "after_ns"),
    [
        ("x-request-timeout-ms: 2500", 2500 * MS),
        ("x-request-timeout-ms: 0.5", MS // 2),
        ("x-request-timeout-ms: 0.000001", 1),
        ("x-envoy-expected-rq-timeout-ms: 15000", 15 * SECOND),
        ("x-request-deadline: 2027-01-15T08:00:01Z", SECOND),
        ("x-request-deadline: 2027-01-15T09:00:00.250+01:00", 250 * MS),
        ("x-request-deadline: 1800000001000", SECOND),
        ("x-request-deadline: 1799999999000", -SECOND),
        ("x-request-deadline: 1999-12-31T23:59:59Z", 1 - RECEIVED_NS),
    ],
)
def test_a_whole_answer_or_the_first_response_of_a_stream_is_due(
    header: str, after_ns: int, streams: bool
) -> None:
    expected = held(RECEIVED_NS + after_ns, streams=streams)
    assert deadline(header, streams=streams) == expected


@pytest.mark.parametrize(
    "header",
    [
        "x-request-timeout-ms: 0",
        "x-request-timeout-ms: 86400001",
        "x-request-timeout-ms: 999999999999999",
        "x-request-deadline: 9999-12-31T23:59:59Z",
        "x-request-deadline: 2027-01-16T08:00:01Z",
        "x-stainless-read-timeout: None",
        "x-stainless-read-timeout: -1",
        "x-stainless-read-timeout: 1e400",
        "x-envoy-expected-rq-timeout-ms: soon",
        "x-slo-ttft-ms: quick",
    ],
)
def test_times_beyond_a_day_and_malformed_ones_of_libraries_are_none(header: str) -> None:
    assert deadline(header) is None


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("x-request-timeout-ms: -5", "a number of milliseconds, such as 2500"),
        ("x-request-timeout-ms: NaN", "a number of milliseconds, such as 2500"),
        ("x-request-timeout-ms: 1e400", "a number of milliseconds, such as 2500"),
        ("x-request-timeout-ms: 5s", "a number of milliseconds, such as 2500"),
        ("x-request-deadline: tomorrow", "a time such as 2026-01-31T12:00:00Z"),
        ("x-request-deadline: 2027-01-15T08:00:01", "a time such as 2026-01-31T12:00:00Z"),
        ("x-request-deadline: 10000-01-01T00:00:00Z", "a time such as 2026-01-31T12:00:00Z"),
        ("x-request-deadline: -1", "a time such as 2026-01-31T12:00:00Z"),
    ],
)
def test_a_malformed_time_of_the_client_is_refused(header: str, expected: str) -> None:
    with pytest.raises(InferenceError) as caught:
        deadline(header)
    name, _, found = header.partition(": ")
    assert caught.value.code is Code.INVALID_ARG
    assert f"header '{name}' is '{found}', expected {expected}" in caught.value.message


def test_a_control_character_of_a_client_is_not_repeated() -> None:
    with pytest.raises(InferenceError, match=r"is 'a\?\?b', expected"):
        deadline("x-request-timeout-ms: a\n\x1bb")


def test_the_earliest_time_counts() -> None:
    headers = ("x-request-timeout-ms: 900", "x-request-timeout-ms: 700")
    moment = "x-request-deadline: 2027-01-15T08:00:00.800Z"
    assert deadline(*headers, moment) == held(RECEIVED_NS + 700 * MS)
    assert deadline(headers[0], moment) == held(RECEIVED_NS + 800 * MS)


def test_the_limit_of_an_openai_client_is_for_the_first_byte_and_its_own() -> None:
    assert deadline("x-stainless-read-timeout: 600") == Deadline(
        first_ns=RECEIVED_NS + 600 * SECOND
    )


def test_the_end_of_an_rpc_bounds_the_answer_and_is_not_held() -> None:
    headers = ("x-request-timeout-ms: 5000",)
    found = deadline(*headers, rpc_end_ns=RPC_NS)
    assert found == Deadline(whole_ns=RPC_NS, held_whole_ns=RECEIVED_NS + 5 * SECOND, asked=True)
    assert deadline(rpc_end_ns=RPC_NS) == Deadline(whole_ns=RPC_NS)


def test_wishes_are_durations() -> None:
    found = deadline("x-slo-ttft-ms: 300", "x-slo-tpot-ms: 20")
    assert found == Deadline(slo_first_ns=300 * MS, slo_token_ns=20 * MS, asked=True)


def test_a_clock_that_jumps_moves_no_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    moment = datetime.fromtimestamp(time.time() + 60, UTC).isoformat().encode()
    wishes, received_ns = read_wishes([(b"x-request-deadline", moment)]), time.perf_counter_ns()
    found = deadline_of(wishes, received_ns)
    assert found is not None
    assert found.whole_ns - received_ns == pytest.approx(60 * SECOND, abs=SECOND)
    monkeypatch.setattr("time.time_ns", lambda: 0)
    relative = deadline_of(read_wishes([(b"x-request-timeout-ms", b"5000")]), received_ns)
    assert relative == held(received_ns + 5 * SECOND)


@pytest.mark.parametrize(("value", "after_ns"), [(250, 250 * MS), (1e-6, 1), (0.25, MS // 4)])
def test_the_parameter_bounds_the_whole_answer_and_the_model_does_not_get_it(
    value: Any, after_ns: int
) -> None:
    given = {"deadline_ms": value, "seed": 1}
    earlier = Deadline(first_ns=5, held_first_ns=5)
    request = timed(
        InferRequest(model="m", parameters=given, received_ns=RECEIVED_NS, deadline=earlier)
    )
    at_ns = RECEIVED_NS + after_ns
    assert request.parameters == {"seed": 1}
    assert request.deadline == Deadline(5, at_ns, 5, at_ns, asked=True)
    assert "deadline_ms" in given


@pytest.mark.parametrize("value", [-1, True, "5", None, float("nan"), float("inf"), 10**16, [5]])
def test_a_malformed_parameter_is_refused(value: Any) -> None:
    with pytest.raises(InferenceError, match=r"parameter 'deadline_ms' is '.*', expected a number"):
        timed(InferRequest(model="m", parameters={"deadline_ms": value}))
