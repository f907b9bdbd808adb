"""Members of ensembles: names, loaded versions, dependencies, checks, and failures of loads."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from gateway.config import ModelConfig, TransactionPolicy
from gateway.config.scheduling import EnsembleStep
from gateway.ensembles.checks import check_wiring
from gateway.ensembles.graph import LATEST
from gateway.errors import Code, InferenceError
from gateway.models.golden.run import GoldenFailure
from gateway.models.loading import NO_MEMBERS, LoadedMembers
from gateway.models.model import Model
from gateway.models.registry import KnownModel, ModelRegistry, members
from gateway.models.repository import ModelId, ModelRepository
from gateway.threads import Threads

INTERRUPTED = InferenceError(Code.UNAVAILABLE, "it was unloaded while it was being loaded")


class EnsembleMembers:
    """Finds the members of ensembles; an ensemble's own namespace comes first."""

    def __init__(
        self, registry: ModelRegistry, repository: ModelRepository, threads: Threads
    ) -> None:
        self._threads = threads
        self._registry = registry
        self._repository = repository

    async def members(self, known: KnownModel) -> list[ModelId]:
        """The members, on disk or loaded; LoadFailure if one is absent or ambiguous."""
        found = {}
        for name in known.members:
            on_disk = await self._threads.run(self._repository.named, name)
            found[name] = resolve(name, known.id.namespace, {*on_disk, *self._loaded(name)})
        if missing := ", ".join(name for name, member in found.items() if member is None):
            ensemble = known.id.name
            text = f"ensemble {ensemble} contains models that are not available or ambiguous: "
            raise load_failed(ensemble, text + missing)
        return [member for member in found.values() if member is not None]

    def bind(self, ensemble: ModelId, config: ModelConfig) -> LoadedMembers:
        """The loaded versions that the ensemble's steps call now; none for other models.

        Raises LoadFailure if a version is not loaded, or if the models do not fit one another.
        """
        if config.ensemble_scheduling is None:
            return NO_MEMBERS
        try:
            bound = {
                (step.model_name, step.model_version): self._version(ensemble, step)
                for step in config.ensemble_scheduling.step
            }
            check_wiring(config, {key: model.config for key, model in bound.items()})
        except InferenceError as error:
            raise load_failed(ensemble.name, error.message) from None
        return bound

    def _loaded(self, name: str) -> list[ModelId]:
        return [known.id for known in self._registry.named(name) if known.models]

    def _version(self, ensemble: ModelId, step: EnsembleStep) -> Model:
        needs = f"ensemble '{ensemble.name}' depends on '{step.model_name}'"
        member = resolve(step.model_name, ensemble.namespace, self._loaded(step.model_name))
        known = None if member is None else self._registry.get(member)
        if known is None:
            raise InferenceError(Code.INVALID_ARG, f"{needs} which has no loaded version.")
        if step.model_version == LATEST:
            return known.stable or known.models[-1]
        status = known.versions.get(step.model_version)
        if status is None or status.model is None:
            text = f"{needs} whose required version {step.model_version} is not loaded."
            raise InferenceError(Code.INVALID_ARG, text)
        return status.model


