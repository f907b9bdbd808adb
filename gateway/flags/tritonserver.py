"""Options of `sluice tritonserver` that `sluice serve` does not have."""

import difflib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from gateway.errors import Code, InferenceError

OF_TRITON = frozenset(
    {
        *("--allow-sagemaker", "--sagemaker-port", "--sagemaker-safe-port-range"),
        *("--sagemaker-thread-count", "--allow-vertex-ai", "--vertex-ai-port"),
        *("--vertex-ai-thread-count", "--vertex-ai-default-model"),
        *("--buffer-manager-thread-count", "--cuda-virtual-address-size", "--enable-peer-access"),
        *("--http-thread-count", "--repoagent-directory", "--reuse-http-port"),
    }
)
"""Triton's options without a counterpart."""


@dataclass(frozen=True, slots=True)
class IgnoredOption:
    """An option without effect, and the reason."""

    option: str
    why: str


def ignored_options(unknown: Sequence[str], known: Collection[str]) -> Iterator[IgnoredOption]:
    """The options among the arguments that the parser does not know; values are not shown.

    An argument after an option without `=` is its value. Raises INVALID_ARG for any other argument,
    as Triton.
    """
    takes_value = False
    for argument in unknown:
        if argument.startswith("-"):
            option, equals, _ = argument.partition("=")
            takes_value = not equals
            yield IgnoredOption(option, _reason(option, known))
        elif takes_value:
            takes_value = False
        else:
            raise InferenceError(Code.INVALID_ARG, f"Unexpected argument: {argument}")


def _reason(option: str, known: Collection[str]) -> str:
    if option in OF_TRITON:
        return "an option of Triton without a counterpart"
    close = difflib.get_close_matches(option, known, n=1)
    return f"unknown; did you mean {close[0]}?" if close else "unknown"
