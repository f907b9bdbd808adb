"""The waits for one version that may be asleep, and their ends."""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gateway.errors import InferenceError, RetryLater
from gateway.models.kept_facts import KeptFacts
from gateway.models.memory import LoadStart
from gateway.models.model import Model
from gateway.models.residence import Residence, Resident, Stage
from gateway.stream import ResponseStream


@dataclass(frozen=True, slots=True)
class ReadFiles:
    """The files of a version: their folder, size and facts, and the identity of its `load`."""

    folder: Path
    load: str
    facts: KeptFacts | None
    size: int


class Waker:
    """A version in memory, or asleep. Implements `Waking`.

    `wish` wakes it as soon as there is room, `measured` is the most memory that was measured. A
    load under way is expected to end at `expected_at`; `began` is the begin of its first one. The
    future `end` is that of its next wake, or of its wait for room: None, or the error.
    """

    def __init__(
        self,
        residence: Residence,
        wish: Callable[[Resident], None],
        resident: Resident,
        files: ReadFiles,
    ) -> None:
        self.resident = resident
        self.files = files
        self.measured = {} if files.facts is None else dict(files.facts.memory)
        self.began: LoadStart | None = None
        self.expected_at: float | None = None
        self.end: asyncio.Future[InferenceError | None] | None = None
        self._residence = residence
        self._wish = wish

    def check(self) -> None:
        refusal = self._residence.refusal(self.resident)
        if refusal is not None:
            raise refusal

    def wish(self, stream: ResponseStream) -> None:
        secs = self.resident.load_secs or math.inf
        stream.model_at = self.expected_at or asyncio.get_running_loop().time() + secs
        self._wish(self.resident)

    def report(self, error: InferenceError | None) -> None:
        """End the waits for its wake."""
        end, self.end = self.end, None
        if end is not None:
            end.set_result(error)

    def late(self) -> RetryLater:
        """The error of a request that has waited for as long as it may."""
        resident = self.resident
        if resident.stage is not Stage.WAKING:
            return self._residence.no_room(resident)
        text = (
            f"model '{resident.name}' is being loaded into memory, and a request waits for "
            f"{resident.rules.wake_secs} s at most ('wake_secs')"
        )
        return RetryLater(text, resident.retry_secs)


def end_waiting(
    model: Model, error: Callable[[], InferenceError], before_ns: float = math.inf
) -> None:
    """End the requests that no instance has, of those submitted before."""
    for record, stream in tuple(model.requests.items()):
        if not record.started_ns and record.submitted_ns <= before_ns:
            stream.abandon(error())
