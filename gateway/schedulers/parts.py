"""Parts of schedulers that only some of them have: preparations, sequences, limited queues."""

from collections.abc import Iterable
from typing import Protocol

from gateway.backend import Instance
from gateway.messages import InferRequest
from gateway.schedulers.execution import Entry


class Preparation(Protocol):
    """Measurements or files that a scheduler needs for each instance."""

    async def prepare(self, instance: Instance) -> None:
        """Measure an idle instance, or read files; comes before `add`. Raises InferenceError."""


class OpenSequences(Protocol):
    """The sequences of a model that have begun and not ended."""

    def continues(self, request: InferRequest) -> bool:
        """Whether the request continues an open sequence."""

    @property
    def are_open(self) -> bool:
        """Whether any sequence is open."""

    async def ended(self) -> None:
        """Wait until no sequence is open."""


class LimitedQueue(Protocol):
    """A queue with a limit for each level, which others may count instead of `admit`."""

    def check(self, request: InferRequest) -> None:
        """Raise InferenceError if the request does not fit, as `admit` without the limit."""

    def queued(self, level: int) -> Iterable[Entry]:
        """The queued requests of a level."""
