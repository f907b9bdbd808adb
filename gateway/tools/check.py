"""Verdicts on every field of the configurations in a repository: the command `sluice check`."""

import difflib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from rich.table import Table
from rich.text import Text

from gateway.config import ModelConfig
from gateway.config.pbtxt import find_mistake, parse
from gateway.config.platforms import resolve_backend
from gateway.config.schema import FieldShape, FieldTree, field_tree, shapes
from gateway.errors import InferenceError
from gateway.models.ensemble_members import check_members
from gateway.models.limits import Limits
from gateway.models.repository import ConfigFile, ModelRepository
from gateway.models.supported_fields import (
    PARAMETERS,
    SUPPORT,
    FieldSupport,
    FieldVerdict,
    is_default,
)

STYLES = {
    FieldVerdict.HONOURED: "green",
    FieldVerdict.IGNORED: "yellow",
    FieldVerdict.REFUSED: "red",
}
THE_DEFAULT = FieldSupport(FieldVerdict.HONOURED, "the same as not setting it")
NO_FIELDS = "no fields: all is left to the files of the model and to its backend"


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
    """A field in a text, by the names that lead to it.

    `indices` has, for each name, the position among the messages of that name, from 0.
    """

    names: tuple[str, ...]
    indices: tuple[int, ...]
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldFinding:
    """The verdict on one field of the file at `path`, relative to the repository.

    `field` is empty for text that is no field, `line` is 0 for the whole file. Fields below a field
    with a verdict as a whole have no finding of their own.
    """

    model: str
    path: str
    line: int = 0
    field: str = ""
    verdict: FieldVerdict
    why: str = ""


def check(repository: ModelRepository) -> list[FieldFinding]:
    """The verdict on every field that a configuration in the repository sets, in file order.

    If the server refuses a model's configuration, one of the findings is REFUSED. Backends are not
    asked: a missing backend or a model that fails to load is no finding.
    """
    return [finding for name in repository.names() for finding in _check_model(repository, name)]


def table(findings: list[FieldFinding]) -> Table:
    """The findings for a terminal."""
    shown = Table("where", "field", "verdict", "why")
    for each in findings:
        where = f"{each.path}:{each.line}" if each.line else each.path
        verdict = Text(each.verdict, style=STYLES[each.verdict])
        shown.add_row(Text(where), Text(each.field), verdict, Text(each.why))
    return shown


def _check_model(repository: ModelRepository, name: str) -> list[FieldFinding]:
    try:
        file = repository.config_file(name)
    except InferenceError as error:
        return [_refusal(name, name, error.message)]
    findings = _check_fields(name, file, _backend(repository, name, file))
    if not any(each.verdict is FieldVerdict.REFUSED for each in findings):
        findings += _check_whole(repository, name, file)
    return findings or [
        FieldFinding(model=name, path=file.source, verdict=FieldVerdict.HONOURED, why=NO_FIELDS)
    ]


def _check_fields(model: str, file: ConfigFile, backend: str) -> list[FieldFinding]:
    written = _written(file)
    findings = [
        FieldFinding(
            model=model,
            path=file.source,
            line=scanned.line,
            field=".".join(scanned.names),
            verdict=support.verdict,
            why=support.why,
        )
        for scanned in scan(file.text)
        if (support := _judge(scanned, written, backend))
    ]
    findings += _check_parameters(model, file, written)
    return findings + _check_text(model, file, findings)


def _check_parameters(
    model: str, file: ConfigFile, written: ModelConfig | None
) -> Iterator[FieldFinding]:
    """The keys of `parameters` that have a verdict of their own."""
    for key in written.parameters if written else ():
        if support := PARAMETERS.get(key):
            yield FieldFinding(
                model=model,
                path=file.source,
                line=_line_of(key, file.text),
                field=f"parameters.{key}",
                verdict=support.verdict,
                why=support.why,
            )


