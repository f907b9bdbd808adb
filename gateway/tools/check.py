"""Verdicts on every field of the configurations in a repository: the command `sluice check`."""

import difflib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rich.table import Column, Table
from rich.text import Text

from gateway.config import ModelConfig
from gateway.config.pbtxt import find_mistake, parse
from gateway.config.platforms import resolve_backend
from gateway.config.schema import FieldShape, FieldTree, field_tree, shapes
from gateway.errors import InferenceError
from gateway.models.engine_spread import engine_spread
from gateway.models.ensemble_members import check_members
from gateway.models.limits import Limits
from gateway.models.replicas import ReplicaRules
from gateway.models.repository import ConfigFile, ModelRepository
from gateway.models.supported_fields import (
    SUPPORT,
    FieldSupport,
    FieldVerdict,
    field_support,
    is_default,
)
from gateway.models.supported_parameters import parameter_support

STYLES = {
    FieldVerdict.HONOURED: "green",
    FieldVerdict.IGNORED: "yellow",
    FieldVerdict.REFUSED: "red",
}
THE_DEFAULT = FieldSupport(FieldVerdict.HONOURED, "the same as not setting it")
PARAMETERS_FIELD = "parameters"
KEY = (PARAMETERS_FIELD, "key")
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
QUOTES = ("'", '"')
CLOSERS = {"{": "}", "<": ">", "[": "]"}


@dataclass(frozen=True, slots=True)
class ScannedField:
    """A field in a text, by the names that lead to it.

    `indices` has, for each name, the position among the messages of that name, from 0. `text` is
    the value between its quotes, if it is a string.
    """

    names: tuple[str, ...]
    indices: tuple[int, ...]
    line: int
    text: str | None = field(default=None, compare=False)


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
    shown = Table(*(Column(name, overflow="fold") for name in ("where", "field", "verdict", "why")))
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
    findings = []
    for scanned in scan(file.text):
        name, support = _judge(scanned, written, backend, model)
        if (name, file.renames) == ("name", True) and scanned.text != model:
            support = FieldSupport(FieldVerdict.IGNORED, f"the model is served as '{model}'")
        if support is not None:
            findings.append(_finding(model, file, scanned.line, name, support))
    shown = {each.field for each in findings}
    for key, value in written.parameters.items() if written else ():
        if (name := f"{PARAMETERS_FIELD}.{key}") not in shown:  # it is spelled with escapes
            support = parameter_support(backend, key, value, model)
            findings.append(_finding(model, file, 0, name, support))
    return findings + _check_text(model, file, findings)


def _finding(
    model: str, file: ConfigFile, line: int, name: str, support: FieldSupport
) -> FieldFinding:
    return FieldFinding(
        model=model,
        path=file.source,
        line=line,
        field=name,
        verdict=support.verdict,
        why=support.why,
    )


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
        entry = repository.find(name)
        entry.versions(config.version_policy)
        Limits.read(config)
        ReplicaRules.read(config, engine_spread(config, entry))
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


def _judge(
    scanned: ScannedField, written: ModelConfig | None, backend: str, model: str
) -> tuple[str, FieldSupport | None]:
    """The name of a field, and the verdict; None if its parent or its children have the verdict.

    Each key of `parameters` has one, under its own name.
    """
    name = ".".join(scanned.names)
    if written is None or scanned.names[0] != PARAMETERS_FIELD:
        return name, _judge_field(name, scanned, written, backend)
    key = scanned.text
    if scanned.names != KEY or key is None or key not in written.parameters:
        return name, None
    support = parameter_support(backend, key, written.parameters[key], model)
    return f"{PARAMETERS_FIELD}.{key}", support


def _judge_field(
    name: str, scanned: ScannedField, written: ModelConfig | None, backend: str
) -> FieldSupport | None:
    siblings = _siblings(scanned)
    if siblings is None:
        return None
    if scanned.names[-1] not in siblings:
        return _unknown(scanned.names[-1], siblings)
    if name not in SUPPORT:
        return None
    support = field_support(name, backend)
    if support.verdict is FieldVerdict.REFUSED and written:
        return THE_DEFAULT if _is_default(scanned, written) else support
    return support


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
    tokens = list(_tokens(text))
    for place, (token, line) in enumerate(tokens):
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
            indices = (*innermost.indices, innermost.seen[token])
            yield ScannedField(names, indices, line, _string(tokens[place + 1 : place + 3]))
        before = token


def _string(after: Sequence[tuple[str, int]]) -> str | None:
    """The string that follows a name, without its quotes."""
    found = [token for token, _ in after]
    is_string = len(found) == 2 and found[0] == ":" and found[1].startswith(QUOTES)
    return found[1][1:-1] if is_string else None


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
