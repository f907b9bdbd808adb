"""Failures of loads: Triton's texts, and the guard around the load of one model."""

import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import TypeVar

from gateway.errors import Code, InferenceError
from gateway.models.repository import ModelId
from gateway.models.table import KnownModel
from gateway.threads import Threads

log = logging.getLogger("sluice.lifecycle")

Found = TypeVar("Found")


class DependencyCycle(InferenceError):
    """Ensembles that need one another: each of `names` needs the next, the last one the first."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        first, last = names[0], names[-1]
        super().__init__(
            Code.INVALID_ARG,
            f"circular dependency between ensembles: {first} -> ... -> {last} -> {first}",
        )

    def seen_from(self, name: str) -> "DependencyCycle":
        """The same cycle, begun with one of its names."""
        start = self.names.index(name)
        return DependencyCycle(self.names[start:] + self.names[:start])


class LoadFailure(InferenceError):
    """A load has failed; `why` is what an ensemble that needs the model says of it.

    `cycle` is there if ensembles that need one another are the reason.
    """

    def __init__(
        self, code: Code, message: str, why: str, cycle: DependencyCycle | None = None
    ) -> None:
        super().__init__(code, message)
        self.why = why
        self.cycle = cycle


def load_failed(name: str, why: str, cycle: DependencyCycle | None = None) -> LoadFailure:
    """A version cannot be loaded, or what an ensemble calls is absent, or does not suit it."""
    return LoadFailure(Code.INVALID_ARG, f"load failed for model '{name}': {why}\n", why, cycle)


def poll_failed(name: str, why: str) -> LoadFailure:
    """The load never began: the model is absent, or its config is no good."""
    text = f"failed to load '{name}', failed to poll from model repository: {why}"
    return LoadFailure(Code.INTERNAL, text, why)


def cause(error: InferenceError) -> str:
    """What is wrong, without what has become of the load."""
    return error.why if isinstance(error, LoadFailure) else error.message


def member_failed(ensemble: str, member: KnownModel, error: InferenceError) -> LoadFailure:
    """What the failure of a member is for an ensemble that needs it."""
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
    """The error that an operation on a model ends with; it is returned, so that others go on."""
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
    """What a blocking function reads of a model's folder; InferenceError if it cannot."""
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
