"""Inputs that a generate request has twice: parsers keep one of them, and Triton refuses both."""

import re
from collections.abc import Mapping
from itertools import count, islice
from typing import Any

import orjson

from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError
from gateway.frontends.http.json_object import parse_generate
from gateway.messages import request_prefix
from gateway.tensor import Buffer

NESTED = "parameters"
BEFORE_VALUE = rb"(?=[ \t\r\n]*+:)"
"""What follows the name of a member, and no other string."""
MARK = "\u0001sluice\u0001"
"""Behind the name of a member that has been made unlike all others."""


def refuse_repeated_inputs(body: Buffer, members: Mapping[str, Any], config: ModelConfig) -> None:
    """Raise INVALID_ARG with Triton's text if an input stands twice in that body.

    `members` is the body parsed, which is parsed again only if the name of an input occurs twice.
    A name with needless escapes is not found.
    """
    text = body if isinstance(body, bytes | bytearray) else bytes(body)
    if text.count(b":") == len(members):
        return  # each member has a colon, so there is no other member
    for each in config.input:
        key = orjson.dumps(each.name)
        if text.count(key) > 1:
            member = re.compile(re.escape(key) + BEFORE_VALUE)
            if len(list(islice(member.finditer(text), 2))) > 1:
                _check(text, member, members, each.name)


def _check(
    body: bytes | bytearray, member: re.Pattern[bytes], members: Mapping[str, Any], name: str
) -> None:
    numbers, mark = count(1), orjson.dumps(name + MARK)[:-1]
    marked = parse_generate(member.sub(lambda _: b'%b%d"' % (mark, next(numbers)), body))
    nested = marked.get(NESTED)
    text = f"{request_prefix(_text(members.get('id')))}input '{name}' already exists in request"
    if _count(marked, name) > 1:
        raise InferenceError(Code.INVALID_ARG, text)
    if isinstance(nested, dict) and _count(nested, name) > 1:
        raise InferenceError(Code.INVALID_ARG, f"Converting keyword: '{NESTED}': {text}")


def _count(members: Mapping[str, Any], name: str) -> int:
    return sum(key.startswith(name + MARK) for key in members)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
