"""Options that only a tritonserver has are ignored, each with its reason."""

import pytest

from gateway.errors import Code, InferenceError
from gateway.flags.tritonserver import IgnoredOption, ignored_options

KNOWN = ("--http-port", "--grpc-port", "--http-restricted-api")
OF_TRITON = "an option of Triton without a counterpart"


def ignored(*arguments: str) -> list[IgnoredOption]:
    return list(ignored_options(arguments, KNOWN))


def test_each_option_is_named_without_its_value() -> None:
    assert ignored("--reuse-http-port", "true", "--http-thread-count=8", "-x") == [
        IgnoredOption("--reuse-http-port", OF_TRITON),
        IgnoredOption("--http-thread-count", OF_TRITON),
        IgnoredOption("-x", "unknown"),
    ]


def test_a_misspelt_option_is_named_with_the_nearest_one() -> None:
    [found] = ignored("--http-restricted-apis=health:key=secret")
    assert found.why == "unknown; did you mean --http-restricted-api?"


@pytest.mark.parametrize(
    "arguments", [("stray",), ("--http-thread-count=8", "stray"), ("--nothing", "value", "stray")]
)
def test_an_argument_that_is_no_value_is_an_error(arguments: tuple[str, ...]) -> None:
    with pytest.raises(InferenceError) as caught:
        ignored(*arguments)
    assert caught.value.code is Code.INVALID_ARG
    assert caught.value.message == "Unexpected argument: stray"
