"""Parameters of requests, and metadata that become parameters (protocol 14.2, 18.4)."""

from typing import Any

import pytest

from gateway.errors import Code, InferenceError
from gateway.frontends.grpc.parameters import (
    HeaderForwarding,
    InferParameters,
    read_parameters,
    wants_empty_final,
)
from gateway.messages import SequenceTag
from gateway.policy.areas import Area
from gateway.policy.caller import Caller
from gateway.policy.restrictions import Restriction
from gateway.protos import grpc_service_pb2 as pb

EMPTY_FINAL = "triton_enable_empty_final_response"


def read(given: dict[str, pb.InferParameter]) -> InferParameters:
    return read_parameters(pb.ModelInferRequest(parameters=given).parameters)


def refusal(given: dict[str, pb.InferParameter]) -> tuple[Code, str]:
    with pytest.raises(InferenceError) as caught:
        read(given)
    return caught.value.code, caught.value.message


BOOL = pb.InferParameter(bool_param=True)
INT = pb.InferParameter(int64_param=5)
UINT = pb.InferParameter(uint64_param=5)
STRING = pb.InferParameter(string_param="s")
DOUBLE = pb.InferParameter(double_param=0.5)
UNSET = pb.InferParameter()


def test_unknown_parameters_are_custom() -> None:
    found = read({"a": BOOL, "b": INT, "c": STRING, "d": DOUBLE, "stream": BOOL})
    assert found.custom == {"a": True, "b": 5, "c": "s", "d": 0.5, "stream": True}


@pytest.mark.parametrize("value", [UINT, UNSET], ids=["uint64", "unset"])
def test_a_parameter_of_another_kind_is_refused(value: pb.InferParameter) -> None:
    assert refusal({"a": value}) == (
        Code.INVALID_ARG,
        "invalid value type for 'a' parameter, expected int64_param, bool_param, or string_param.",
    )


@pytest.mark.parametrize("value", [INT, UINT])
def test_a_priority_is_a_number(value: pb.InferParameter) -> None:
    found = read({"priority": value})
    assert (found.priority, found.custom) == (5, {})


def test_a_timeout_is_in_microseconds() -> None:
    found = read({"timeout": INT})
    assert (found.timeout_us, found.custom) == (5, {})


@pytest.mark.parametrize(("value", "correlation_id"), [(INT, 5), (STRING, "s")])
def test_a_sequence_has_an_id_and_flags(
    value: pb.InferParameter, correlation_id: int | str
) -> None:
    found = read({"sequence_id": value, "sequence_start": BOOL})
    assert found.sequence(None) == SequenceTag(correlation_id, start=True, end=False)
    own = SequenceTag(correlation_id, start=True, end=False, tenant="a")
    assert found.sequence(Caller(tenant="a")) == own
    assert found.custom == {}


@pytest.mark.parametrize(
    "value",
    [pb.InferParameter(int64_param=0), pb.InferParameter(string_param="")],
    ids=["zero", "empty"],
)
def test_zero_and_nothing_are_no_sequence(value: pb.InferParameter) -> None:
    assert read({"sequence_id": value}).sequence(None) is None
    assert read({}).sequence(None) is None


def test_a_correlation_id_has_at_most_128_characters() -> None:
    longest = pb.InferParameter(string_param="x" * 128)
    assert read({"sequence_id": longest}).sequence(None) == SequenceTag("x" * 128)
    longer = pb.InferParameter(string_param="x" * 129)
    assert refusal({"sequence_id": longer}) == (
        Code.UNSUPPORTED,
        "string correlation ID cannot be longer than 128 characters",
    )


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("sequence_id", BOOL, "int64_param or string_param"),
        ("sequence_start", INT, "bool_param"),
        ("sequence_end", STRING, "bool_param"),
        ("priority", STRING, "int64_param or uint64_param"),
        ("timeout", UINT, "int64_param"),
        (EMPTY_FINAL, INT, "bool_param"),
        (EMPTY_FINAL, UNSET, "bool_param"),
    ],
)
def test_a_known_parameter_of_another_kind_is_refused(
    key: str, value: pb.InferParameter, expected: str
) -> None:
    assert refusal({key: value}) == (
        Code.INVALID_ARG,
        f"invalid value type for '{key}' parameter, expected {expected}.",
    )


def test_a_priority_is_not_negative() -> None:
    assert refusal({"priority": pb.InferParameter(int64_param=-1)}) == (
        Code.INVALID_ARG,
        "invalid value for 'priority', expected value >= 0.",
    )


def test_names_of_triton_are_reserved() -> None:
    assert refusal({"triton_x": BOOL}) == (
        Code.INVALID_ARG,
        "parameter keys starting with 'triton_' are reserved for Triton usage. Only the following "
        "keys starting with 'triton_' are allowed: triton_enable_empty_final_response",
    )


@pytest.mark.parametrize(
    ("value", "wanted"), [(True, True), (False, False), (None, False)], ids=["yes", "no", "absent"]
)
def test_the_parameter_of_the_empty_final_response_is_read(
    value: bool | None, wanted: bool
) -> None:
    given = {} if value is None else {EMPTY_FINAL: pb.InferParameter(bool_param=value)}
    asked = pb.ModelInferRequest(parameters=given)
    assert wants_empty_final(asked) is wanted
    assert read_parameters(asked.parameters).custom == {}


# Header forwarding (protocol 14.2).


METADATA: list[Any] = [("x-tenant", "a"), ("user-agent", "test"), ("x-trace-bin", b"\x01\xff")]


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("^x-", {"x-tenant", "x-trace-bin"}),
        ("TENANT", {"x-tenant"}),
        ("tenant$|agent", {"x-tenant", "user-agent"}),
        ("nothing", set()),
    ],
)
def test_metadata_that_the_pattern_finds_are_forwarded(pattern: str, names: set[str]) -> None:
    assert HeaderForwarding(pattern).select(METADATA).keys() == names


def test_metadata_are_forwarded_as_text() -> None:
    found = HeaderForwarding("x-").select(METADATA)
    assert found == {"x-tenant": "a", "x-trace-bin": "\x01\ufffd"}


def test_no_pattern_forwards_nothing() -> None:
    assert HeaderForwarding("").enabled is False
    assert HeaderForwarding("x").enabled is True


@pytest.mark.parametrize(
    "name",
    ["timeout", "priority", "sequence_id", "triton_x", "headers", "binary_data_output"],
)
def test_reserved_names_are_not_forwarded(name: str) -> None:
    with pytest.raises(InferenceError) as caught:
        HeaderForwarding(".").select([(name, "1")])
    assert (caught.value.code, caught.value.message) == (
        Code.INVALID_ARG,
        f"Header '{name}' is reserved for Triton usage and cannot be forwarded.",
    )


@pytest.mark.parametrize("name", ["cancel", "sequence_x", "sluice-stream", "sluice_x"])
def test_other_names_with_a_meaning_for_the_server_are_dropped(name: str) -> None:
    assert HeaderForwarding(".").select([(name, "1"), ("x-a", "b")]) == {"x-a": "b"}


def test_secrets_are_never_forwarded() -> None:
    names = ("authorization", "x-api-key", "api-key", "cookie", "proxy-authorization")
    metadata = [(name, "K") for name in (*names, "triton-grpc-protocol-admin-key")]
    restrictions = {Area.LOGGING: Restriction.of("Admin-KEY", "K")}
    found = HeaderForwarding(".*", restrictions).select([*metadata, ("x-a", "b")])
    assert found == {"x-a": "b"}
