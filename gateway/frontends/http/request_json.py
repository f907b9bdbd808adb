"""The JSON of a request: one object, parsed as Triton's parser does."""

import json
import re
from codecs import BOM_UTF8
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from gateway.errors import Code, InferenceError

LITERAL = re.compile(r'"(?:[^"\\]|\\.)*+"?|-?(?:NaN|Inf(?:inity)?)', re.DOTALL)
"""A string, which stays as it is, or a number of Triton's JSON that the standard's has not."""

LENGTHENED = {"Inf": "Infinity", "-Inf": "-Infinity", "-NaN": "NaN"}
"""How Python's parser knows those of the literals that it does not."""


def parse_json_object(body: bytes) -> dict[str, Any]:
    """The body as an object; of members with one name the last counts.

    InferenceError INTERNAL (a 500, as Triton) if it is not one, INVALID_ARG if it is not UTF-8 or
    has half a surrogate pair.
    """
    return _object(_parse(body.removeprefix(BOM_UTF8)))


def parse_request(body: bytes) -> dict[str, Any]:
    """The JSON part of an infer request; of members with one name the first counts, as in Triton.

    InferenceError INTERNAL (a 500, as Triton) if it is not an object, INVALID_ARG if it is not
    UTF-8 (of which Triton sees nothing) or has half a surrogate pair.
    """
    body = body.removeprefix(BOM_UTF8)
    found = _object(_parse(body))
    # Without a colon in a string, fewer members than colons means that some had the same name.
    if body.count(b":") != _count_members(found):
        return _object(_parse_patiently(body))
    return found


def _parse(body: bytes) -> Any:
    if not body.strip():
        raise _unparsable("The document is empty.", 0)
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        _insist_on_utf8(body)
        if b"NaN" not in body and b"Inf" not in body:
            raise _refusal(error) from None
    return _parse_literals(body)


def _parse_literals(body: bytes) -> Any:
    """JSON with NaN and infinities, which is refused for whatever else is wrong with it."""
    try:
        orjson.loads(LITERAL.sub(_zero, body.decode()))
    except orjson.JSONDecodeError as error:
        raise _refusal(error) from None
    return _parse_patiently(body)


def _insist_on_utf8(body: bytes) -> None:
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise InferenceError(
            Code.INVALID_ARG,
            f"failed to parse the request JSON buffer: found byte 0x{body[error.start]:02x} at "
            f"{error.start}, expected UTF-8; what is no text can be sent as binary data",
        ) from None


def _refusal(error: orjson.JSONDecodeError) -> InferenceError:
    if "surrogate" in error.msg:
        # No more a text than bytes that are not UTF-8 (Triton: the same words, with a 500).
        text = "The surrogate pair in string is invalid."
        return _unparsable(text, error.pos, Code.INVALID_ARG)
    return _unparsable(error.msg, error.pos)


def _zero(found: re.Match[str]) -> str:
    # With blanks, or it would become a part of a number that it touches.
    return found[0] if found[0].startswith('"') else " 0 "


def _lengthen(found: re.Match[str]) -> str:
    return LENGTHENED.get(found[0], found[0])


def _parse_patiently(body: bytes) -> Any:
    """Slower, but it knows the literals and sees every member; the JSON must be known as good."""
    try:
        text = LITERAL.sub(_lengthen, body.decode())
        return json.loads(text, object_pairs_hook=_first_of_each, parse_int=_integer)
    except RecursionError:
        raise _unparsable("The document is nested too deep.", 0) from None


def _first_of_each(members: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in members:
        found.setdefault(name, value)
    return found


def _integer(text: str) -> int | float:
    """An integer of 64 bits; what is larger is a double."""
    found = int(text) if len(text) <= len("-9223372036854775808") else 2**64
    return found if -(2**63) <= found < 2**64 else float(text)


def _count_members(found: Mapping[str, Any]) -> int:
    """How many members the objects have that a request is known to consist of."""
    count = len(found)
    parameters = found.get("parameters")
    if type(parameters) is dict:
        count += len(parameters)
    for key in ("inputs", "outputs"):
        for tensor in _list(found.get(key)):
            if type(tensor) is dict:
                parameters = tensor.get("parameters")
                count += len(tensor) + (len(parameters) if type(parameters) is dict else 0)
    return count


def _list(value: Any) -> Sequence[Any]:
    return value if type(value) is list else ()


def _object(found: Any) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise InferenceError(
            Code.INTERNAL,
            f"the request is a JSON {_kind(found)}, expected an object: attempt to access JSON "
            "non-object as object",
        )
    return found


def _kind(value: Any) -> str:
    names = {list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")


def _unparsable(reason: str, offset: int, code: Code = Code.INTERNAL) -> InferenceError:
    return InferenceError(code, f"failed to parse the request JSON buffer: {reason} at {offset}")
