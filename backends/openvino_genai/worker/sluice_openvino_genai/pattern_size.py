"""The size of regular expressions, which decides how long the library compiles them."""

import json
import re
from collections.abc import Iterator
from typing import Any

PIECE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{(\d*)(?:,(\d*))?\}|.", re.DOTALL)
"""An escape, a class of characters, a repetition, or one character."""


def states(pattern: str) -> int:
    """About as many states as an automaton of the pattern has: repetitions multiply."""
    totals, last = [0], 0
    for piece in PIECE.finditer(pattern):
        text = piece.group()
        if text == "(":
            totals.append(0)
            last = 0
        elif text == ")" and len(totals) > 1:
            last = totals.pop()
            totals[-1] += last
        elif text[0] == "{" and len(text) > 1:
            times = int(piece.group(2) or piece.group(1) or 1)
            totals[-1] += last * (times - 1)
            last *= times
        else:
            last = 1
            totals[-1] += 1
    return sum(totals)


def patterns(schema: str) -> Iterator[str]:
    """The patterns in a JSON schema; none if it is no JSON."""
    try:
        yield from _patterns(json.loads(schema))
    except ValueError:
        return


def _patterns(found: Any) -> Iterator[str]:
    if isinstance(found, list):
        for each in found:
            yield from _patterns(each)
    elif isinstance(found, dict):
        for key, value in found.items():
            if key == "pattern" and isinstance(value, str):
                yield value
            elif key == "patternProperties" and isinstance(value, dict):
                yield from value
            yield from _patterns(value)
