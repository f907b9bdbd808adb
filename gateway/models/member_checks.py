"""What is wrong with an ensemble and the models that it calls, as far as their configs tell?"""

from collections.abc import Iterator
from dataclasses import replace

from gateway.config import ModelConfig, TransactionPolicy
from gateway.ensembles.checks import check_wiring
from gateway.ensembles.graph import LATEST
from gateway.errors import Code, InferenceError
from gateway.models.dependencies import Circle, members
from gateway.models.repository import ModelRepository


def check_members(repository: ModelRepository, config: ModelConfig) -> None:
    """Raise INVALID_ARG for the first thing that a load of the ensemble would stumble over.

    Members whose own config is no good, or leaves tensors to their files, are not compared.
    """
    if config.ensemble_scheduling is None:
        return
    for problem in (*_missing(repository, config), *_versions_missing(repository, config)):
        raise InferenceError(Code.INVALID_ARG, problem)
    _refuse_circle(repository, config, (config.name,))
    found = {name: _read(repository, name) for name in members(config)}
    if all(each is not None and each.input and each.output for each in found.values()):
        steps = config.ensemble_scheduling.step
        whole = {name: each for name, each in found.items() if each is not None}
        check_wiring(config, {(s.model_name, s.model_version): whole[s.model_name] for s in steps})


def _missing(repository: ModelRepository, config: ModelConfig) -> Iterator[str]:
    missing = [name for name in members(config) if not repository.named(name)]
    if missing:
        yield (
            f"ensemble {config.name} contains models that are not available or ambiguous: "
            f"{', '.join(missing)}"
        )


def _versions_missing(repository: ModelRepository, config: ModelConfig) -> Iterator[str]:
    for step in config.ensemble_scheduling.step if config.ensemble_scheduling else ():
        version, member = step.model_version, _read(repository, step.model_name)
        if version == LATEST or member is None:
            continue
        if version not in repository.find(step.model_name).versions(member.version_policy):
            yield (
                f"ensemble '{config.name}' depends on '{step.model_name}' whose required version "
                f"{version} is not loaded."
            )


def _refuse_circle(repository: ModelRepository, config: ModelConfig, path: tuple[str, ...]) -> None:
    for name in members(config):
        if name == path[0]:
            raise Circle(path)
        member = _read(repository, name) if name not in path else None
        if member is not None:
            _refuse_circle(repository, member, (*path, name))


def _read(repository: ModelRepository, name: str) -> ModelConfig | None:
    """The config of a member, None if it is no good; of an ensemble what follows from it, too."""
    try:
        config = repository.read(name)
        repository.find(name).versions(config.version_policy)
    except InferenceError:
        return None
    decoupled = _calls_decoupled(repository, config, set())
    return replace(config, model_transaction_policy=TransactionPolicy(decoupled=decoupled))


def _calls_decoupled(repository: ModelRepository, config: ModelConfig, seen: set[str]) -> bool:
    """Whether any model that an ensemble leads to answers as often as it likes."""
    if config.ensemble_scheduling is None:
        return config.decoupled
    for name in members(config):
        if name in seen:
            continue
        seen.add(name)
        try:
            member = repository.read(name)
        except InferenceError:
            continue
        if _calls_decoupled(repository, member, seen):
            return True
    return False
