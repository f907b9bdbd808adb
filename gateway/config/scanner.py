"""On which line does the text of a configuration set which field?

Protobuf's own parser tells lines only of mistakes. This one tells them of every field, and leaves
it to the other to judge the text: it never fails, and stops where the brackets do not match.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

TOKEN = re.compile(
    r"""
    (?P<newline> \n )
  | (?P<blank>   [^\S\n]+ | \#[^\n]* )
  | (?P<string>  "(?:\\.|[^"\\\n])*"? | '(?:\\.|[^'\\\n])*'? )
  | (?P<word>    [\w.]+(?:-[\w.]+)* )
  | (?P<mark>    . )
    """,
    re.VERBOSE,
)
CLOSERS = {"{": "}", "<": ">", "[": "]"}


@dataclass(frozen=True, slots=True)
class ScannedField:
    """A field that the text sets, by the names that lead to it.

    `indices` tells, for each name, which of the messages of that name it is: 0 is the first.
    """

    names: tuple[str, ...]
    indices: tuple[int, ...]
    line: int


@dataclass(slots=True)
class _Bracket:
    """An open bracket; inside one that opened a list, names are values."""

    closer: str
    names: tuple[str, ...] = ()
    indices: tuple[int, ...] = ()
    last: str = ""
    seen: Counter[str] = field(default_factory=Counter)


def scan(text: str) -> Iterator[ScannedField]:
    """The fields that the text sets, in its order."""
    open_brackets = [_Bracket("")]
    before = ""
    for token, line in _tokens(text):
        innermost = open_brackets[-1]
        if token in CLOSERS:
            open_brackets.append(_opened(token, open_brackets))
        elif token in CLOSERS.values():
            if token != innermost.closer:
                return
            open_brackets.pop()
        elif _is_name(token, before) and innermost.closer != "]":
            innermost.last = token
            names = (*innermost.names, token)
            yield ScannedField(names, (*innermost.indices, innermost.seen[token]), line)
        before = token


def _tokens(text: str) -> Iterator[tuple[str, int]]:
    line = 1
    for match in TOKEN.finditer(text):
        if match.lastgroup == "newline":
            line += 1
        elif match.lastgroup != "blank":
            yield match[0], line


def _is_name(token: str, before: str) -> bool:
    return token.isidentifier() and before not in (":", "-")


def _opened(token: str, open_brackets: list[_Bracket]) -> _Bracket:
    closer = CLOSERS[token]
    if closer == "]":
        return _Bracket(closer)
    owner = next(each for each in reversed(open_brackets) if each.closer != "]")
    index = owner.seen[owner.last]
    owner.seen[owner.last] += 1
    return _Bracket(closer, (*owner.names, owner.last), (*owner.indices, index))
