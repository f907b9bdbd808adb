"""Schema of a configuration: the fields of its messages, by the dataclasses that hold them."""

import dataclasses
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
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
