"""Members of a JSON object by name and kind; Triton's words for one that is missing or other."""

from collections.abc import Mapping
from typing import Any

from gateway.errors import Code, InferenceError
from gateway.messages import NO_PARAMETERS

STRING = "string as string"
BOOLEAN = "boolean as boolean"
UNSIGNED = "unsigned-integer as unsigned-integer"
ARRAY = "array as array"
OBJECT = "object as object"

Members = Mapping[str, Any]


def string(found: Members, key: str) -> str:
    """The string under that key; InferenceError INTERNAL if there is none."""
    value = found.get(key)
    if type(value) is str:
        return value
    raise _unusable(found, key, STRING)


def boolean(found: Members, key: str) -> bool:
    """The boolean under that key; InferenceError INTERNAL if there is none."""
    value = found.get(key)
    if type(value) is bool:
        return value
    raise _unusable(found, key, BOOLEAN)


def unsigned(found: Members, key: str) -> int:
    """The whole number of at least 0 under that key; InferenceError INTERNAL if there is none."""
    value = found.get(key)
    if type(value) is int and value >= 0:
        return value
    raise _unusable(found, key, UNSIGNED)


def array(found: Members, key: str) -> list[Any]:
    """The array under that key; InferenceError INTERNAL if there is none."""
    value = found.get(key)
    if type(value) is list:
        return value
    raise _unusable(found, key, ARRAY)


def shape(found: Members, key: str) -> tuple[int, ...]:
    """The array of whole numbers of at least 0 under that key; InferenceError INTERNAL if none."""
    dims = array(found, key)
    for dim in dims:
        if type(dim) is not int or dim < 0:
            raise mismatch(key, UNSIGNED)
    return tuple(dims)


def of(found: Any) -> Members:
    """The members of an object; whatever else it is has none, as in Triton."""
    return found if type(found) is dict else NO_PARAMETERS


def parameters(found: Members) -> Members:
    """The parameters of an input or output, which may lack them."""
    return of(found.get("parameters"))


def mismatch(key: str, kinds: str) -> InferenceError:
    """Something of another kind than it must be."""
    return InferenceError(
        Code.INTERNAL, f"Unable to parse '{key}': attempt to access JSON non-{kinds}"
    )


def _unusable(found: Members, key: str, kinds: str) -> InferenceError:
    if key in found:
        return mismatch(key, kinds)
    return InferenceError(
        Code.INTERNAL,
        f"Unable to parse '{key}': attempt to access non-existing object member '{key}'",
    )
