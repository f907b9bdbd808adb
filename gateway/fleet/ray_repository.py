"""The models of the repositories of a fleet on Ray: rules of their replicas, and descriptions."""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from gateway.config import ModelConfig
from gateway.config.pbtxt import parse, to_text
from gateway.errors import Code, InferenceError
from gateway.models.engine_spread import engine_file, engine_spread
from gateway.models.model_folder import NO_VERSIONS, PLAN_FILE, Versions, select_versions
from gateway.models.registry import members
from gateway.models.replicas import OF_CONTROLLER, ReplicaRules
from gateway.models.repository import ConfigFile, ModelEntry, ModelRepository
from gateway.rollouts.guardrails import DIFFERS, GOLDEN
from gateway.rollouts.plan import RolloutPlan, read_plan

DIGEST_BYTES = 4
"""A change of a model is missed once in four thousand million."""


class LeftOut(NamedTuple):
    """Versions that have been rolled back, and the candidates of open rollouts, by model.

    Stable of the models `unknown` is the version that their replicas have.
    """

    refused: Versions = NO_VERSIONS
    candidates: Versions = NO_VERSIONS
    unknown: Set[str] = frozenset()

    def without(self, model: str = "") -> Versions:
        """All of them; with a model its candidates are not left out."""
        found = {name: {*numbers} for name, numbers in self.refused.items()}
        for name, numbers in self.candidates.items():
            if name != model:
                found.setdefault(name, set()).update(numbers)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """The files of a model: the rules of its replicas, and those without a candidate.

    `kept` is None without a candidate. `selected` are the versions of the policy, and `stamps` the
    digests of the files of each version; `config` is that of config.pbtxt. `plan` is that of
    `rollout.json`, None without the file, and `plan_refusal` the reason why it cannot be read.
    `by_description` has the version of each description, if stable is unknown.
    """

    rules: ReplicaRules
    kept: ReplicaRules | None = None
    selected: Sequence[int] = ()
    stamps: Mapping[int, str] = field(default_factory=dict)
    config: str = ""
    plan: RolloutPlan | None = None
    plan_refusal: str = ""
    by_description: Mapping[str, int] = field(default_factory=dict)


class _Content(NamedTuple):
    """The content of a model's folder, from which its rules follow.

    `engines` are the `model.json` of its versions, None for a missing one, or the reason why one
    is unreadable; `plan` is the text of `rollout.json`, and `plan_refusal` that reason.
    """

    entry: ModelEntry
    config: ConfigFile
    engines: Mapping[int, bytes | str | None]
    plan: str
    plan_refusal: str

    def engine(self, _entry: ModelEntry, version: int) -> bytes | None:
        """See `engine_file`."""
        found = self.engines[version]
        if isinstance(found, str):
            raise InferenceError(Code.INVALID_ARG, found)
        return found

    def described(self, version: int) -> bytes:
        """The part of a version in a description."""
        found = self.engines[version]
        return found if isinstance(found, bytes) else b""


class _Unread(NamedTuple):
    """The error in place of a content."""

    code: Code
    message: str


class _Parsed(NamedTuple):
    """A configuration; `described` is what replicas of equal descriptions have in common."""

    text: str
    config: ModelConfig
    described: str


class _Group(NamedTuple):
    """A model, and the members of an ensemble: their description, and versions left out of them."""

    description: str
    left_out: Versions


