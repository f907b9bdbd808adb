"""Errors of vLLM and of pydantic's validation as errors of the gateway."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NamedTuple, Self

from jinja2 import TemplateError
from pydantic import ValidationError
from vllm.exceptions import (
    GracefulHTTPError,
    RetryableRequestError,
    VLLMClientError,
    VLLMError,
)
from vllm.v1.engine.exceptions import EngineDeadError

from backends.vllm.settings import EngineModel, LoraRefusal, hide_folders
from backends.vllm.start_reports import StartReports, one_line
from gateway.errors import Code, InferenceError, died

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

_NAME = re.compile("[a-z0-9_]+")
_TYPES = frozenset(
    [
        "str",
        "int",
        "float",
        "bool",
        "bytes",
        "list",
        "tuple",
        "dict",
        "set",
        "frozenset",
        "none",
        "nullable",
        "union",
        "call",
    ]
)
"""Parts of a place that are neither names nor indices."""

_OTHER_TYPE = ("_type", "_parsing")
"""Suffixes of the kinds of mistakes of values that do not have the type at all."""

Error = Mapping[str, Any]


class Failures:
    """Translates errors of one model for its clients."""

    def __init__(self, model: str, folders: Mapping[str, str]) -> None:
        self.model = model
        self._folders = folders

    def explain(self, error: Exception) -> InferenceError:
        """The error of the contract for one of `FAILURES`."""
        if isinstance(error, EngineDeadError):
            return died(f"model '{self.model}': its engine has stopped; retry shortly")
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

    `reporter` is passed to each process of the engine. Its stages are logged meanwhile.
    """

    def __init__(self, model: EngineModel) -> None:
        self._model = model
        self._reports = StartReports(model.name)
        self.reporter = self._reports.reporter

    def __enter__(self) -> Self:
        self._reports.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._reports.__exit__()
        if isinstance(error, EngineDeadError) or (
            isinstance(error, InferenceError) and error.code in OF_ENGINE
        ):
            raise self._failure(self._last() or self._text(error)) from error

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
        for report in self._reports.errors:
            found["" if report.process.startswith(ENGINE_PROCESS) else "worker"] = report.text
        return found.get("worker", found[""])


class FieldMistake(NamedTuple):
    """The mistake of a value, and the names and indices of its place, "" for none."""

    message: str
    place: str


def first_mistake(error: Exception) -> str:
    """The first mistake and its place; any other error's own text."""
    if not isinstance(error, ValidationError):
        return str(error) or type(error).__name__
    message, place = mistake_of(error)
    return f"{message} (at {place})" if place else message


def mistake_of(error: ValidationError) -> FieldMistake:
    """The first mistake; for a union of types, that of the type which fits best.

    pydantic lists mistakes for each type that it tried.
    """
    return _choose(error.errors(include_url=False, include_input=False), 0)


def _choose(errors: Sequence[Error], depth: int) -> FieldMistake:
    """One of the mistakes, whose places are equal up to that depth."""
    first = errors[0]
    if len(errors) == 1 or len(first["loc"]) <= depth:
        return FieldMistake(_message(first), _place(first))
    groups: dict[Any, list[Error]] = {}
    for each in errors:
        groups.setdefault(each["loc"][depth : depth + 1], []).append(each)
    (part,) = first["loc"][depth : depth + 1]
    if not _is_type(part):
        return _choose(groups[part,], depth + 1)
    tried = [group for key, group in groups.items() if key and _is_type(key[0])]
    near = [group for group in tried if not _is_other(group[0], depth)]
    if not near:
        return _either([group[0] for group in tried], _place(first))
    kinds = [group[-1] for group in near if group[-1]["type"] == "literal_error"]
    if len(kinds) == len(near) > 1 and len({_place(each) for each in kinds}) == 1:
        return _either(kinds, _place(kinds[0]))
    return _choose(min(near, key=lambda group: _rank(group, depth)), depth + 1)


def _either(errors: Sequence[Error], place: str) -> FieldMistake:
    """A value of none of several types: distinct texts, without those that extend another."""
    texts = dict.fromkeys(map(_message, errors))
    kept = [each for each in texts if not any(each.startswith(o) for o in texts if o != each)]
    return FieldMistake(" or ".join(kept), place)


def _rank(group: Sequence[Error], depth: int) -> tuple[int, int]:
    """Small for few mistakes, and for late ones."""
    behind = group[0]["loc"][depth + 1 : depth + 2]
    index = behind[0] if behind and isinstance(behind[0], int) else 0
    return len(group), -index


def _is_other(error: Error, depth: int) -> bool:
    return len(error["loc"]) == depth + 1 and error["type"].endswith(_OTHER_TYPE)


def _is_type(part: int | str) -> bool:
    return isinstance(part, str) and (part in _TYPES or not _NAME.fullmatch(part))


def _place(error: Error) -> str:
    return ".".join(str(part) for part in error["loc"] if not _is_type(part))


def _message(error: Error) -> str:
    message: str = error["msg"]
    return message.removeprefix("Value error, ").removeprefix("Assertion failed, ")
