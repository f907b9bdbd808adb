"""Validation errors of pydantic as one line: the most specific mistake, and its place."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import ValidationError

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
