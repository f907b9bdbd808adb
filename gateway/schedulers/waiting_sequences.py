"""Sequences that wait in front of their scheduler, since they have not begun."""

import asyncio
from dataclasses import dataclass, field

from gateway.messages import InferRequest, SequenceKey
from gateway.schedulers.execution import Entry
from gateway.schedulers.parts import OpenSequences
from gateway.schedulers.queue import QueuedRequest


@dataclass(slots=True)
class _Waiting:
    """The first request of a sequence, which is queued, and those after it."""

    first: QueuedRequest
    others: list[Entry] = field(default_factory=list)

    @property
    def open(self) -> bool:
        """Whether further requests may follow."""
        last = self.others[-1] if self.others else self.first.entry
        return last.request.sequence is not None and not last.request.sequence.end


class WaitingSequences:
    """The open sequences of a scheduler, and those that wait in front of it.

    Implements `OpenSequences`.
    """

    def __init__(self, inner: OpenSequences) -> None:
        self._inner = inner
        self._waiting: dict[SequenceKey, _Waiting] = {}
        self._none_waits = asyncio.Event()
        self._none_waits.set()

    def continues(self, request: InferRequest) -> bool:
        """Whether the request continues an open sequence, here or there."""
        tag = request.sequence
        found = None if tag is None else self._waiting.get(tag.key)
        if found is None or tag is None:
            return self._inner.continues(request)
        return found.open and not tag.start

    @property
    def are_open(self) -> bool:
        """Whether any sequence is open, here or there."""
        return self._inner.are_open or any(each.open for each in self._waiting.values())

    async def ended(self) -> None:
        """Wait until no sequence is open, here or there."""
        while self.are_open:
            await self._none_waits.wait()
            await self._inner.ended()

    def begin(self, first: QueuedRequest) -> None:
        """The first request of a sequence is queued."""
        tag = first.entry.request.sequence
        if tag is not None and tag.correlation_id:
            self._waiting[tag.key] = _Waiting(first)
            self._none_waits.clear()

    def follow(self, entry: Entry) -> QueuedRequest | None:
        """Add a request to its sequence; returns the first one if the sequence waits here."""
        tag = entry.request.sequence
        found = None if tag is None else self._waiting.get(tag.key)
        if found is None:
            return None
        found.others.append(entry)
        return found.first

    def take(self, first: QueuedRequest) -> list[Entry]:
        """The further requests of a sequence, which waits here no more."""
        tag = first.entry.request.sequence
        found = None if tag is None else self._waiting.get(tag.key)
        if tag is None or found is None or found.first is not first:
            return []
        del self._waiting[tag.key]
        if not self._waiting:
            self._none_waits.set()
        return found.others
