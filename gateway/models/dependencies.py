"""Which models does a model need, and which need it?"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

from gateway.config import ModelConfig
from gateway.errors import Code, InferenceError
from gateway.models.repository import ModelId
from gateway.models.table import Known


def members(config: ModelConfig) -> tuple[str, ...]:
    """The names of the models that an ensemble's steps call; of other models none is known."""
    steps = config.ensemble_scheduling.step if config.ensemble_scheduling is not None else ()
    return tuple(dict.fromkeys(step.model_name for step in steps))


def resolve(name: str, namespace: str, candidates: Collection[ModelId]) -> ModelId | None:
    """The model of that name that an ensemble in the namespace means: its own, or the only one."""
    own = ModelId(name, namespace)
    if own in candidates:
        return own
    found = [each for each in candidates if each.name == name]
    return found[0] if len(found) == 1 else None


def dependents(name: str, everything: Iterable[Known]) -> list[Known]:
    """The ensembles that call a model of that name, also those that wait for it."""
    return [each for each in everything if name in each.members]


def orphans(left: ModelConfig, everything: Iterable[Known]) -> list[Known]:
    """The models that only one with this config, which has gone, needed and had loaded."""
    all_known = list(everything)
    needed = {name for each in all_known if each.source for name in members(each.source.config)}
    return [
        each
        for each in all_known
        if each.implicit and each.id.name in members(left) and each.id.name not in needed
    ]


class Circle(InferenceError):
    """Ensembles that need one another: each of `names` needs the next, the last one the first."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        first, last = names[0], names[-1]
        super().__init__(
            Code.INVALID_ARG,
            f"circular dependency between ensembles: {first} -> ... -> {last} -> {first}",
        )

    def seen_from(self, name: str) -> "Circle":
        """The same circle, begun with one of its names."""
        start = self.names.index(name)
        return Circle(self.names[start:] + self.names[:start])


class Waits:
    """Which ensemble waits for which member to be loaded: nobody may wait for itself."""

    def __init__(self) -> None:
        self._for: dict[ModelId, ModelId] = {}

    @contextmanager
    def entered(self, ensemble: ModelId, member: ModelId) -> Iterator[None]:
        """One waits for the other within the block; Circle if that would never end."""
        chain, at = [ensemble], member
        while at != ensemble and at in self._for:
            chain.append(at)
            at = self._for[at]
        if at == ensemble:
            raise Circle([each.name for each in chain])
        self._for[ensemble] = member
        try:
            yield
        finally:
            del self._for[ensemble]
