"""The models whose requests may be executed twice, and the errors after which that helps."""

from gateway.backend_loader import IN_PYTHON
from gateway.config import ModelConfig
from gateway.errors import AnsweredError, Code, InferenceError, RefusedError
from gateway.observability.statistics import is_timeout

REPLAY = "replay"
"""The parameter of a model whose requests may be executed twice."""
WITH_EFFECTS = frozenset({"python", "ensemble"})
"""Backends whose executions may have effects besides their responses."""


def is_repeatable(config: ModelConfig) -> bool:
    """Whether a request of a model may be executed twice."""
    backend = "ensemble" if config.ensemble_scheduling is not None else config.backend
    has_effects = backend in WITH_EFFECTS or config.runtime == IN_PYTHON
    return not has_effects or config.parameters.get(REPLAY) == "true"


def is_failure(error: InferenceError) -> bool:
    """Whether an error of a replica speaks against the replica, and not of its load."""
    is_of_load = isinstance(error, RefusedError | AnsweredError) or is_timeout(error.message)
    return error.code is Code.UNAVAILABLE and not is_of_load
