"""Requests that may have ended a worker, by their content."""

import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest

log = logging.getLogger("sluice.python")

DEATHS = 2
"""A request is refused after it was executing at the end of this many workers."""
KEPT_SECS = 600.0
MOST = 1024
"""Of more suspects the oldest are forgotten."""


@dataclass(slots=True)
class Suspect:
    """`deaths` so far, the last of them at `seen`; `size` is that of the request's inputs."""

    deaths: int
    seen: float
    size: int


@dataclass(frozen=True, slots=True)
class ExecutionPlan:
    """Indexes of an execution's requests: `groups` execute in turn, `refused` do not execute."""

    groups: Sequence[Sequence[int]]
    refused: Sequence[tuple[int, InferenceError]] = ()


one_group = cache(lambda count: ExecutionPlan((range(count),)))
"""The plan for a number of requests while there is no suspect."""


class Quarantine:
    """Suspects by their content, for ten minutes after the last worker that they ended.

    All requests of an execution become suspects when its worker ends. A suspect then executes
    alone, so a second end proves it guilty, and an answer clears it. `load` identifies the state
    of a model's files.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.suspects: dict[bytes, Suspect] = {}
        self._sizes: set[int] = set()

    def plan(self, load: bytes, requests: Sequence[InferRequest]) -> ExecutionPlan:
        """Groups for the requests of an execution."""
        self._forget_old()
        together: list[int] = []
        alone: list[tuple[int]] = []
        refused = []
        for index, request in enumerate(requests):
            suspect = self._find(load, request)
            if suspect is None:
                together.append(index)
            elif suspect.deaths < DEATHS:
                alone.append((index,))
            else:
                refused.append((index, _refusal(request)))
        return ExecutionPlan([*([together] if together else []), *alone], refused)

    def died(self, load: bytes, requests: Sequence[InferRequest]) -> None:
        """Mark requests as suspects: their worker has ended."""
        for request in requests:
            key = _fingerprint(load, request)
            before = self.suspects.pop(key, None)
            deaths = 1 + (0 if before is None else before.deaths)
            self.suspects[key] = Suspect(deaths, self._clock(), _size(request))
            if deaths >= DEATHS:
                extra = {"model": request.model, "id": request.id, "workers_ended": deaths}
                log.error("request quarantined", extra={**extra, "secs": KEPT_SECS})
        while len(self.suspects) > MOST:
            del self.suspects[next(iter(self.suspects))]
        self._note_sizes()

    def survived(self, load: bytes, requests: Sequence[InferRequest]) -> None:
        """Clear requests: their worker has executed them and is alive."""
        for request in requests:
            if self._find(load, request) is not None:
                del self.suspects[_fingerprint(load, request)]
        self._note_sizes()

    def is_suspect(self, load: bytes, request: InferRequest) -> bool:
        """Whether a request is to execute alone, or not at all."""
        return self._find(load, request) is not None

    def _find(self, load: bytes, request: InferRequest) -> Suspect | None:
        # Most requests need not be hashed: no suspect has as many bytes.
        if _size(request) not in self._sizes:
            return None
        return self.suspects.get(_fingerprint(load, request))

    def _forget_old(self) -> None:
        oldest = self._clock() - KEPT_SECS
        self.suspects = {k: s for k, s in self.suspects.items() if s.seen > oldest}
        self._note_sizes()

    def _note_sizes(self) -> None:
        self._sizes = {suspect.size for suspect in self.suspects.values()}


def _size(request: InferRequest) -> int:
    return sum([len(tensor.raw()) for tensor in request.inputs])


def _fingerprint(load: bytes, request: InferRequest) -> bytes:
    """A hash of inputs and parameters, which are all that a suspect is identified by."""
    found = hashlib.blake2b(load, digest_size=16)
    for tensor in request.inputs:
        data = tensor.raw()
        found.update(repr((tensor.name, tensor.datatype, tensor.shape, len(data))).encode())
        found.update(data)
    found.update(repr(sorted(request.parameters.items())).encode(errors="surrogatepass"))
    return found.digest()


def _refusal(request: InferRequest) -> InferenceError:
    return InferenceError(
        Code.INVALID_ARG,
        f"model '{request.model}' does not execute this request: its worker ended {DEATHS} times "
        f"while executing one with the same inputs and parameters; it is refused for "
        f"{KEPT_SECS / 60:g} minutes",
    )
