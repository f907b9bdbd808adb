"""The models of the repositories of a fleet on Ray: rules of their replicas, and descriptions."""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from gateway.config import ModelConfig
from gateway.config.pbtxt import parse, to_text
from gateway.errors import Code, InferenceError
from gateway.models.engine_spread import FILE, engine_spread
from gateway.models.model_folder import NO_VERSIONS, PLAN_FILE, Versions, select_versions
from gateway.models.registry import members
from gateway.models.replicas import OF_CONTROLLER, ReplicaRules
from gateway.models.repository import ModelEntry, ModelRepository
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
    with other versions left out follows the last one at once, and is none of the two.

    The description of a model is a digest of its configuration, without the parameters that only
    the controller reads, of the versions that its policy selects, and of the arguments of their
    engines; that of an ensemble is also one of its members. Times and sizes of files are not part
    of it: they differ between nodes.
    """

    def __init__(self, paths: Iterable[str], config_name: str) -> None:
        self._repository = ModelRepository([Path(each) for each in paths], config_name)
        self._parsed: dict[str, _Parsed] = {}
        self._left_out = LeftOut()
        self._read_before: Mapping[str, ModelFiles | str] = {}
        self._settled: Mapping[str, ModelFiles | str] = {}

    def files(self, left_out: LeftOut) -> Mapping[str, ModelFiles | str]:
        """The files of each model, or the reason why they cannot be read."""
        names = self._repository.names()
        self._parsed = {name: self._parsed[name] for name in names if name in self._parsed}
        before, found = self._read_before, {name: self._files(name, left_out) for name in names}
        is_same, self._left_out = left_out == self._left_out, left_out
        self._read_before = found
        self._settled = {
            name: each
            if name not in before
            or (each == before[name] if is_same else _has_same_files(self._settled[name], each))
            else self._settled[name]
            for name, each in found.items()
        }
        return self._settled

    def describe(self, name: str, left_out: Versions) -> str:
        """The description of a model; raises InferenceError."""
        return self._group(name, left_out).description

    def _files(self, name: str, left_out: LeftOut) -> ModelFiles | str:
        try:
            parsed, entry = self._read(name), self._repository.find(name)
            config = parsed.config
            selectable = _without(entry, left_out.refused)
            plan, plan_refusal = _plan(entry)
            has_candidate = name in left_out.candidates
            return ModelFiles(
                rules=self._rules(config, entry, left_out.without(name)),
                kept=self._rules(config, entry, left_out.without()) if has_candidate else None,
                selected=_selected(config, selectable),
                stamps={each: self._stamp(entry, each) for each in entry.available},
                config=_digest(parsed.text),
                plan=plan,
                plan_refusal=plan_refusal,
                by_description=self._versions(entry) if name in left_out.unknown else {},
            )
        except InferenceError as error:
            return error.message

    def _rules(self, config: ModelConfig, entry: ModelEntry, left_out: Versions) -> ReplicaRules:
        spread = engine_spread(config, _without(entry, left_out))
        group = self._group(entry.name, left_out)
        rules = ReplicaRules.read(config, spread)
        return replace(rules, description=group.description, left_out=group.left_out)

    def _group(self, name: str, left_out: Versions) -> _Group:
        names, described = [name], []
        for each in names:  # members are added meanwhile
            try:
                found = self._read(each)
                entry = _without(self._repository.find(each), left_out)
            except InferenceError as error:
                if each == name or error.code is not Code.NOT_FOUND:
                    raise
                continue  # the replica names the member that is missing
            versions = _selected(found.config, entry)
            engines = [_engine_file(entry, version) for version in versions]
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

    def _stamp(self, entry: ModelEntry, version: int) -> str:
        described = self._read(entry.name).described
        return _digest((described, version, _engine_file(entry, version)))

    def _read(self, name: str) -> _Parsed:
        file = self._repository.config_file(name)
        known = self._parsed.get(name)
        if known is None or known.text != file.text:
            config = replace(parse(file.text, file.source), name=name)
            given = config.parameters.items()
            others = {key: value for key, value in given if key not in OF_CONTROLLER}
            described = to_text(replace(config, parameters=others))
            known = self._parsed[name] = _Parsed(file.text, config, described)
        return known


def _has_same_files(before: ModelFiles | str, now: ModelFiles | str) -> bool:
    """Whether the files are the same, while other versions may be left out."""
    if isinstance(before, str) or isinstance(now, str):
        return False
    pairs = ((each.config, each.stamps, each.plan, each.plan_refusal) for each in (before, now))
    return next(pairs) == next(pairs)


def _without(entry: ModelEntry, left_out: Versions) -> ModelEntry:
    left = frozenset(left_out.get(entry.name, ()))
    available = tuple(each for each in entry.available if each not in left)
    return replace(entry, available=available, left_out=left)


def _selected(config: ModelConfig, entry: ModelEntry) -> tuple[int, ...]:
    return select_versions(config.version_policy, entry.available, entry.left_out)


def _plan(entry: ModelEntry) -> tuple[RolloutPlan | None, str]:
    """The plan of a model, and the reason why it cannot be read."""
    try:
        text = entry.text(PLAN_FILE)
        if not text:
            return None, ""
        plan = read_plan(text)
        refuse_unsupported(plan, PLAN_FILE)
        return plan, ""
    except InferenceError as error:
        return None, error.message


def refuse_unsupported(plan: RolloutPlan, where: str) -> None:
    """Raise UNSUPPORTED for a plan whose requests no router asks."""
    if any(each.shadow is not None for each in plan.steps):
        raise InferenceError(Code.UNSUPPORTED, f"{where}: steps with 'shadow' are not for Ray")
    for name in {GOLDEN, DIFFERS}.intersection(plan.guardrails):
        text = f"{where}: guardrails.{name} is not for Ray, where no request is asked twice"
        raise InferenceError(Code.UNSUPPORTED, text)


def _engine_file(entry: ModelEntry, version: int) -> bytes:
    try:
        return (entry.path / str(version) / FILE).read_bytes()
    except OSError:
        return b""


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
