"""Fields of a configuration: those of its dataclasses, and those of a text by line."""

import dataclasses
import re
import types
import typing
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from typing import Any

from gateway.config import WRAPPED


class Cardinality(Enum):
    """The number of values of a field."""

    ONE = "one"
    OPTIONAL = "optional"
    MANY = "many"
    MAPPED = "mapped"


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldShape:
    """One field: `name` in the message, `attribute` in the dataclass, and its values.

    `value` is the type of one value: the only one, one of many, or one of a mapping with keys of
    type `key`. `wrapped` names the field in which the message wraps a mapping's values.
    """

    name: str
    attribute: str
    cardinality: Cardinality
    value: type[Any]
    key: type[Any] = str
    wrapped: str = ""

    @property
    def nested(self) -> bool:
        """Its values are dataclasses, and so messages."""
        return dataclasses.is_dataclass(self.value)


@cache
def shapes(owner: Any) -> tuple[FieldShape, ...]:
    """The fields of a dataclass, in their order."""
    hints = typing.get_type_hints(owner)
    return tuple(_shape(each, hints[each.name]) for each in dataclasses.fields(owner))


def _shape(declared: dataclasses.Field[Any], hint: Any) -> FieldShape:
    cardinality, key, value = _unwrap(hint)
    return FieldShape(
        name=declared.name.removesuffix("_"),
        attribute=declared.name,
        cardinality=cardinality,
        value=value,
        key=key,
        wrapped=declared.metadata.get(WRAPPED, ""),
    )


def _unwrap(hint: Any) -> tuple[Cardinality, type[Any], type[Any]]:
    """The cardinality of an annotation, and the types of its keys and values."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:
        return Cardinality.OPTIONAL, str, arguments[0]
    if origin is tuple:
        return Cardinality.MANY, str, arguments[0]
    if origin is Mapping:
        return Cardinality.MAPPED, arguments[0], arguments[1]
    return Cardinality.ONE, str, hint


FieldTree = Mapping[str, "FieldTree"]
"""The fields of a message by name, each with those below it."""


@cache
def field_tree(owner: Any) -> FieldTree:
    """Every field of the text form, with the fields below it; mappings have `key`, `value`."""
    return {each.name: _below(each) for each in shapes(owner)}


def _below(shape: FieldShape) -> FieldTree:
    owner: Any = shape.value
    below: FieldTree = {shape.wrapped: {}} if shape.wrapped else {}
    if shape.nested:
        below = field_tree(owner)
    return {"key": {}, "value": below} if shape.cardinality is Cardinality.MAPPED else below


TOKEN = re.compile(
    r"""
    (?P<newline> \n )
  | (?P<blank>   [^\S\n]+ | \#[^\n]* )
  | (?P<string>  "(?:\\.|[^"\\\n])*"? | '(?:\\.|[^'\\\n])*'? )
  | (?P<word>    [\w.]+(?:-[\w.]+)* )
  | (?P<mark>    . )
    """,
    re.VERBOSE,
)
CLOSERS = {"{": "}", "<": ">", "[": "]"}


@dataclass(frozen=True, slots=True)
class ScannedField:
    """A field in a text, by the names that lead to it.

    `indices` has, for each name, the position among the messages of that name, from 0.
    """

    names: tuple[str, ...]
    indices: tuple[int, ...]
    line: int


@dataclass(slots=True)
class _Bracket:
    """An open bracket; inside the bracket of a list, names are values."""

    closer: str
    names: tuple[str, ...] = ()
    indices: tuple[int, ...] = ()
    last: str = ""
    seen: Counter[str] = field(default_factory=Counter)


def scan(text: str) -> Iterator[ScannedField]:
    """The fields of a text, in its order.

    Protobuf's parser has lines only for mistakes; this one has the line of every field. It never
    fails: it stops where brackets do not match.
    """
    open_brackets = [_Bracket("")]
    before = ""
    for token, line in _tokens(text):
        innermost = open_brackets[-1]
        if token in CLOSERS:
            open_brackets.append(_opened(token, open_brackets))
        elif token in CLOSERS.values():
            if token != innermost.closer:
                return
            open_brackets.pop()
        elif _is_name(token, before) and innermost.closer != "]":
            innermost.last = token
            names = (*innermost.names, token)
            yield ScannedField(names, (*innermost.indices, innermost.seen[token]), line)
        before = token


def _tokens(text: str) -> Iterator[tuple[str, int]]:
    line = 1
    for match in TOKEN.finditer(text):
        if match.lastgroup == "newline":
            line += 1
        elif match.lastgroup != "blank":
            yield match[0], line


def _is_name(token: str, before: str) -> bool:
    return token.isidentifier() and before not in (":", "-")


def _opened(token: str, open_brackets: list[_Bracket]) -> _Bracket:
    closer = CLOSERS[token]
    if closer == "]":
        return _Bracket(closer)
    owner = next(each for each in reversed(open_brackets) if each.closer != "]")
    index = owner.seen[owner.last]
    owner.seen[owner.last] += 1
    return _Bracket(closer, (*owner.names, owner.last), (*owner.indices, index))
