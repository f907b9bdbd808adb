"""Which models does a model need, and which need it?"""

from collections.abc import Iterable

from gateway.config import ModelConfig
from gateway.models.lookup import Known


def members(config: ModelConfig) -> tuple[str, ...]:
    """The names of the models that an ensemble's steps call; of other models none is known."""
    steps = config.ensemble_scheduling.step if config.ensemble_scheduling is not None else ()
    return tuple(dict.fromkeys(step.model_name for step in steps))


def dependents(name: str, everything: Iterable[Known]) -> list[Known]:
    """The loaded models that need the model of that name."""
    return [each for each in everything if each.source and name in members(each.source.config)]


def orphans(left: ModelConfig, everything: Iterable[Known]) -> list[Known]:
    """The models that only one with this config, which has gone, needed and had loaded."""
    all_known = list(everything)
    return [
        each
        for each in all_known
        if each.implicit
        and each.id.name in members(left)
        and not dependents(each.id.name, all_known)
    ]
