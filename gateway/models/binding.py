"""Which loaded versions does an ensemble work with?"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from gateway.config import ModelConfig
from gateway.config.scheduling import EnsembleStep
from gateway.ensembles.checks import check_wiring
from gateway.ensembles.graph import LATEST
from gateway.errors import Code, InferenceError
from gateway.models.dependencies import resolve
from gateway.models.identity import ModelId
from gateway.models.load_failure import failed
from gateway.models.loading import NO_MEMBERS, LoadedMembers
from gateway.models.lookup import Known, ModelTable
from gateway.models.model import Model
from gateway.models.repository import ModelRepository
from gateway.threads import Threads


class Bindings:
    """Finds the members of ensembles, in their own namespace first."""

    def __init__(self, table: ModelTable, repository: ModelRepository, threads: Threads) -> None:
        self._threads = threads
        self._table = table
        self._repository = repository

    async def members(self, known: Known) -> list[ModelId]:
        """Those of an ensemble, on disk or loaded; LoadFailure if one is neither, or ambiguous."""
        found = {}
        for name in known.members:
            on_disk = await self._threads.run(self._repository.named, name)
            found[name] = resolve(name, known.id.namespace, {*on_disk, *self._loaded(name)})
        if missing := ", ".join(name for name, member in found.items() if member is None):
            ensemble = known.id.name
            text = f"ensemble {ensemble} contains models that are not available or ambiguous: "
            raise failed(ensemble, text + missing)
        return [member for member in found.values() if member is not None]

    def bind(self, ensemble: ModelId, config: ModelConfig) -> LoadedMembers:
        """What its steps call at this moment, none for other models.

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
            raise failed(ensemble.name, error.message) from None
        return bound

    def _loaded(self, name: str) -> list[ModelId]:
        return [known.id for known in self._table.named(name) if known.models]

    def _version(self, ensemble: ModelId, step: EnsembleStep) -> Model:
        needs = f"ensemble '{ensemble.name}' depends on '{step.model_name}'"
        member = resolve(step.model_name, ensemble.namespace, self._loaded(step.model_name))
        known = None if member is None else self._table.get(member)
        if known is None:
            raise InferenceError(Code.INVALID_ARG, f"{needs} which has no loaded version.")
        if step.model_version == LATEST:
            return known.models[-1]
        status = known.versions.get(step.model_version)
        if status is None or status.model is None:
            text = f"{needs} whose required version {step.model_version} is not loaded."
            raise InferenceError(Code.INVALID_ARG, text)
        return status.model


@contextmanager
def held(models: Iterable[Model]) -> Iterator[None]:
    """Keep versions alive within the block, even if they are replaced meanwhile."""
    kept = list(models)
    for model in kept:
        model.hold()
    try:
        yield
    finally:
        for model in kept:
            model.release()