class Repository:
    """The files of every model of the repositories, read again at each call.

    Changed files hold once two readings in a row have them: a file may be read half written. One
    with other versions left out is none of the two. The versions that are left out have an effect
    at once, on the files that hold.

    The description of a model is a digest of its configuration, without the parameters that only
    the controller reads, of the versions that its policy selects, and of the arguments of their
    engines; that of an ensemble is also one of its members. Times and sizes of files are not part
    of it: they differ between nodes.
    """

    def __init__(self, paths: Iterable[str], config_name: str) -> None:
        self._repository = ModelRepository([Path(each) for each in paths], config_name)
        self._parsed: dict[str, _Parsed] = {}
        self._left_out = LeftOut()
        self._read_before: Mapping[str, _Content | _Unread] = {}
        self._settled: dict[str, _Content | _Unread] = {}

    def files(self, left_out: LeftOut) -> Mapping[str, ModelFiles | str]:
        """The files of each model, or the reason why they cannot be read."""
        names = self._repository.names()
        self._parsed = {name: self._parsed[name] for name in names if name in self._parsed}
        before, found = self._read_before, {name: self._read(name) for name in names}
        is_second, self._left_out = left_out == self._left_out, left_out
        self._read_before = found
        self._settled = {
            name: each
            if name not in before or (is_second and each == before[name])
            else self._settled[name]
            for name, each in found.items()
        }
        return {name: self._files(name, left_out) for name in names}

    def describe(self, name: str, left_out: Versions) -> str:
        """The description of a model; raises InferenceError."""
        return self._group(name, left_out).description

    def _files(self, name: str, left_out: LeftOut) -> ModelFiles | str:
        try:
            content = self._content(name)
            parsed, entry = self._parse(content), content.entry
            plan, plan_refusal = _plan(content)
            has_candidate = name in left_out.candidates
            return ModelFiles(
                rules=self._rules(content, left_out.without(name)),
                kept=self._rules(content, left_out.without()) if has_candidate else None,
                selected=_selected(parsed.config, _without(entry, left_out.refused)),
                stamps={each: _stamp(parsed, content, each) for each in entry.available},
                config=_digest(parsed.text),
                plan=plan,
                plan_refusal=plan_refusal,
                by_description=self._versions(entry) if name in left_out.unknown else {},
            )
        except InferenceError as error:
            return error.message

    def _rules(self, content: _Content, left_out: Versions) -> ReplicaRules:
        config, name = self._parse(content).config, content.entry.name
        spread = engine_spread(config, _without(content.entry, left_out), content.engine)
        group = self._group(name, left_out)
        rules = ReplicaRules.read(config, spread)
        return replace(rules, description=group.description, left_out=group.left_out)

    def _group(self, name: str, left_out: Versions) -> _Group:
        names, described = [name], []
        for each in names:  # members are added meanwhile
            try:
                content = self._content(each)
            except InferenceError as error:
                if each == name or error.code is not Code.NOT_FOUND:
                    raise
                continue  # the replica names the member that is missing
            found = self._parse(content)
            versions = _selected(found.config, _without(content.entry, left_out))
            engines = [content.described(version) for version in versions]
            described.append((each, found.described, versions, engines))
            names += [member for member in members(found.config) if member not in names]
        return _Group(
            _digest(described), {each: left_out[each] for each in names if each in left_out}
        )

    def _versions(self, entry: ModelEntry) -> Mapping[str, int]:
        """The version of each description of replicas without the versions above it."""
        found, all_of = {}, entry.available
        for version in all_of:
            above = {each for each in all_of if each > version}
            found[self.describe(entry.name, {entry.name: above} if above else {})] = version
        return found

    def _content(self, name: str) -> _Content:
        """The content of a model that holds; raises InferenceError."""
        found = self._settled.get(name)
        if found is None:
            found = self._settled[name] = self._read(name)
        if isinstance(found, _Unread):
            raise InferenceError(*found)
        return found

    def _read(self, name: str) -> _Content | _Unread:
        """The content of a model now."""
        try:
            entry = replace(self._repository.find(name), ignored=())
            config = self._repository.config_file(name)
            engines = {version: _engine(entry, version) for version in entry.available}
        except InferenceError as error:
            return _Unread(error.code, error.message)
        try:
            return _Content(entry, config, engines, entry.text(PLAN_FILE), "")
        except InferenceError as error:
            return _Content(entry, config, engines, "", error.message)

    def _parse(self, content: _Content) -> _Parsed:
        name, file = content.entry.name, content.config
        known = self._parsed.get(name)
        if known is None or known.text != file.text:
            config = replace(parse(file.text, file.source), name=name)
            given = config.parameters.items()
            others = {key: value for key, value in given if key not in OF_CONTROLLER}
            described = to_text(replace(config, parameters=others))
            known = self._parsed[name] = _Parsed(file.text, config, described)
        return known


def _without(entry: ModelEntry, left_out: Versions) -> ModelEntry:
    left = frozenset(left_out.get(entry.name, ()))
    available = tuple(each for each in entry.available if each not in left)
    return replace(entry, available=available, left_out=left)


def _selected(config: ModelConfig, entry: ModelEntry) -> tuple[int, ...]:
    return select_versions(config.version_policy, entry.available, entry.left_out)


def _plan(content: _Content) -> tuple[RolloutPlan | None, str]:
    """The plan of a model, and the reason why it cannot be read."""
    if content.plan_refusal or not content.plan:
        return None, content.plan_refusal
    try:
        plan = read_plan(content.plan)
        refuse_unsupported(plan, PLAN_FILE)
    except InferenceError as error:
        return None, error.message
    return plan, ""


def refuse_unsupported(plan: RolloutPlan, where: str) -> None:
    """Raise UNSUPPORTED for a plan whose requests no router asks."""
    if any(each.shadow is not None for each in plan.steps):
        raise InferenceError(Code.UNSUPPORTED, f"{where}: steps with 'shadow' are not for Ray")
    for name in {GOLDEN, DIFFERS}.intersection(plan.guardrails):
        text = f"{where}: guardrails.{name} is not for Ray, where no request is asked twice"
        raise InferenceError(Code.UNSUPPORTED, text)


def _engine(entry: ModelEntry, version: int) -> bytes | str | None:
    try:
        return engine_file(entry, version)
    except InferenceError as error:
        return error.message


def _stamp(parsed: _Parsed, content: _Content, version: int) -> str:
    return _digest((parsed.described, version, content.described(version)))


def _digest(described: object) -> str:
    return blake2b(repr(described).encode(), digest_size=DIGEST_BYTES).hexdigest()


def refusal(
    paths: Iterable[str], config_name: str, model: str, description: str, left_out: Versions
) -> str:
    """The objection of a node to a replica of that description, "" without one."""
    try:
        is_equal = Repository(paths, config_name).describe(model, left_out) == description
    except InferenceError as error:
        return error.message
    if is_equal:
        return ""
    return (
        f"model '{model}' has another configuration or other versions on this node than on that of "
        "the controller, expected the same; copy the repository to every node"
    )
