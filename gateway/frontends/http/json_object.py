"""JSON objects of requests, parsed as by Triton's parser, and their members by kind."""

import json
import re
from codecs import BOM_UTF8
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from gateway.errors import Code, InferenceError
from gateway.frontends.http.json_layout import scan
from gateway.frontends.http.large_json import SLICED_BYTES, LargeText, Where, plain
from gateway.messages import NO_PARAMETERS
from gateway.tensor import Buffer
from gateway.threads import LARGE_BYTES

LITERAL = re.compile(r'"(?:[^"\\]|\\.)*+"?|-?(?:NaN|Inf(?:inity)?)', re.DOTALL)
"""A string, or a number that Triton's JSON has and the standard's lacks."""

LITERALS = (b"-Infinity", b"Infinity", b"-Inf", b"Inf", b"-NaN", b"NaN")
QUOTED = re.compile(rb'"(?:[^"\\]|\\.)*+"', re.DOTALL)

MEMBER_DEPTH = 2
"""The depth of arrays that are members of the outermost object."""
DATA_DEPTH = 4
"""The depth of `data`: in an input, in `inputs`, in the outermost object."""
TENSORS = ("inputs", "outputs")

STRING = "string as string"
BOOLEAN = "boolean as boolean"
UNSIGNED = "unsigned-integer as unsigned-integer"
ARRAY = "array as array"
OBJECT = "object as object"

Members = Mapping[str, Any]
MakeObject = Callable[[Sequence[tuple[str, Any]]], dict[str, Any]]

LENGTHENED = {"Inf": "Infinity", "-Inf": "-Infinity", "-NaN": "NaN"}
"""Literals that Python's parser lacks, and those that it has in their place."""


def parse_json_object(body: Buffer) -> dict[str, Any]:
    """The body as an object; of members with one name the last counts.

    InferenceError INTERNAL (500, as on Triton) if it is not an object, INVALID_ARG if it is not
    UTF-8 or has half a surrogate pair.
    """
    found: dict[str, Any] = plain(parse_generate(body))
    return found


def parse_optional_object(
    body: Buffer, parse: Callable[[Buffer], dict[str, Any]] = parse_json_object
) -> dict[str, Any]:
    """The same; no members without a body."""
    is_empty = len(body) <= LARGE_BYTES and not bytes(body).strip()
    return {} if is_empty else parse(body)


def parse_generate(body: Buffer) -> dict[str, Any]:
    """The same; members of a large body may be LongString and LargeArray."""
    if len(body) > SLICED_BYTES:
        return _parse_large(body)
    return _object(_parse(bytes(body).removeprefix(BOM_UTF8)))


def parse_request(body: Buffer) -> dict[str, Any]:
    """The JSON part of an infer request; of members with one name the first counts, as in Triton.

    The `data` of an input may be a LargeArray. InferenceError INTERNAL (500, as on Triton) if it
    is not an object, INVALID_ARG if it is not UTF-8 (Triton accepts that) or has half a surrogate
    pair.
    """
    if len(body) > SLICED_BYTES:
        return _parse_large_request(body)
    body = bytes(body).removeprefix(BOM_UTF8)
    found = _object(_parse(body))
    members = _count_members(found)
    # Fewer members than colons outside of strings means that some had the same name.
    if body.count(b":") != members and QUOTED.sub(b"", body).count(b":") != members:
        return _object(_parse_patiently(body))
    return found


def string_member(found: Members, key: str) -> str:
    """The string under that key; InferenceError INTERNAL if there is none."""
    value = found.get(key)
    if type(value) is str:
        return value
    raise _unusable(found, key, STRING)


def boolean_member(found: Members, key: str) -> bool:
    """The boolean under that key; InferenceError INTERNAL if there is none."""
    value = found.get(key)
    if type(value) is bool:
        return value
    raise _unusable(found, key, BOOLEAN)


def unsigned_member(found: Members, key: str) -> int:
    """The whole number of at least 0 under that key; InferenceError INTERNAL if there is none."""
    value = found.get(key)
    if type(value) is int and value >= 0:
        return value
    raise _unusable(found, key, UNSIGNED)


def array_member(found: Members, key: str) -> list[Any]:
    """The array under that key; InferenceError INTERNAL if there is none."""
    value = found.get(key)
    if type(value) is list:
        return value
    raise _unusable(found, key, ARRAY)


def shape_member(found: Members, key: str) -> tuple[int, ...]:
    """The array of whole numbers of at least 0 under that key; InferenceError INTERNAL if none."""
    dims = array_member(found, key)
    for dim in dims:
        if type(dim) is not int or dim < 0:
            raise mismatch(key, UNSIGNED)
    return tuple(dims)


def members_of(found: Any) -> Members:
    """The members of an object; any other value has none, as in Triton."""
    return found if type(found) is dict else NO_PARAMETERS


def parameters_of(found: Members) -> Members:
    """The optional parameters of an input or output."""
    return members_of(found.get("parameters"))


def mismatch(key: str, kinds: str) -> InferenceError:
    """The error for a member of the wrong kind."""
    return InferenceError(
        Code.INTERNAL, f"Unable to parse '{key}': attempt to access JSON non-{kinds}"
    )


