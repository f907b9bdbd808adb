"""Idempotency keys: equal only for the same request to the same route."""

import pytest

from gateway.errors import Code, InferenceError
from gateway.resumption.recording import MAX_KEY, Key, KeyReused


def test_the_same_request_has_the_same_key() -> None:
    assert Key.of("k", "/a", [b"body"]) == Key.of("k", "/a", [memoryview(b"body")])


@pytest.mark.parametrize(
    "other",
    [
        Key.of("l", "/a", [b"body"]),
        Key.of("k", "/b", [b"body"]),
        Key.of("k", "/a", [b"bodY"]),
        Key.of("k", "/a", [b"bo", b"dy"]),
        Key.of("k", "/abody", []),
    ],
)
def test_another_request_has_another_key(other: Key) -> None:
    assert Key.of("k", "/a", [b"body"]) != other


@pytest.mark.parametrize("length", [1, MAX_KEY])
def test_a_key_may_be_so_long(length: int) -> None:
    assert Key.of("k" * length, "/a", []).name == "k" * length


@pytest.mark.parametrize("length", [0, MAX_KEY + 1])
def test_a_key_that_is_too_short_or_too_long_is_refused(length: int) -> None:
    with pytest.raises(InferenceError, match=f"{length} characters, expected 1 to {MAX_KEY}") as e:
        Key.of("k" * length, "/a", [])
    assert e.value.code is Code.INVALID_ARG


def test_a_reused_key_is_the_clients_fault() -> None:
    assert KeyReused().code is Code.INVALID_ARG
    assert "Idempotency-Key" in KeyReused().message
