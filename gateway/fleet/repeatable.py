"""The models whose requests may be executed twice, and the errors after which that helps."""

from gateway.backend_loader import IN_PYTHON
from gateway.config import ModelConfig
from gateway.errors import AnsweredError, Code, InferenceError, Refusal, RefusedError
from gateway.fleet.choice import ReplicaState
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


def lacks_room(error: InferenceError) -> bool:
    """Whether a replica has not executed a request because it has no room for it now."""
    is_of_server = isinstance(error, Refusal) and not error.of_caller
    return is_of_server and not error.lacks_instance and not error.after_steps


def is_refused(error: InferenceError, state: ReplicaState | None) -> bool:
    """Whether a replica has not executed a request for a reason that others do not have.

    A deadline of the request is none.
    """
    is_of_request = isinstance(error, Refusal) and error.of_caller
    is_refusal = isinstance(error, RefusedError) and error.code is Code.UNAVAILABLE
    is_whole = is_refusal and not error.after_steps
    has_left = is_whole and not is_of_request and state is not ReplicaState.READY
    return error.lacks_instance or has_left
