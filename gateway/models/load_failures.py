"""Failed loads, with Triton's texts, and guards around operations on one model."""

import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import TypeVar

from gateway.errors import Code, InferenceError
from gateway.models.registry import KnownModel
from gateway.models.repository import ModelId
from gateway.threads import Threads

log = logging.getLogger("sluice.lifecycle")

Found = TypeVar("Found")


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

    `cycle` is set if the reason is a dependency cycle.
    """

    def __init__(
        self, code: Code, message: str, why: str, cycle: DependencyCycle | None = None
    ) -> None:
        super().__init__(code, message)
        self.why = why
        self.cycle = cycle


def load_failed(name: str, why: str, cycle: DependencyCycle | None = None) -> LoadFailure:
    """The failure of a version, or of a member that is absent or does not suit its ensemble."""
    return LoadFailure(Code.INVALID_ARG, f"load failed for model '{name}': {why}\n", why, cycle)


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


async def outcome(model: ModelId, operation: Coroutine[None, None, None]) -> InferenceError | None:
    """Run an operation on a model and return its error, so that others continue."""
    try:
        await operation
    except InferenceError as error:
        return error
    except Exception:
        # Around one model load, reload or unload: an error in it must not end the server.
        log.exception("model operation failed", extra={"model": str(model)})
        text = f"loading or unloading model '{model.name}' failed unexpectedly; see the log"
        return InferenceError(Code.INTERNAL, text)
    return None


async def read_folder(threads: Threads, model: ModelId, read: Callable[[ModelId], Found]) -> Found:
    """The result of a blocking read of a model's folder; raises InferenceError."""
    try:
        return await threads.run(read, model)
    except OSError as error:
        raise InferenceError(
            Code.INTERNAL, f"model '{model.name}' cannot be read: {error.strerror}"
        ) from None
    except InferenceError:
        raise
    except Exception:
        # Around one model load: an unforeseen file must not stop the loads of others.
        log.exception("reading failed", extra={"model": str(model)})
        text = f"model '{model.name}' cannot be read; the server's log says why"
        raise InferenceError(Code.INTERNAL, text) from None
