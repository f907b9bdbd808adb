"""Translation of error codes into gRPC status codes."""

import grpc
import pytest

from gateway.errors import Code
from gateway.frontends.grpc.rpc import STATUS, StatusCode


def test_every_code_has_a_status() -> None:
    assert STATUS.keys() == set(Code)


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
