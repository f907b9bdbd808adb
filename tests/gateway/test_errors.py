"""The one failure a client sees."""

import pytest

from gateway.errors import Code, InferenceError


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (Code.UNKNOWN, "Unknown: no such field"),
        (Code.INTERNAL, "Internal: no such field"),
        (Code.NOT_FOUND, "Not found: no such field"),
        (Code.INVALID_ARG, "Invalid argument: no such field"),
        (Code.UNAVAILABLE, "Unavailable: no such field"),
        (Code.UNSUPPORTED, "Unsupported: no such field"),
        (Code.ALREADY_EXISTS, "Already exists: no such field"),
        (Code.CANCELLED, "Cancelled: no such field"),
    ],
)
def test_a_reason_names_the_code_before_the_message(code: Code, text: str) -> None:
    assert InferenceError(code, "no such field").reason == text


def test_what_is_raised_reads_as_its_message() -> None:
    error = InferenceError(Code.NOT_FOUND, "no such model")
    assert (str(error), error.message, error.code) == (
        "no such model",
        "no such model",
        Code.NOT_FOUND,
    )
