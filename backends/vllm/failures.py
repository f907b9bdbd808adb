"""What does a client read when vLLM fails?"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from jinja2 import TemplateError
from vllm.exceptions import (
    GracefulHTTPError,
    RetryableRequestError,
    VLLMClientError,
    VLLMError,
)
from vllm.v1.engine.exceptions import EngineDeadError

from backends.vllm.lora import LoraRefusal
from backends.vllm.settings import hide_folders
from backends.vllm.validation import first_mistake
from gateway.errors import Code, InferenceError

PREFIX = "Error generating stream: "
"""What Triton's backend writes before the reason of a failed request."""

REFUSALS = (
    VLLMClientError,
    NotImplementedError,
    OverflowError,
    TemplateError,
    TypeError,
    ValueError,
)
"""What vLLM raises for a request that it does not take; not all of it is an error of its own."""

MAX_TEXT = 1000

FAILURES = (InferenceError, VLLMError)
"""What ends a request and has a text for clients. Anything else is a defect."""


class Failures:
    """Turns what goes wrong in one model into what its clients read."""

    def __init__(self, model: str, folders: Mapping[str, str]) -> None:
        self.model = model
        self._folders = folders

    def explain(self, error: Exception) -> InferenceError:
        """The error of the contract for one of `FAILURES`."""
        if isinstance(error, EngineDeadError):
            return InferenceError(
                Code.UNAVAILABLE,
                f"model '{self.model}': its engine has stopped; retry shortly",
            )
        if isinstance(error, LoraRefusal):
            return error
        return InferenceError(code_of(error), PREFIX + self.clean(error))

    def clean(self, error: Exception) -> str:
        """What an error says, without paths of the host."""
        return hide_folders(_text(error), self._folders)


def code_of(error: Exception) -> Code:
    """The code for one of `FAILURES`."""
    if isinstance(error, InferenceError):
        return error.code
    if isinstance(error, VLLMClientError):
        return Code.INVALID_ARG
    if isinstance(error, GracefulHTTPError | RetryableRequestError):
        return Code.UNAVAILABLE
    return Code.INTERNAL


@contextmanager
def refusals() -> Iterator[None]:
    """Turn what vLLM raises for a request that it does not take into INVALID_ARG."""
    try:
        yield
    except REFUSALS as error:
        raise InferenceError(Code.INVALID_ARG, _text(error)) from error


def _text(error: Exception) -> str:
    """What the error says, without the value that vLLM's validation repeats in full."""
    text = str(error.args[0]) if error.args else first_mistake(error)
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}..."
