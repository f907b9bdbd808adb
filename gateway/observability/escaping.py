"""Characters that end lines, control terminals or change the direction of a text, as escapes."""

import json
from collections.abc import Mapping

_CODES = (
    *(*range(0x20), *range(0x7F, 0xA0), 0x061C, 0x200E, 0x200F),
    *(*range(0x2028, 0x202F), *range(0x2066, 0x206A), 0xFEFF),
)
_ESCAPES: Mapping[int, str] = {code: json.dumps(chr(code))[1:-1] for code in _CODES}


def escaped(text: str) -> str:
    """The text with JSON's escapes of these characters, so that JSON keeps its meaning."""
    return text if text.isprintable() else text.translate(_ESCAPES)
