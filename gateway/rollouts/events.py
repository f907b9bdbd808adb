"""Events of rollouts and of live versions, for readers over every wire."""

import asyncio
import math
import secrets
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from enum import StrEnum
from itertools import islice
from typing import Any, NamedTuple

import msgspec

from gateway.models.index import index_rows
from gateway.models.registry import ModelRegistry, VersionState
from gateway.policy.caller import Caller
from gateway.rollouts.rollout import GUARDRAIL, OPEN, RUNNING, Rollout, Transition

MOST_EVENTS = 1000
"""Events that are kept for readers that reconnect; a reader further behind is dropped."""

MEASURE_SECS = 1.0
"""Time between two events of evidence."""


class RolloutEventKind(StrEnum):
    """The kinds of events.

    `reset` has the whole state; `step` is a transition into a step, `state` any other one, and
    `breach` comes before the one of a guardrail. `evidence` has the state of a rollout, `live` the
    state of a version.
    """

    RESET = "reset"
    STATE = "state"
    STEP = "step"
    BREACH = "breach"
    EVIDENCE = "evidence"
    LIVE = "live"


class RolloutEvent(NamedTuple):
    """An event with its members of JSON; one without an `id` cannot be asked for again."""

    kind: RolloutEventKind
    data: Mapping[str, Any]
    id: str = ""


class RolloutEvents:
    """The latest events, and their readers. `rollouts` describes all rollouts.

    Evidence is not kept: a reader gets the latest of each model.
    """

    def __init__(
        self, registry: ModelRegistry, rollouts: Callable[[], Sequence[Mapping[str, Any]]]
    ) -> None:
        self.readers = 0
        """Streams that are being read."""
        self._registry = registry
        self._rollouts = rollouts
        self._server = secrets.token_hex(4)
        self._events: deque[RolloutEvent] = deque(maxlen=MOST_EVENTS)
        self._count = self._measurements = 0
        self._measured_at = -math.inf
        self._evidence: dict[str, tuple[int, RolloutEvent]] = {}
        self._versions: Mapping[tuple[str, str], Mapping[str, str]] = {}
        self._is_closed = False
        self._changed = asyncio.Event()

    def publish(self, kind: RolloutEventKind, data: Mapping[str, Any]) -> None:
        """Add an event."""
        self._count += 1
        self._events.append(RolloutEvent(kind, data, self._id))
        self._notify()

    def transition(self, model: str, rollout: Rollout | None, change: Transition) -> None:
        """Add the events of a transition."""
        data = {"model": model, **msgspec.to_builtins(change)}
        if rollout is not None:
            data |= {"stable": rollout.stable, "candidate": rollout.candidate}
        if change.by.startswith(GUARDRAIL):
            self.publish(RolloutEventKind.BREACH, data)
        kind = RolloutEventKind.STEP if change.state in RUNNING else RolloutEventKind.STATE
        self.publish(kind, data)

    def measure(self, now: float) -> None:
        """Replace the evidence of open rollouts, once a second at most; `now` is monotonic."""
        if not self.readers or now - self._measured_at < MEASURE_SECS:
            return
        self._measured_at = now
        self._measurements += 1
        for state in self._rollouts():
            if state["state"] in OPEN:
                event = RolloutEvent(RolloutEventKind.EVIDENCE, state)
                self._evidence[state["model"]] = self._measurements, event
        self._notify()

    def close(self) -> None:
        """End every stream."""
        self._is_closed = True
        self._notify()

    async def follow(self) -> None:
        """Publish the changes of versions while there are readers, until cancelled."""
        while True:
            if self.readers:
                self._look()
            await self._registry.changed()

    async def read(
        self, last_id: str = "", caller: Caller | None = None
    ) -> AsyncGenerator[RolloutEvent]:
        """The events after that of an id, or a `reset` and the events after it.

        It ends with the server, once the caller is no longer valid, and for a reader that is too
        slow.
        """
        self._look()
        seen, measured = self._number(last_id), self._measurements
        self.readers += 1
        try:
            if seen is None:
                seen = self._count
                yield RolloutEvent(RolloutEventKind.RESET, self._whole(), self._id)
            while not self._is_closed and (caller is None or caller.valid):
                changed = self._changed
                kept_from = self._count - len(self._events)
                if seen < kept_from:
                    return
                found = [*islice(self._events, seen - kept_from, None)]
                found += [each for at, each in self._evidence.values() if at > measured]
                seen, measured = self._count, self._measurements
                for event in found:
                    yield event
                if not found:
                    await changed.wait()
        finally:
            self.readers -= 1

    @property
    def _id(self) -> str:
        return f"{self._server}-{self._count}"

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _number(self, last_id: str) -> int | None:
        """The number of an event of this server that is kept, or directly before those."""
        server, _, number = last_id.partition("-")
        if server != self._server or not (number.isascii() and number.isdigit()):
            return None
        found = int(number)
        return found if self._count - len(self._events) <= found <= self._count else None

    def _whole(self) -> dict[str, Any]:
        return {"rollouts": self._rollouts(), "versions": [*self._versions.values()]}

    def _look(self) -> None:
        """Publish the versions whose state is not that of the last look."""
        before, self._versions = self._versions, self._found_versions()
        for key, row in self._versions.items():
            if before.get(key) != row:
                self.publish(RolloutEventKind.LIVE, row)
        for key, row in before.items():
            if key not in self._versions:
                gone = {**row, "state": VersionState.UNAVAILABLE.value, "reason": "unloaded"}
                self.publish(RolloutEventKind.LIVE, gone)

    def _found_versions(self) -> Mapping[tuple[str, str], Mapping[str, str]]:
        return {
            (row.name, row.version): {
                "model": row.name,
                "version": row.version,
                "state": str(row.state),
                "reason": row.reason,
            }
            for row in index_rows(self._registry, (), lambda name: "")
        }
