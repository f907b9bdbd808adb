"""Inputs of a request to an LLM, and refusals of them."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from sluice_worker.errors import HOST_PATH

MAX_TEXT = 1000
TOO_DEEP = "it is nested too deeply"
_NAME = re.compile("[A-Za-z0-9_]+")

GUIDE_TYPE, GUIDE = "guided_decoding_guide_type", "guided_decoding_guide"
"""Sampling parameters of a guided answer: Triton's type of the guide, and the guide itself."""
LORA_NAME = "lora_name"
"""The sampling parameter with the name of an adapter."""
NOT_SAMPLING = frozenset({"id"})
"""Request parameters of HTTP generate that are no sampling parameters."""


class Mistake(Exception):
    """The text is for clients; `code` is the name of one of Triton's codes."""

    def __init__(self, message: str, code: str = "INVALID_ARG") -> None:
        super().__init__(message)
        self.code = code


def clean(error: BaseException) -> str:
    """The text of a library's exception: its first error, without paths of the host, bounded."""
    text = HOST_PATH.sub("<path>", _first_mistake(error))
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}..."


def _first_mistake(error: BaseException) -> str:
    """pydantic lists all errors with values and links; only the first error is used."""
    mistakes = getattr(error, "errors", None)
    if not callable(mistakes):
        return str(error) or type(error).__name__
    first = mistakes()[0]
    place = ".".join(takewhile(_NAME.fullmatch, map(str, first["loc"])))
    return f"'{place}': {first['msg']}" if place else str(first["msg"])


class Inputs:
    """Reads inputs of any rank, and marks each read one: unread inputs can be refused."""

    def __init__(self, request: Any) -> None:
        self._tensors = {tensor.name(): tensor for tensor in request.inputs()}
        self._unread = set(self._tensors)
        found = parsed("the request's parameters are", request.parameters() or "{}")
        self.parameters = {key: value for key, value in found.items() if key not in NOT_SAMPLING}

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def values(self, name: str) -> list[Any]:
        """The elements; none if the input is missing."""
        self._unread.discard(name)
        tensor = self._tensors.get(name)
        return [] if tensor is None else tensor.as_numpy().reshape(-1).tolist()

    def texts(self, name: str) -> list[str]:
        """The elements of a BYTES input, but for empty ones."""
        return [text for each in self.values(name) if (text := _decoded(name, each))]

    def one(self, name: str) -> Any:
        """The only element; None if the input is missing."""
        found = self.values(name)
        if name in self and len(found) != 1:
            raise Mistake(f"input '{name}' has {len(found)} elements, expected 1")
        return found[0] if found else None

    def text(self, name: str) -> str | None:
        """The only text; None if the input is missing."""
        found = self.one(name)
        return None if found is None else _decoded(name, found)

    def flag(self, *names: str) -> bool | None:
        """The value of the first of these that was sent."""
        found = [self.one(name) for name in names]
        return next((bool(each) for each in found if each is not None), None)

    def json(self, name: str, kind: type) -> Any:
        """The JSON value of an input; None if the input is missing."""
        text = self.one(name)
        if text is None:
            return None
        found = parsed(f"input '{name}' is", text)
        if not isinstance(found, kind):
            expected = "a list" if kind is list else "an object"
            raise Mistake(f"input '{name}' is JSON, but {expected} is expected in it")
        return found

    def refuse_unread(self) -> None:
        """Refuse inputs that the config declares and that have no meaning here."""
        if self._unread:
            raise Mistake(
                f"input '{sorted(self._unread)[0]}' has no counterpart in this model's "
                "engine; leave it out",
                "UNSUPPORTED",
            )


def parsed(subject: str, text: bytes | str) -> Any:
    """The JSON value in a client's text; Mistake if "`subject` not valid JSON"."""
    try:
        return json.loads(text)
    except ValueError as error:  # also of bytes that are no text
        raise Mistake(f"{subject} not valid JSON: {error}") from None
    except RecursionError:
        raise Mistake(f"{subject} not valid JSON: {TOO_DEEP}") from None


def _decoded(name: str, value: bytes | str) -> str:
    if isinstance(value, str):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise Mistake(
            f"input '{name}' is not valid UTF-8: {error.reason} at byte {error.start}"
        ) from None


@dataclass(frozen=True)
class LlmRequest:
    """One prompt: a text, token ids, or messages for the chat template, with its variables.

    `sampling` has the library's names, but for the guide and for `lora_name`.
    """

    text: str | None = None
    tokens: list[int] | None = None
    messages: list[Any] | None = None
    template: Mapping[str, Any] = field(default_factory=dict)
    stream: bool = False
    echo: bool = False
    outputs: frozenset[str] = frozenset()
    sampling: Mapping[str, Any] = field(default_factory=dict)
    lora_number: int | None = None
