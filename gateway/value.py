"""Immutable values that are made for every request."""

from dataclasses import dataclass, field
from typing import Any, TypeVar, dataclass_transform

Class = TypeVar("Class", bound=type[Any])


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def value(cls: Class) -> Class:
    """A dataclass that the type checker keeps frozen, and nothing else does.

    What freezes a dataclass while it runs makes it four times as slow to create.
    """
    return _made(cls, kw_only=False)


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def keyword_value(cls: Class) -> Class:
    """The same, made with keywords only."""
    return _made(cls, kw_only=True)


def _made(cls: Class, *, kw_only: bool) -> Class:
    made: Any = dataclass(slots=True, unsafe_hash=True, kw_only=kw_only)(cls)
    found: Class = made
    return found
