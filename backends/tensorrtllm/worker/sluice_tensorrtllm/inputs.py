"""The values of one request, by the names of its inputs."""

import json
from typing import Any

from .refusals import Refusal

NOT_SAMPLING = frozenset({"id"})
"""Request parameters that HTTP generate hands on and that say nothing about sampling."""


class Inputs:
    """Reads inputs of any rank; each read is marked, so that one nobody knows can be refused."""

    def __init__(self, request: Any) -> None:
        self._tensors = {tensor.name(): tensor for tensor in request.inputs()}
        self._unread = set(self._tensors)
        self.parameters = {
            key: value
            for key, value in json.loads(request.parameters() or "{}").items()
            if key not in NOT_SAMPLING
        }

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
            raise Refusal(f"input '{name}' has {len(found)} elements, expected 1")
        return found[0] if found else None

    def text(self, name: str) -> str | None:
        """The only text; None if the input is missing."""
        found = self.one(name)
        return None if found is None else _decoded(name, found)

    def flag(self, *names: str) -> bool | None:
        """The first of these that was sent."""
        found = [self.one(name) for name in names]
        return next((bool(each) for each in found if each is not None), None)

    def json(self, name: str, kind: type) -> Any:
        """What the JSON in an input says; None if the input is missing."""
        text = self.text(name)
        if text is None:
            return None
        try:
            found = json.loads(text)
        except ValueError as error:
            raise Refusal(f"input '{name}' is not valid JSON: {error}") from None
        if not isinstance(found, kind):
            expected = "a list" if kind is list else "an object"
            raise Refusal(f"input '{name}' is JSON, but {expected} is expected in it")
        return found

    def refuse_unread(self) -> None:
        """Refuse inputs that the config declares and that mean nothing here."""
        if self._unread:
            raise Refusal(
                f"input '{sorted(self._unread)[0]}' has no counterpart in TensorRT-LLM's LLM API; "
                "leave it out",
                "UNSUPPORTED",
            )


def _decoded(name: str, value: bytes | str) -> str:
    if isinstance(value, str):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise Refusal(
            f"input '{name}' is not valid UTF-8: {error.reason} at byte {error.start}"
        ) from None
