"""The size of structures, which decides how long the library compiles them."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

MOST_DEPTH = 64
"""Nested brackets; the library compiles by recursion."""
_CLASS = r"\[\^?\]?(?:\\.|[^\]\\])*\]"
_TIMES = r"\{(\d*)(?:,(\d*))?\}"
REGEX = re.compile(rf"\\.|{_CLASS}|{_TIMES}|.", re.DOTALL)
"""An escape, a class of characters, a repetition, or one character."""
QUOTED = r'"(?:\\.|[^"\\])*"'
GRAMMAR = re.compile(rf"{QUOTED}|#[^\n]*|{_CLASS}|{_TIMES}|[\w-]+|\S", re.DOTALL)
"""A text, a comment, a class, a repetition, a name, or one character."""
JSON = re.compile(rf"{QUOTED}|.", re.DOTALL)
WIDE_ESCAPES = {r"\w", r"\W", r"\D", r"\S"}
FEW_LETTERS = 24
"""A class that is written with fewer letters, and without a range, admits few."""
LENGTHS = ("minLength", "maxLength")


@dataclass(frozen=True, slots=True)
class States:
    """States of an automaton, and those of them that admit many letters."""

    every: int = 0
    wide: int = 0

    def __add__(self, other: "States") -> "States":
        return States(self.every + other.every, self.wide + other.wide)

    def __mul__(self, times: int) -> "States":
        return States(self.every * times, self.wide * times)


def depth(kind: str, text: str) -> int:
    """The depth of nested brackets in a structure, also in the patterns of a JSON schema."""
    if kind == "regex":
        return _depth(REGEX, text, "(", ")")
    if kind == "grammar":
        return _depth(GRAMMAR, text, "({", ")}")
    deepest = _depth(JSON, text, "{[", "}]")
    if deepest > MOST_DEPTH:
        return deepest
    return max([deepest, *(_depth(REGEX, each, "(", ")") for each in _patterns(_parsed(text)))])


def _depth(pieces: "re.Pattern[str]", text: str, opening: str, closing: str) -> int:
    found = deepest = 0
    for piece in pieces.finditer(text):
        found = max(0, found + (piece.group() in opening) - (piece.group() in closing))
        deepest = max(deepest, found)
    return deepest


def size(kind: str, text: str) -> States:
    """About as many states as an automaton of the structure has."""
    if kind == "regex":
        return _states(REGEX, text)
    if kind == "grammar":
        return _states(GRAMMAR, text)
    schema = _parsed(text)
    lengths = sum(_lengths(schema))
    patterns = [_states(REGEX, each) for each in _patterns(schema)]
    return sum(patterns, States(lengths, lengths))


def _states(pieces: "re.Pattern[str]", text: str) -> States:
    """Repetitions multiply what they repeat."""
    totals, last = [States()], States()
    for piece in pieces.finditer(text):
        found = piece.group()
        if found == "(":
            totals.append(States())
            last = States()
        elif found == ")" and len(totals) > 1:
            last = totals.pop()
            totals[-1] += last
        elif found[0] == "{" and len(found) > 1:
            times = int(piece.group(2) or piece.group(1) or 1)
            totals[-1] += last * max(0, times - 1)
            last *= times
        else:
            last = _state(found)
            totals[-1] += last
    return sum(totals, States())


def _state(found: str) -> States:
    if found[0] == "[" and len(found) > 1:
        wide = found[1] == "^" or "-" in found[1:-1] or len(found) > FEW_LETTERS
    else:
        wide = found == "." or found in WIDE_ESCAPES
    return States(1, int(wide))


def _parsed(schema: str) -> Any:
    """The schema if it has objects; what is no JSON the library refuses in its own words."""
    try:
        found = json.loads(schema)
    except (ValueError, RecursionError):
        return []
    return found if isinstance(found, dict | list) else []


def _objects(found: Any) -> Iterator[dict[str, Any]]:
    """Every object of a schema."""
    if isinstance(found, dict):
        yield found
    for each in found.values() if isinstance(found, dict) else found:
        if isinstance(each, dict | list):
            yield from _objects(each)


def _patterns(schema: Any) -> Iterator[str]:
    for each in _objects(schema):
        if isinstance(pattern := each.get("pattern"), str):
            yield pattern
        if isinstance(properties := each.get("patternProperties"), dict):
            yield from properties


def _lengths(schema: Any) -> Iterator[int]:
    """The greatest length of each text that has limits."""
    for each in _objects(schema):
        yield max([0, *(n for name in LENGTHS if isinstance(n := each.get(name), int))])
