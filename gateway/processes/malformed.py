"""Errors of messages that do not fit, with the found and the expected value."""

import re

import msgspec

from gateway.errors import Code, InferenceError
from gateway.tensor import Datatype

UNREADABLE = (RecursionError, ValueError)
"""The errors of messages that do not fit."""

PLACE = re.compile(r" - at `\$(\[[0-9]+\])+`$")
INDEX = re.compile("[0-9]+")
"""The place of a value in an error of msgspec, and its indices."""

DATATYPE_DEPTH = 3
"""The indices of a datatype: tensors, one tensor, its field."""

SHOWN_CHARS = 64


def malformed(what: str, payload: bytes, error: Exception) -> InferenceError:
    """The error of a message that does not fit, with what was found and expected."""
    text = str(error)
    if isinstance(error, msgspec.MsgspecError) and ", got" not in text:
        text += _rest(payload, text)
    return InferenceError(Code.INTERNAL, f"malformed {what} of another process: {text}")


def _rest(payload: bytes, text: str) -> str:
    """The part of what was found and expected that an error of msgspec lacks."""
    at = PLACE.search(text)
    if at is None:
        return f", got {len(payload)} bytes"
    indices = INDEX.findall(at[0])
    if text.startswith("Invalid enum value"):
        names = Datatype if len(indices) == DATATYPE_DEPTH else [code.value for code in Code]
        return f", expected one of {', '.join(names)}"
    try:
        found = msgspec.msgpack.decode(payload)
    except UNREADABLE:
        return ""
    for index in indices:
        found = found[int(index)]
    shown = f"{len(found)} elements" if isinstance(found, list) else repr(found)[:SHOWN_CHARS]
    return f", got {shown}"
