"""Errors that the processes of an engine log while it loads."""

import multiprocessing
import os
from types import TracebackType
from typing import Self

from vllm.v1.engine.exceptions import EngineDeadError

from backends.vllm.error_sender import ErrorSender, one_line
from backends.vllm.settings import EngineModel, hide_folders
from gateway.errors import Code, InferenceError

ENGINE_PROCESS = "EngineCore"

OF_ENGINE = (Code.INTERNAL, Code.UNAVAILABLE)
"""Codes of loads that failed in the engine; arguments that it cannot use are INVALID_ARG."""


class EngineErrors:
    """Names the engine's own last error where its load fails; used by `with` around the load.

    `sender` travels to each process that is started with it.
    """

    def __init__(self, model: EngineModel) -> None:
        self._model = model
        self._reader, writer = multiprocessing.Pipe(duplex=False)
        # A process that logs more than a pipe holds goes on, and the rest is dropped.
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
        """The last error of a worker, which computes, else of the process that waits for it."""
        found = {"": ""}
        while self._reader.poll():
            process, _, text = self._reader.recv_bytes().decode(errors="replace").partition("\n")
            found["" if process.startswith(ENGINE_PROCESS) else "worker"] = text
        return found.get("worker", found[""])
