"""Strict reading of JSON: errors name the path of a member, and unknown members are refused."""

import json
from typing import Any, NoReturn

from gateway.errors import Code, InferenceError

SHOWN_CHARS = 60


def refuse(path: str, problem: str) -> NoReturn:
    """Raise INVALID_ARG for the value at a path."""
    raise InferenceError(Code.INVALID_ARG, f"{path}: {problem}" if path else problem)


def shown(value: Any) -> str:
    """The JSON of a value, shortened."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}…"


def parse(text: bytes | str) -> Any:
    """The value of a text; INVALID_ARG if it is no JSON, or an object repeats a member."""
    try:
        return json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        refuse("", f"is no JSON: {error}")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"an object repeats the member '{repeated}'")
    return found


class StrictObject:
    """The members of a JSON object, each taken once; `end` refuses those that are left.

    `whole` is its own path. Raises INVALID_ARG, also if the value is no object.
    """

    def __init__(self, value: Any, path: str = "") -> None:
        self.whole = path
        if not isinstance(value, dict):
            refuse(path, f"is {shown(value)}, expected an object")
        self._left: dict[str, Any] = dict(value)

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def path(self, name: str) -> str:
        """The path of a member."""
        return f"{self.whole}.{name}" if self.whole else name

    def names(self) -> list[str]:
        """The members that are left."""
        return list(self._left)

    def take(self, name: str, default: Any = None) -> Any:
        """The value of a member, or the default."""
        return self._left.pop(name, default)

    def object(self, name: str) -> "StrictObject":
        """The object of a member."""
        return StrictObject(self._required(name), self.path(name))

    def text(self, name: str, default: str | None = None) -> str:
        """The text of a member; without a default the member is required."""
        found = self._required(name) if default is None else self.take(name, default)
        if not isinstance(found, str):
            self.refuse(name, found, "a text")
        return found

    def flag(self, name: str) -> bool:
        """The boolean of a member; False if it is missing."""
        found = self.take(name, False)
        if not isinstance(found, bool):
            self.refuse(name, found, "true or false")
        return found

    def number(self, name: str, default: float, least: float, most: float) -> float:
        """The number of a member, within bounds."""
        found = self.take(name, default)
        if isinstance(found, bool) or not isinstance(found, int | float):
            self.refuse(name, found, f"a number from {least:g} to {most:g}")
        if not least <= found <= most:
            self.refuse(name, found, f"a number from {least:g} to {most:g}")
        return float(found)

    def refuse(self, name: str, found: Any, expected: str) -> NoReturn:
        """Raise INVALID_ARG for the value of a member."""
        refuse(self.path(name), f"is {shown(found)}, expected {expected}")

    def end(self, *known: str) -> None:
        """Refuse the members that are left; `known` are the names that the object may have."""
        for name in self._left:
            refuse(self.path(name), f"is no member, expected one of {', '.join(known)}")

    def _required(self, name: str) -> Any:
        if name not in self._left:
            refuse(self.path(name), "is missing")
        return self._left.pop(name)
