"""The sampling parameters of a chat: what the user has set, as values that JSON has."""

import json
from collections.abc import Mapping
from typing import Any

from gateway.tools.chat.server import ChatError

ONE_ANSWER = ("n", "best_of")
"""The chat shows one answer, and keeps one."""


class Sampling:
    """Names and values. Which names there are is the server's to say, with the next question."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._values = dict(given)

    @property
    def values(self) -> Mapping[str, Any]:
        """All that is set."""
        return self._values

    def set(self, name: str, text: str) -> None:
        """Set one from what was typed, JSON or else a text; ChatError for several answers."""
        value = _read(text)
        if name in ONE_ANSWER and value != 1:
            raise ChatError(f"'{name}' is {text}, but a chat shows one answer at a time")
        self._values[name] = value

    def unset(self, name: str) -> bool:
        """Leave one to the model again; False if it was not set."""
        known = name in self._values
        self._values.pop(name, None)
        return known

    def __str__(self) -> str:
        return ", ".join(f"{name} = {json.dumps(value)}" for name, value in self._values.items())


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        return text
