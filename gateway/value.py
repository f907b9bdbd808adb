"""Dataclasses for values that are created for every request."""

from dataclasses import dataclass, field
from typing import Any, TypeVar, dataclass_transform

Class = TypeVar("Class", bound=type[Any])


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def value(cls: Class) -> Class:
    """A dataclass that is frozen for the type checker only.

    A dataclass that is frozen at run time takes four times as long to create.
    """
    return _made(cls, kw_only=False)


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def keyword_value(cls: Class) -> Class:
    """As `value`, with keyword arguments only."""

    return _made(cls, kw_only=True)


def _made(cls: Class, *, kw_only: bool) -> Class:
    made: Any = dataclass(slots=True, unsafe_hash=True, kw_only=kw_only)(cls)
    found: Class = made
    return found
