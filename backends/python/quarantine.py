"""Requests that may have ended a worker: they execute alone, then not at all."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from gateway.errors import Code, InferenceError
from gateway.messages import InferRequest
from gateway.suspects import ENDS, KEPT_SECS, Suspects

log = logging.getLogger("sluice.python")


@dataclass(frozen=True, slots=True)
class ExecutionPlan:
    """Indexes of an execution's requests: `groups` execute in turn, `refused` do not execute."""

    groups: Sequence[Sequence[int]]
    refused: Sequence[tuple[int, InferenceError]] = ()


one_group = cache(lambda count: ExecutionPlan((range(count),)))
"""The plan for a number of requests while there is no suspect."""


class Quarantine:
    """The suspects among the requests of a model.

    All requests of an execution become suspects when its worker ends. A suspect then executes
    alone, so a second end proves it guilty, and an answer clears it. `load` identifies the state
    of a model's files.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.suspects = Suspects(clock)

    def plan(self, load: bytes, requests: Sequence[InferRequest]) -> ExecutionPlan:
        """Groups for the requests of an execution."""
        together: list[int] = []
        alone: list[tuple[int]] = []
        refused = []
        for index, request in enumerate(requests):
            suspect = self.suspects.find(request, load)
            if suspect is None:
                together.append(index)
            elif suspect.is_refused:
                refused.append((index, _refusal(request)))
            else:
                alone.append((index,))
        return ExecutionPlan([*([together] if together else []), *alone], refused)

    def died(self, load: bytes, requests: Sequence[InferRequest]) -> None:
        """Mark requests as suspects: their worker has ended."""
        worker = object()
        for request in requests:
            suspect = self.suspects.add(request, worker, load)
            if suspect.is_refused:
                extra: dict[str, Any] = {"model": request.model, "id": request.id}
                extra |= {"workers_ended": len(suspect.ended), "secs": KEPT_SECS}
                log.error("request quarantined", extra=extra)

    def survived(self, load: bytes, requests: Sequence[InferRequest]) -> None:
        """Clear requests: their worker has executed them and is alive."""
        for request in requests:
            self.suspects.clear(request, load)

    def is_suspect(self, load: bytes, request: InferRequest) -> bool:
        """Whether a request is to execute alone, or not at all."""
        return self.suspects.find(request, load) is not None


def _refusal(request: InferRequest) -> InferenceError:
    return InferenceError(
        Code.INVALID_ARG,
        f"model '{request.model}' does not execute this request: its worker ended {ENDS} times "
        f"while executing one with the same inputs and parameters; it is refused for "
        f"{KEPT_SECS / 60:g} minutes",
    )
