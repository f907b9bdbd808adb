"""Errors of vLLM as errors of the gateway."""

import multiprocessing
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from jinja2 import TemplateError
from vllm.exceptions import (
    GracefulHTTPError,
    RetryableRequestError,
    VLLMClientError,
    VLLMError,
)
from vllm.v1.engine.exceptions import EngineDeadError

from backends.vllm.lora import LoraRefusal
from backends.vllm.orphans import ErrorSender, one_line
from backends.vllm.settings import EngineModel, hide_folders
from backends.vllm.validation import first_mistake
from gateway.errors import Code, InferenceError

PREFIX = "Error generating stream: "
"""Prefix of Triton's backend before the reason of a failed request."""

REFUSALS = (
    VLLMClientError,
    NotImplementedError,
    OverflowError,
    TemplateError,
    TypeError,
    ValueError,
)
"""Errors that vLLM raises for invalid requests; some are not of its own types."""

MAX_TEXT = 1000

FAILURES = (InferenceError, VLLMError)
"""Errors of a request with a text for clients; any other error is a defect."""

ENGINE_PROCESS = "EngineCore"

OF_ENGINE = (Code.INTERNAL, Code.UNAVAILABLE)
"""Codes of loads that failed in the engine; unusable arguments are INVALID_ARG."""


class Failures:
    """Translates errors of one model for its clients."""

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
        """The text of an error without paths of the host."""
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
    """Turn errors that vLLM raises for invalid requests into INVALID_ARG."""
    try:
        yield
    except REFUSALS as error:
        raise InferenceError(Code.INVALID_ARG, _text(error)) from error


def _text(error: Exception) -> str:
    """The text of an error, without the value that vLLM's validation repeats in full."""
    text = str(error.args[0]) if error.args else first_mistake(error)
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}..."


class EngineErrors:
    """Adds the engine's own last error to a failed load; used in a `with` around the load.

    `sender` is passed to each process of the engine.
    """

    def __init__(self, model: EngineModel) -> None:
        self._model = model
        self._reader, writer = multiprocessing.Pipe(duplex=False)
        # If the pipe is full, further messages are dropped; the process does not block.
        os.set_blocking(writer.fileno(), False)
        self.sender = ErrorSender(writer)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        reason = self._last()
        self.sender.close()
        self._reader.close()
        if isinstance(error, EngineDeadError) or (
            isinstance(error, InferenceError) and error.code in OF_ENGINE
        ):
            raise self._failure(reason or self._text(error)) from error

    def _failure(self, reason: str) -> InferenceError:
        model = self._model
        text = f"model '{model.name}': {model.whereabouts}its engine did not start: {reason}"
        return InferenceError(Code.INTERNAL, hide_folders(text, model.folders))

    def _text(self, error: BaseException) -> str:
        if isinstance(error, InferenceError):
            return error.message.removeprefix(f"model '{self._model.name}': ")
        return one_line(error)

    def _last(self) -> str:
        """The last error of a worker process, else of the process that waits for it."""
        found = {"": ""}
        while self._reader.poll():
            process, _, text = self._reader.recv_bytes().decode(errors="replace").partition("\n")
            found["" if process.startswith(ENGINE_PROCESS) else "worker"] = text
        return found.get("worker", found[""])
