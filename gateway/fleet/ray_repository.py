"""The models of the repositories of a fleet on Ray: rules of their replicas, and descriptions."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from gateway.config import ModelConfig
from gateway.config.pbtxt import parse, to_text
from gateway.errors import Code, InferenceError
from gateway.models.engine_spread import FILE, engine_spread
from gateway.models.model_folder import select_versions
from gateway.models.registry import members
from gateway.models.replicas import OF_CONTROLLER, ReplicaRules
from gateway.models.repository import ModelEntry, ModelRepository

DIGEST_BYTES = 4
"""A change of a model is missed once in four thousand million."""


class _Parsed(NamedTuple):
    """A configuration; `described` is what replicas of equal descriptions have in common."""

    text: str
    config: ModelConfig
    described: str


class Repository:
    """The rules of every model of the repositories, read again at each call.

    Changed rules hold once two readings in a row have them: a file may be read half written.

    The description of a model is a digest of its configuration, without the parameters that only
    the controller reads, of the versions that its policy selects, and of the arguments of their
    engines; that of an ensemble is also one of its members. Times and sizes of files are not part
    of it: they differ between nodes.
    """

    def __init__(self, paths: Iterable[str], config_name: str) -> None:
        self._repository = ModelRepository([Path(each) for each in paths], config_name)
        self._parsed: dict[str, _Parsed] = {}
        self._read_before: Mapping[str, ReplicaRules | str] = {}
        self._settled: Mapping[str, ReplicaRules | str] = {}

    def rules(self) -> Mapping[str, ReplicaRules | str]:
        """The rules of each model with its description, or the reason why they cannot be read."""
        names = self._repository.names()
        self._parsed = {name: self._parsed[name] for name in names if name in self._parsed}
        before, self._read_before = self._read_before, {name: self._rules(name) for name in names}
        self._settled = {
            name: found if before.get(name, found) == found else self._settled[name]
            for name, found in self._read_before.items()
        }
        return self._settled

    def _rules(self, name: str) -> ReplicaRules | str:
        try:
            config = self._read(name).config
            spread = engine_spread(config, self._repository.find(name))
            rules = ReplicaRules.read(config, spread)
            return replace(rules, description=self.describe(name))
        except InferenceError as error:
            return error.message

    def describe(self, name: str) -> str:
        """The description of a model; raises InferenceError."""
        names, described = [name], []
        for each in names:  # members are added meanwhile
            try:
                found = self._read(each)
                entry = self._repository.find(each)
            except InferenceError as error:
                if each == name or error.code is not Code.NOT_FOUND:
                    raise
                continue  # the replica names the member that is missing
            versions = select_versions(found.config.version_policy, entry.available)
            engines = [_engine_file(entry, version) for version in versions]
            described.append((each, found.described, versions, engines))
            names += [member for member in members(found.config) if member not in names]
        return blake2b(repr(described).encode(), digest_size=DIGEST_BYTES).hexdigest()

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


def _engine_file(entry: ModelEntry, version: int) -> bytes:
    try:
        return (entry.path / str(version) / FILE).read_bytes()
    except OSError:
        return b""


def refusal(paths: Iterable[str], config_name: str, model: str, description: str) -> str:
    """The objection of a node to a replica of that description, "" without one."""
    try:
        is_equal = Repository(paths, config_name).describe(model) == description
    except InferenceError as error:
        return error.message
    if is_equal:
        return ""
    return (
        f"model '{model}' has another configuration or other versions on this node than on that of "
        "the controller, expected the same; copy the repository to every node"
    )
