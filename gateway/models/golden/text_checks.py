"""Comparisons of a text with a golden answer."""

import asyncio
import json
import re
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Protocol

from gateway.models.golden import search
from gateway.models.golden.tensor_checks import Mismatch
from gateway.strict_json import StrictObject, refuse

COMMAND = (sys.executable, "-I", search.__file__)
"""The program of `search`, without the packages of the working directory."""
PROCESS_SECS = 30.0
"""Longest time of such a process, its start included."""
SHOWN_CHARS = 60
LEAST_SIMILARITY = 0.85
"""Default of `min` for `similar`."""

Similarity = Callable[[str, str, str], Awaitable[float]]
"""The cosine of two texts by a model (model, text, text); raises Skipped if it is not loaded."""


class Skipped(Exception):
    """A check that cannot be made; the message says why."""


class Unsearched(Exception):
    """A search that has not ended; the message says why."""


class TextCheck(Protocol):
    """Raises Mismatch for a text that is not the expected one, or Skipped."""

    async def __call__(self, text: str, similarity: Similarity) -> None:
        """Check a text."""


def shown(text: str) -> str:
    """A text between quotes, shortened."""
    return repr(text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}…")


@dataclass(frozen=True, slots=True)
class Fixed:
    """A comparison by a method of texts: the whole text, its start, or a part."""

    how: str
    expected: str

    async def __call__(self, text: str, similarity: Similarity) -> None:
        holds = {
            "equals": text == self.expected,
            "prefix": text.startswith(self.expected),
            "contains": self.expected in text,
        }
        if not holds[self.how]:
            verb = {"equals": "is not", "prefix": "does not begin with"}
            verb_of = verb.get(self.how, "does not contain")
            raise Mismatch(f"text {verb_of} {shown(self.expected)}: {shown(text)}")


@dataclass(frozen=True, slots=True)
class Pattern:
    """A regular expression that a text matches anywhere, or that it must not match."""

    pattern: str
    wanted: bool

    async def __call__(self, text: str, similarity: Similarity) -> None:
        try:
            problem = await _searched({"text": text, "pattern": self.pattern})
        except Unsearched as error:
            raise Mismatch(f"pattern {self.pattern!r} {error}") from None
        if (not problem) is not self.wanted:
            verb = "does not match" if self.wanted else "matches"
            raise Mismatch(f"text {verb} {self.pattern!r}: {shown(text)}")


@dataclass(frozen=True, slots=True)
class Schema:
    """A JSON schema that a text fits."""

    schema: Any

    async def __call__(self, text: str, similarity: Similarity) -> None:
        try:
            problem = await _searched({"text": text, "schema": self.schema})
        except Unsearched as error:
            problem = str(error)
        if problem:
            raise Mismatch(f"text {problem}: {shown(text)}")


@dataclass(frozen=True, slots=True)
class Similar:
    """A text of similar meaning, by the embeddings of a loaded model."""

    to: str
    least: float
    model: str

    async def __call__(self, text: str, similarity: Similarity) -> None:
        found = await similarity(self.model, self.to, text)
        if not found >= self.least:
            raise Mismatch(
                f"text has the similarity {found:.3f} to {shown(self.to)} by model '{self.model}', "
                f"expected at least {self.least:g}: {shown(text)}"
            )


async def redacted(pattern: str, texts: Sequence[str]) -> list[str]:
    """The texts without what matches; raises Unsearched."""
    lines = await _searched({"redact": pattern, "texts": texts})
    return await asyncio.to_thread(_read_lines, lines)


def _read_lines(lines: str) -> list[str]:
    return [json.loads(line) for line in lines.splitlines()]


def _encoded(given: dict[str, Any]) -> bytes:
    """JSON, made in Python: in C a long list would hold the interpreter's lock to its end."""
    return b"".join([part.encode() for part in json.JSONEncoder().iterencode(given)])


async def _searched(given: dict[str, Any]) -> str:
    """The output of a process of `search`; raises Unsearched, as its time is limited."""
    content = await asyncio.to_thread(_encoded, given)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*COMMAND, stdin=pipe, stdout=pipe, stderr=pipe)
    try:
        async with asyncio.timeout(PROCESS_SECS):
            found, errors = await process.communicate(content)
    except TimeoutError:
        raise Unsearched(f"was not searched within {PROCESS_SECS:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode == -signal.SIGALRM:
        raise Unsearched(f"takes more than {search.LIMIT_SECS:g} s to search")
    if process.returncode:
        last = errors.decode(errors="replace").strip().splitlines()[-1:]
        reason = "".join(last) or f"exit status {process.returncode}"
        raise Unsearched(f"was not searched: {reason}")
    return found.decode()


NAMES = ("equals", "prefix", "contains", "matches", "not_matches", "similar", "json")


def read_text_checks(members: StrictObject) -> list[TextCheck]:
    """The checks of a text; raises INVALID_ARG with the path of a member."""
    found: list[TextCheck] = [
        Fixed(how, members.text(how)) for how in ("equals", "prefix", "contains") if how in members
    ]
    for name, wanted in (("matches", True), ("not_matches", False)):
        if name in members:
            pattern = members.text(name)
            _compile(members.path(name), pattern)
            found.append(Pattern(pattern, wanted))
    if "similar" in members:
        similar = members.object("similar")
        to, model = similar.text("to"), similar.text("model")
        found.append(Similar(to, similar.number("min", LEAST_SIMILARITY, -1.0, 1.0), model))
        similar.end("to", "min", "model")
    if "json" in members:
        found.append(Schema(_schema(members.path("json"), members.take("json"))))
    return found


def _compile(path: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        refuse(path, f"is {shown(pattern)}, expected a regular expression: {error}")


def _schema(path: str, schema: Any) -> Any:
    if not isinstance(schema, dict | bool):
        refuse(path, f"is {shown(str(schema))}, expected a JSON schema")
    if find_spec("jsonschema") is None:
        refuse(path, "needs the package jsonschema; run: pip install 'sluice[golden]'")
    return schema
