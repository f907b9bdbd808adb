"""Copies of conversations that other replicas have: asleep until their turns come here."""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from gateway.conversations.history import Age, History, MemoryBudget
from gateway.messages import SequenceKey, SequenceTag
from gateway.models.limits import ConversationLimits
from gateway.schedulers.scheduler import Timer

_Natural = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
_CorrelationId = Annotated[int, Meta(ge=0)] | str


class ConversationCopy(msgspec.Struct, array_like=True, frozen=True):
    """The messages of a conversation after a turn, without the brackets of their list.

    `began_ns` and `turns` are its age. Without messages it makes the earlier copies void; without
    an age, too, all of them. Fields are only added at the end, with defaults.
    """

    model: str
    version: _Natural
    tenant: str
    correlation_id: _CorrelationId
    began_ns: _Natural = 0
    turns: _Natural = 0
    tokens: _Natural = 0
    messages: bytes = b""

    @property
    def key(self) -> SequenceKey:
        """The identity of the conversation on its model."""
        return SequenceTag(self.correlation_id, tenant=self.tenant).key

    @property
    def identity(self) -> tuple[str, int, SequenceKey]:
        """The identity of the conversation on all models."""
        return self.model, self.version, self.key

    @property
    def age(self) -> Age:
        """The age of the conversation."""
        return Age(self.began_ns, self.turns)


class _Sleeping(NamedTuple):
    since_ns: int
    history: History


class SleepingCopies:
    """Copies of one model; each is dropped when it has been asleep for the idle time.

    They take room that conversations leave: a new one makes room by dropping older ones only.
    """

    def __init__(
        self, limits: ConversationLimits, clock_ns: Callable[[], int], budget: MemoryBudget
    ) -> None:
        self._limits = limits
        self._clock_ns = clock_ns
        self._budget = budget
        self._kept: OrderedDict[SequenceKey, _Sleeping] = OrderedDict()
        self._alarm = Timer(self._expire)

    def __contains__(self, key: SequenceKey) -> bool:
        return key in self._kept

    @property
    def oldest_ns(self) -> int | None:
        """The time of the oldest one; None without any."""
        return next((each.since_ns for each in self._kept.values()), None)

    def age(self, key: SequenceKey) -> Age:
        """The age of the copy of a conversation; that of none is below all."""
        found = self._kept.get(key)
        return Age(0, 0) if found is None else found.history.age

    def keep(self, copy: ConversationCopy) -> None:
        """Keep a copy, unless a newer one is kept, or there is no room.

        Of two of the same age the later one has the answer that was cut.
        """
        key, size = copy.key, len(copy.messages)
        found = self._kept.get(key)
        if found is not None and copy.began_ns and found.history.age > copy.age:
            return
        self.drop(key)
        if not copy.messages or not self._make_room(size):
            return
        history = History(self._budget)
        history.restore(copy.messages, copy.age, copy.tokens)
        self._kept[key] = _Sleeping(self._clock_ns(), history)
        self._expire()

    def take(self, key: SequenceKey) -> History | None:
        """The history of a conversation that wakes; None without a copy."""
        self._expire()
        found = self._kept.pop(key, None)
        return None if found is None else found.history

    def drop(self, key: SequenceKey) -> None:
        """Drop the copy of a conversation, if there is one."""
        found = self._kept.pop(key, None)
        if found is not None:
            found.history.drop()

    def release(self) -> Iterable[tuple[SequenceKey, _Sleeping]]:
        """Give all away."""
        kept, self._kept = self._kept, OrderedDict()
        return kept.items()

    def adopt(self, other: "SleepingCopies") -> None:
        """Keep those of another version, unless newer ones are kept; the oldest give way."""
        for key, copy in other.release():
            found = self._kept.get(key)
            if found is not None and found.history.age >= copy.history.age:
                copy.history.drop()
                continue
            self.drop(key)
            self._kept[key] = copy
        self._kept = OrderedDict(sorted(self._kept.items(), key=lambda pair: pair[1].since_ns))
        while len(self._kept) > self._limits.count:
            self.drop_oldest()
        self._expire()

    def drop_oldest(self) -> None:
        """Drop the oldest one."""
        self.drop(next(iter(self._kept)))

    def close(self) -> None:
        """Drop all."""
        self._alarm.clear()
        while self._kept:
            self.drop_oldest()

    def _make_room(self, size: int) -> bool:
        limits = self._budget.limits
        if size > limits.each:
            return False
        while self._kept and (
            len(self._kept) >= self._limits.count or self._budget.used + size > limits.total
        ):
            self.drop_oldest()
        return self._budget.used + size <= limits.total

    def _expire(self) -> None:
        now_ns = self._clock_ns()
        while (oldest_ns := self.oldest_ns) is not None:
            until_ns = oldest_ns + self._limits.idle_ns
            if until_ns > now_ns:
                self._alarm.set(until_ns)
                return
            self.drop_oldest()