def _line_of(word: str, text: str) -> int:
    """The first line that has the word before any comment, 0 if none has."""
    lines = (line.partition("#")[0] for line in text.split("\n"))
    return next((number for number, line in enumerate(lines, 1) if word in line), 0)


def _check_text(model: str, file: ConfigFile, findings: list[FieldFinding]) -> list[FieldFinding]:
    """The first syntax error of the text, unless it is a refused field."""
    mistake = find_mistake(file.text)
    refused = {(each.line, each.field) for each in findings if each.verdict is FieldVerdict.REFUSED}
    if mistake is None or any(
        line == mistake.line and field.split(".")[-1] == mistake.unknown_field
        for line, field in refused
    ):
        return []
    return [_refusal(model, file.source, mistake.what, mistake.line)]


def _check_whole(repository: ModelRepository, name: str, file: ConfigFile) -> list[FieldFinding]:
    """Errors that concern several fields."""
    try:
        config = repository.read(name)
        repository.find(name).versions(config.version_policy)
        Limits.read(config)
        check_members(repository, config)
    except InferenceError as error:
        return [_refusal(name, file.source, error.message)]
    return []


def _refusal(model: str, path: str, why: str, line: int = 0) -> FieldFinding:
    return FieldFinding(model=model, path=path, line=line, verdict=FieldVerdict.REFUSED, why=why)


def _backend(repository: ModelRepository, name: str, file: ConfigFile) -> str:
    """The backend of the model; "" if its configuration is unreadable."""
    written = _written(file)
    try:
        if written and (written.backend or written.platform):
            return resolve_backend(replace(written, name=name), frozenset()).backend
        return repository.read(name).backend
    except InferenceError:
        return ""


def _written(file: ConfigFile) -> ModelConfig | None:
    try:
        return parse(file.text, file.source)
    except InferenceError:
        return None


def _judge(scanned: ScannedField, written: ModelConfig | None, backend: str) -> FieldSupport | None:
    """The verdict; None for a field whose parent or children have the verdict."""
    siblings = _siblings(scanned)
    if siblings is None:
        return None
    if scanned.names[-1] not in siblings:
        return _unknown(scanned.names[-1], siblings)
    support = SUPPORT.get(".".join(scanned.names))
    if support and support.verdict is FieldVerdict.REFUSED and written:
        return THE_DEFAULT if _is_default(scanned, written) else support
    return support.by(backend) if support else None


def _siblings(scanned: ScannedField) -> FieldTree | None:
    """The known fields of the same message; None below an unknown field."""

    siblings: FieldTree | None = field_tree(ModelConfig)
    for name in scanned.names[:-1]:
        siblings = siblings.get(name) if siblings is not None else None
    return siblings


def _unknown(name: str, siblings: FieldTree) -> FieldSupport:
    close = difflib.get_close_matches(name, siblings, n=1)
    hint = f"; did you mean '{close[0]}'?" if close else ""
    return FieldSupport(FieldVerdict.REFUSED, f"there is no such field{hint}")


def _is_default(scanned: ScannedField, written: ModelConfig) -> bool:
    owner: Any = written
    for name, index in zip(scanned.names[:-1], scanned.indices, strict=False):
        value = getattr(owner, _shape(owner.__class__, name).attribute)
        owner = value[index] if isinstance(value, tuple) else value
    return is_default(owner, _shape(owner.__class__, scanned.names[-1]))


def _shape(owner: Any, name: str) -> FieldShape:
    return next(each for each in shapes(owner) if each.name == name)


@dataclass(slots=True)
class _Bracket:
    """An open bracket; inside the bracket of a list, names are values."""

    closer: str
    names: tuple[str, ...] = ()
    indices: tuple[int, ...] = ()
    last: str = ""
    seen: Counter[str] = field(default_factory=Counter)


def scan(text: str) -> Iterator[ScannedField]:
    """The fields of a text, in its order.

    Protobuf's parser has lines only for mistakes; this one has the line of every field. It never
    fails: it stops where brackets do not match.
    """
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