def _parse_large(body: Buffer) -> dict[str, Any]:
    layout = scan(view := _without_mark(body), depth=MEMBER_DEPTH, nested=False)
    return _object(LargeText(view, layout, _parse_part, dict.__setitem__).parsed(_parse))


def _parse_large_request(body: Buffer) -> dict[str, Any]:
    layout = scan(view := _without_mark(body), depth=DATA_DEPTH, nested=True)

    def parse(body: bytes, where: Where) -> Any:
        found = _object(_parse(body, where))
        is_known = not layout.has_objects and layout.colons == _count_members(found)
        return found if is_known else _parse_patiently(body)

    parse_part = _parse_part_patiently if layout.has_objects else _parse_part
    found = _object(LargeText(view, layout, parse_part, dict.setdefault).parsed(parse))
    return {key: _listed(each) if key in TENSORS else plain(each) for key, each in found.items()}


def _listed(tensors: Any) -> Any:
    """Inputs or outputs with plain values, except their `data`."""
    if type(tensors) is not list:
        return plain(tensors)
    return [
        {key: each if key == "data" else plain(each) for key, each in tensor.items()}
        if type(tensor) is dict
        else plain(tensor)
        for tensor in tensors
    ]


def _without_mark(body: Buffer) -> memoryview:
    view = memoryview(body)
    return view[len(BOM_UTF8) :] if bytes(view[: len(BOM_UTF8)]) == BOM_UTF8 else view


def _parse(body: bytes, where: Where = int) -> Any:
    if not body.strip():
        raise _unparsable("The document is empty.", 0)
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        _insist_on_utf8(body, where)
        if b"NaN" not in body and b"Inf" not in body:
            raise _refusal(error, where) from None
    return _parse_literals(body, where)


def _parse_part(body: bytes, where: Where) -> Any:
    """A part of an array: mostly numbers, for which replacing the literals is enough."""
    if b'"' in body or (b"NaN" not in body and b"Inf" not in body):
        return _parse(body, where)
    shown = body
    for literal in LITERALS:
        shown = shown.replace(literal, b" 0 ")
    try:
        orjson.loads(shown)
    except orjson.JSONDecodeError:
        return _parse(body, where)
    known = body.replace(b"Infinity", b"Inf").replace(b"Inf", b"Infinity").replace(b"-NaN", b"NaN")
    return json.loads(known, parse_int=_integer)


def _parse_part_patiently(body: bytes, where: Where) -> Any:
    """A part of an array with objects; of members with one name the first counts."""
    found = _parse_part(body, where)
    return _parse_patiently(body) if b"{" in body else found


def _parse_literals(body: bytes, where: Where) -> Any:
    """JSON with NaN and infinities; of members with one name the last counts."""
    try:
        orjson.loads(LITERAL.sub(_zero, body.decode()))
    except orjson.JSONDecodeError as error:
        raise _refusal(error, where) from None
    return _parse_slowly(body)


def _insist_on_utf8(body: bytes, where: Where) -> None:
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise InferenceError(
            Code.INVALID_ARG,
            f"failed to parse the request JSON buffer: found byte 0x{body[error.start]:02x} at "
            f"{where(error.start)}, expected UTF-8; what is no text can be sent as binary data",
        ) from None


def _refusal(error: orjson.JSONDecodeError, where: Where) -> InferenceError:
    if "surrogate" in error.msg:
        # As bytes that are not UTF-8 (Triton: the same words, with a 500).
        text = "The surrogate pair in string is invalid."
        return _unparsable(text, where(error.pos), Code.INVALID_ARG)
    return _unparsable(error.msg, where(error.pos))


def _zero(found: re.Match[str]) -> str:
    # With blanks, or it would join an adjacent number.
    return found[0] if found[0].startswith('"') else " 0 "


def _lengthen(found: re.Match[str]) -> str:
    return LENGTHENED.get(found[0], found[0])


def _parse_patiently(body: bytes) -> Any:
    """Of members with one name the first counts; the JSON must be valid."""
    return _parse_slowly(body, _first_of_each)


def _parse_slowly(body: bytes, make: MakeObject | None = None) -> Any:
    """Python's parser takes the literals; `make` makes an object of its members."""
    try:
        text = LITERAL.sub(_lengthen, body.decode())
        return json.loads(text, object_pairs_hook=make, parse_int=_integer)
    except RecursionError:
        raise _unparsable("The document is nested too deep.", 0) from None


def _first_of_each(members: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in members:
        found.setdefault(name, value)
    return found


def _integer(text: str) -> int | float:
    """An integer of 64 bits, or a double if it is larger."""
    found = int(text) if len(text) <= len("-9223372036854775808") else 2**64
    return found if -(2**63) <= found < 2**64 else float(text)


def _count_members(found: Mapping[str, Any]) -> int:
    """The number of members in the known objects of a request."""
    count = len(found)
    parameters = found.get("parameters")
    if type(parameters) is dict:
        count += len(parameters)
    for key in TENSORS:
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


def _unusable(found: Members, key: str, kinds: str) -> InferenceError:
    if key in found:
        return mismatch(key, kinds)
    return InferenceError(
        Code.INTERNAL,
        f"Unable to parse '{key}': attempt to access non-existing object member '{key}'",
    )
