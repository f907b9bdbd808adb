"""Characters that end lines, control terminals or change the direction of a text."""

import json
from collections.abc import Mapping
from typing import Any

import orjson

_CODES = (
    *(*range(0x20), *range(0x7F, 0xA0), 0x061C, 0x200E, 0x200F),
    *(*range(0x2028, 0x202F), *range(0x2066, 0x206A), 0xFEFF),
)
_ESCAPES: Mapping[int, str] = {code: json.dumps(chr(code))[1:-1] for code in _CODES}
_REPLACED: Mapping[int, str] = dict.fromkeys((*_CODES, *range(0xD800, 0xE000)), "\ufffd")


def escaped(text: str) -> str:
    """The text with JSON's escapes of these characters, so that JSON keeps its meaning."""
    return text if text.isprintable() else text.translate(_ESCAPES)


def replaced(text: str) -> str:
    """The text with U+FFFD for each of them, and for half of a surrogate pair."""
    return text if text.isprintable() else text.translate(_REPLACED)


def escaped_json(value: Any) -> str:
    """JSON whose texts control no terminal that shows it; half of a surrogate pair is `?`."""
    try:
        return escaped(orjson.dumps(value).decode())
    except TypeError:
        return escaped(json.dumps(value, ensure_ascii=False).encode(errors="replace").decode())