class DependencyCycle(InferenceError):
    """Ensembles that need one another.

    Each of `names` needs the next one, and the last name needs the first.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        first, last = names[0], names[-1]
        super().__init__(
            Code.INVALID_ARG,
            f"circular dependency between ensembles: {first} -> ... -> {last} -> {first}",
        )

    def seen_from(self, name: str) -> "DependencyCycle":
        """The same cycle, starting with one of its names."""
        start = self.names.index(name)
        return DependencyCycle(self.names[start:] + self.names[:start])


class LoadFailure(InferenceError):
    """A failed load; `why` is the reason that an ensemble with this member reports.

    `cycle` is set if the reason is a dependency cycle. `by_golden`: golden requests are the reason.
    `versions` are those whose own loads have failed.
    """

    def __init__(
        self,
        code: Code,
        message: str,
        why: str,
        cycle: DependencyCycle | None = None,
        *,
        by_golden: bool = False,
    ) -> None:
        super().__init__(code, message)
        self.why = why
        self.cycle = cycle
        self.by_golden = by_golden
        self.versions: Collection[int] = ()

    def again(self) -> "LoadFailure":
        same = (self.code, self.message, self.why, self.cycle)
        return LoadFailure(*same, by_golden=self.by_golden)


def load_failed(
    name: str, why: str, cycle: DependencyCycle | None = None, *, by_golden: bool = False
) -> LoadFailure:
    """The failure of a version, or of a member that is absent or does not suit its ensemble."""
    text = f"load failed for model '{name}': {why}\n"
    return LoadFailure(Code.INVALID_ARG, text, why, cycle, by_golden=by_golden)


def versions_failed(name: str, errors: Mapping[int, InferenceError]) -> LoadFailure:
    """The failure of a model whose versions have failed, with the reason of each."""
    why = "".join(
        f"version {number} is at UNAVAILABLE state: {error.reason};"
        for number, error in sorted(errors.items())
    )
    by_golden = all(isinstance(error, GoldenFailure) for error in errors.values())
    failure = load_failed(name, why, by_golden=by_golden)
    failure.versions = [n for n, error in errors.items() if error is not INTERRUPTED]
    return failure


def poll_failed(name: str, why: str) -> LoadFailure:
    """The failure of a load that has not begun: the model is absent or its config invalid."""
    text = f"failed to load '{name}', failed to poll from model repository: {why}"
    return LoadFailure(Code.INTERNAL, text, why)


def cause(error: InferenceError) -> str:
    """The reason of an error, without the text about the load."""
    return error.why if isinstance(error, LoadFailure) else error.message


def member_failed(ensemble: str, member: KnownModel, error: InferenceError) -> LoadFailure:
    """The failure of an ensemble whose member has failed."""
    cycle = error.cycle if isinstance(error, LoadFailure) else None
    cycle = error if isinstance(error, DependencyCycle) else cycle
    if cycle is not None and ensemble in cycle.names:
        cycle = cycle.seen_from(ensemble)
        return load_failed(ensemble, cycle.message, cycle)
    why = cause(error)
    needs = f"ensemble '{ensemble}' depends on '{member.id.name}'"
    if member.members:
        how = f"which is not valid. Model '{member.id.name}' failed with error: {why}"
    else:
        how = f"which has no loaded version. Model '{member.id.name}' loading failed with error: "
        how += why
    return load_failed(ensemble, f"{needs} {how}")


@contextmanager
def kept_alive(models: Iterable[Model]) -> Iterator[None]:
    """Hold versions within the block, even if they are replaced meanwhile."""
    kept = list(models)
    for model in kept:
        model.hold()
    try:
        yield
    finally:
        for model in kept:
            model.release()


def resolve(name: str, namespace: str, candidates: Collection[ModelId]) -> ModelId | None:
    """The model that an ensemble means by a name: of its own namespace, or the only one."""
    own = ModelId(name, namespace)
    if own in candidates:
        return own
    found = [each for each in candidates if each.name == name]
    return found[0] if len(found) == 1 else None


def dependents(name: str, everything: Iterable[KnownModel]) -> list[KnownModel]:
    """The ensembles that call a model of that name, suspended ones included."""
    return [each for each in everything if name in each.members]


def orphans(unloaded: ModelConfig, everything: Iterable[KnownModel]) -> list[KnownModel]:
    """The models that were loaded only for an unloaded ensemble of this config."""
    all_known = list(everything)
    needed = {name for each in all_known if each.source for name in members(each.source.config)}
    return [
        each
        for each in all_known
        if each.implicit and each.id.name in members(unloaded) and each.id.name not in needed
    ]


class MemberWaits:
    """Loads of ensembles that wait for loads of members; a cycle is refused."""

    def __init__(self) -> None:
        self._for: dict[ModelId, ModelId] = {}

    @contextmanager
    def entered(self, ensemble: ModelId, member: ModelId) -> Iterator[None]:
        """The ensemble waits for the member within the block; raises DependencyCycle."""
        chain, at = [ensemble], member
        while at != ensemble and at in self._for:
            chain.append(at)
            at = self._for[at]
        if at == ensemble:
            raise DependencyCycle([each.name for each in chain])
        self._for[ensemble] = member
        try:
            yield
        finally:
            del self._for[ensemble]


def check_members(repository: ModelRepository, config: ModelConfig) -> None:
    """Raise INVALID_ARG for the first problem that a load of the ensemble would have.

    Members with an invalid config, or without configured tensors, are not compared.
    """
    if config.ensemble_scheduling is None:
        return
    for problem in (*_missing(repository, config), *_versions_missing(repository, config)):
        raise InferenceError(Code.INVALID_ARG, problem)
    _refuse_cycle(repository, config, (config.name,))
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


def _refuse_cycle(repository: ModelRepository, config: ModelConfig, path: tuple[str, ...]) -> None:
    for name in members(config):
        if name == path[0]:
            raise DependencyCycle(path)
        member = _read(repository, name) if name not in path else None
        if member is not None:
            _refuse_cycle(repository, member, (*path, name))


def _read(repository: ModelRepository, name: str) -> ModelConfig | None:
    """The config of a member, None if it is invalid; of an ensemble with its response policy."""
    try:
        config = repository.read(name)
        repository.find(name).versions(config.version_policy)
    except InferenceError:
        return None
    decoupled = _calls_decoupled(repository, config, set())
    return replace(config, model_transaction_policy=TransactionPolicy(decoupled=decoupled))


def _calls_decoupled(repository: ModelRepository, config: ModelConfig, seen: set[str]) -> bool:
    """Whether any model that an ensemble calls, directly or not, is decoupled."""
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
