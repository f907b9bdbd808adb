"""Decisions about models in memory: a model that is wished for wakes, others sleep for it."""

import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from operator import itemgetter
from typing import NamedTuple, Protocol

from gateway.errors import RetryLater
from gateway.models.limits import ResidenceRules, Residency

Memory = Mapping[str, int]
"""Bytes at each place, HOST or a GPU; the place MODELS has 1 for each model."""
MODELS, HOST = "models", "host"

STAY_SECS = 30.0
"""A model stays for this time before it sleeps for another one."""
RESERVE_SECS = 30.0
"""After this wait for room no later wish for the same places is granted first."""
PATIENCE_SECS = 60.0
"""After this wait for room models in use are closed to new requests."""
LOOK_SECS = 1.0
"""A model in use without requests of its own is looked at once in this time."""
MOST_FAILURES, FAILURE_SECS, REFUSAL_SECS = 3, 600.0, 60.0
"""After that many failed wakes in that time, requests are refused for a time."""
GIB = 1 << 30


class InUse(Protocol):
    """The use of a version."""

    def __len__(self) -> int:
        """The number of its requests in flight."""

    @property
    def present(self) -> bool:
        """Whether it would be missed now: by requests, sequences, ensembles, or a rollout."""

    @property
    def pinned(self) -> str:
        """The reason why it stays in memory now, such as a rollout; "" if it may sleep."""


class Stage(StrEnum):
    """The stages of a model that may sleep."""

    ASLEEP = "asleep"
    WAKING = "waking"
    AWAKE = "awake"
    FALLING = "falling asleep"


@dataclass(slots=True, eq=False)
class Resident:
    """A version in a `Residence`, which alone changes its stage.

    It `needs` memory while it is not asleep, and `rests` while it `naps`. `load_secs` is the
    duration of its last load, 0 if it is not known. It `is_new` until it serves; one that
    `is_retired` ends with its last request.
    """

    name: str
    rules: ResidenceRules
    needs: Memory
    usage: InUse
    rests: Memory = field(default_factory=dict)
    load_secs: float = 0.0
    stage: Stage = Stage.ASLEEP
    naps: bool = False
    is_new: bool = False
    is_retired: bool = False
    since: float = 0.0
    used_at: float = 0.0
    wished_at: float | None = None
    failures: deque[float] = field(default_factory=lambda: deque(maxlen=MOST_FAILURES))
    reason: str = ""
    refused_until: float = -math.inf

    @property
    def memory(self) -> Memory:
        """The memory that it has."""
        if self.naps:
            return self.rests
        return {} if self.stage is Stage.ASLEEP else self.needs

    @property
    def stays(self) -> bool:
        """Whether it never sleeps once it is awake."""
        return bool(self.usage.pinned) or self.rules.residency is not Residency.ON_DEMAND

    @property
    def retry_secs(self) -> int:
        """The time after which a refused request may succeed: that of a load."""
        return max(1, math.ceil(self.load_secs))

    def idle(self, now: float, wished: "Resident | None") -> bool:
        """Whether it may sleep for another one without an effect on requests.

        A version need not stay for another version of its model that is new.
        """
        is_before = wished is not None and wished.is_new and wished.name == self.name
        return (is_before or now - self.since >= STAY_SECS) and not self.usage.present


class Verb(Enum):
    """Changes of a resident."""

    WAKE = auto()
    SLEEP = auto()
    DROP = auto()
    REFUSE = auto()


class Change(NamedTuple):
    """A change to be made: load or empty its slots, drop what naps in them, end its requests."""

    verb: Verb
    resident: Resident
    why: str = ""


class Residence:
    """Decides which models are in memory, within a budget; `now` is the clock.

    `wish`, `withdraw` and `used` follow requests; `decide` returns the changes to be made, and
    `woken`, `failed` and `slept` follow their ends. Without another call the next decision is due
    at `next_at`. `lru_age_secs` is the time since the last use of the model that slept last for
    another one.
    """

    def __init__(self, budget: Memory, now: Callable[[], float]) -> None:
        self.budget = budget
        self.residents: dict[Resident, None] = {}
        self.lru_age_secs: float | None = None
        self._now = now

    # Residents.

    def refusal_of_size(self, name: str, needs: Memory, replaced: Collection[Resident]) -> str:
        """The reason why a version could never be in memory in place of those, or ""."""
        leaving = {*replaced, *(each for each in self.residents if each.is_retired)}
        for place, most in self.budget.items():
            taken = sum(
                each.needs.get(place, 0)
                for each in self.residents
                if each.rules.residency is Residency.ALWAYS and each not in leaving
            )
            if needs.get(place, 0) > most - taken:
                always = f", of which other versions always need {amount(place, taken)}"
                text = f"model '{name}' needs {amount(place, needs[place])} of {place} memory"
                budget = f"the budget is {amount(place, most)}{always if taken else ''}"
                fix = "enlarge the budget, or correct the model's parameter 'memory_mb'"
                return f"{text}, {budget}; {fix}"
        return ""

    def add(self, resident: Resident, *, awake: bool) -> None:
        """Take a version into account."""
        self.residents[resident] = None
        resident.since = resident.used_at = self._now()
        if awake:
            self.woken(resident, resident.needs)

    def remove(self, resident: Resident) -> None:
        """Forget a version that has been closed."""
        self.residents.pop(resident, None)

    # Requests.

    def refusal(self, resident: Resident) -> RetryLater | None:
        """The error of requests that cannot wait for a model that is asleep."""
        now = self._now()
        if now < resident.refused_until:
            text = f"model '{resident.name}' could not be loaded into memory {MOST_FAILURES} times"
            wait_secs = math.ceil(resident.refused_until - now)
            return RetryLater(f"{text}: {resident.reason}", wait_secs)
        return None if self._is_possible(resident) else self.no_room(resident)

    def no_room(self, resident: Resident) -> RetryLater:
        """The error of a request that has waited, or would wait, for room in vain."""
        short = self._beyond(resident)
        rows = [_row(each) for each in self.residents if _has(each, short or resident.needs)]
        text = f"model '{resident.name}' is not in memory and there is no room"
        found = f": {', '.join(rows)}" if rows else ""
        return RetryLater(text + found, resident.retry_secs)

    def wish(self, resident: Resident) -> None:
        """Wake a model as soon as there is room."""
        if resident.wished_at is None and resident.stage in (Stage.ASLEEP, Stage.FALLING):
            resident.wished_at = self._now()

    def withdraw(self, resident: Resident) -> None:
        """Forget a wish; a load under way continues."""
        resident.wished_at = None

    def used(self, resident: Resident) -> bool:
        """The last request in flight has ended; whether `decide` is due sooner than `next_at`."""
        resident.used_at, resident.wished_at = self._now(), None
        soon = 0 <= resident.rules.keep_alive_secs < LOOK_SECS
        return soon or any(each.wished_at is not None for each in self.residents)

    # Ends of changes.

    def woken(self, resident: Resident, needs: Memory) -> None:
        """A model is awake, with that memory; what exceeds the budget is not taken into account."""
        most = {place: min(needs[place], self.budget.get(place, math.inf)) for place in needs}
        resident.needs = {place: int(found) for place, found in most.items()}
        now = self._now()
        if resident.used_at <= resident.since:  # no request has ended meanwhile
            resident.used_at = now
        resident.stage, resident.wished_at, resident.since = Stage.AWAKE, None, now
        resident.failures.clear()

    def may_sleep(self, resident: Resident) -> None:
        """A version that no request has woken may sleep for another one at once."""
        resident.since = -math.inf

    def failed(self, resident: Resident, reason: str) -> None:
        """A model could not be loaded; after some failures its requests are refused for a time."""
        now = self._now()
        resident.stage, resident.wished_at, resident.naps = Stage.ASLEEP, None, False
        resident.reason = reason
        resident.failures.append(now)
        oldest = resident.failures[0]
        if len(resident.failures) == MOST_FAILURES and now - oldest <= FAILURE_SECS:
            resident.refused_until = now + REFUSAL_SECS

    def slept(self, resident: Resident, *, naps: bool) -> None:
        """A model is asleep; it `naps` if its instances have not been closed."""
        resident.stage, resident.naps = Stage.ASLEEP, naps

    # Decisions.

    def decide(self) -> Sequence[Change]:
        """The changes to be made now; they count as begun."""
        now = self._now()
        for each in self.residents:
            if each.stage is Stage.AWAKE and each.usage.present:
                each.used_at = now
        changes = [self._sleep(each, "keep_alive") for each in self._expired(now)]
        excess = self._beyond() - self._coming()
        changes += self._make_room(excess, now)
        changes += self._grant(now)
        return changes

    @property
    def next_at(self) -> float:
        """The time of the next decision; infinite if none is due without another call."""
        now = self._now()
        return min((at for at in self._times(now) if at > now), default=math.inf)

    def _times(self, now: float) -> Iterator[float]:
        wishes = [each.wished_at for each in self.residents if each.wished_at is not None]
        for at in wishes:
            yield at + RESERVE_SECS
            yield at + PATIENCE_SECS
        for each in self.residents:
            if each.stage is not Stage.AWAKE or each.rules.residency is not Residency.ON_DEMAND:
                continue
            if wishes or self._beyond():
                yield each.since + STAY_SECS
            if each.rules.keep_alive_secs >= 0:
                in_use = each.usage.present
                secs = max(each.rules.keep_alive_secs, LOOK_SECS if in_use else 0.0)
                yield (now if in_use else each.used_at) + secs

    def _expired(self, now: float) -> list[Resident]:
        return [
            each
            for each in self.residents
            if each.stage is Stage.AWAKE
            and not (each.stays or each.is_new)
            and 0 <= each.rules.keep_alive_secs <= now - each.used_at
            and not each.usage.present
        ]

    def _grant(self, now: float) -> Iterator[Change]:
        """Changes for the wishes, the oldest first.

        A wish that cannot be granted yet keeps later ones from models that sleep for it; from room
        that is free it keeps them once models fall asleep for it, or it has waited for long.
        """
        contested: set[str] = set()
        reserved: set[str] = set()
        wishes = [(each.wished_at, each) for each in self.residents if each.wished_at is not None]
        for wished_at, resident in sorted(wishes, key=itemgetter(0)):
            places = resident.needs.keys() & self.budget.keys()
            if resident.stage is not Stage.ASLEEP or places & reserved:
                continue
            if not self._is_possible(resident):
                resident.wished_at = None
                yield Change(Verb.REFUSE, resident)
            elif not (short := self._beyond(resident)):
                resident.stage, resident.naps = Stage.WAKING, False
                resident.since, resident.wished_at = now, None
                yield Change(Verb.WAKE, resident)
            else:
                lacking, waited = short - self._coming(), now - wished_at
                made: list[Change] = []
                if not places & contested:
                    may_close = waited >= PATIENCE_SECS
                    made = self._make_room(lacking, now, resident, may_close=may_close)
                yield from made
                contested |= places
                if made or not lacking or waited >= RESERVE_SECS:
                    reserved |= places

    def _make_room(
        self,
        lacking: Memory,
        now: float,
        wished: Resident | None = None,
        *,
        may_close: bool = False,
    ) -> list[Change]:
        """Have the fewest models sleep that give enough memory; none if all together do not."""
        if not lacking:
            return []
        chosen: list[Resident] = []
        for each in self._candidates(now, wished, may_close=may_close):
            if _has(each, lacking) and not _enough(chosen, lacking):
                chosen.append(each)
        if not _enough(chosen, lacking):
            return []
        for each in reversed(tuple(chosen)):  # spare those used last
            rest = [other for other in chosen if other is not each]
            if _enough(rest, lacking):
                chosen = rest
        for each in chosen:
            self.lru_age_secs = now - each.used_at
        return [self._sleep(each, "room") for each in chosen]

    def _candidates(
        self, now: float, wished: Resident | None, *, may_close: bool
    ) -> list[Resident]:
        """The models that may sleep for others: those that nap, idle ones, then any."""
        free = [each for each in self.residents if not each.stays]
        awake = [each for each in free if each.stage is Stage.AWAKE]
        napping = [each for each in free if each.stage is Stage.ASLEEP and each.naps]
        idle = sorted(
            (each for each in awake if each.idle(now, wished)), key=lambda each: each.used_at
        )
        busy = [each for each in awake if now - each.since >= STAY_SECS and each not in idle]
        closed = sorted(busy, key=lambda each: each.since) if may_close else []
        return sorted(napping, key=lambda each: each.used_at) + idle + closed

    def _sleep(self, resident: Resident, why: str) -> Change:
        resident.stage = Stage.FALLING
        return Change(Verb.DROP if resident.naps else Verb.SLEEP, resident, why)

    # Memory.

    def _is_possible(self, resident: Resident) -> bool:
        """Whether there is room once every model sleeps that may; only those that serve count."""
        serving = [each for each in self.residents if not (each.is_new or each.is_retired)]
        stay = [each for each in serving if each.stays and each is not resident]
        return all(
            resident.needs.get(place, 0) <= most - sum(each.memory.get(place, 0) for each in stay)
            for place, most in self.budget.items()
        )

    def _beyond(self, wished: Resident | None = None) -> Counter[str]:
        """The memory beyond the budget, with that of a model that is to wake."""
        found: Counter[str] = Counter()
        for each in self.residents:
            found.update(each.needs if each is wished else each.memory)
        return Counter({p: found[p] - most for p, most in self.budget.items() if found[p] > most})

    def _coming(self) -> Counter[str]:
        """The memory that models give that fall asleep."""
        found: Counter[str] = Counter()
        for each in self.residents:
            if each.stage is Stage.FALLING:
                found.update(each.memory)
        return found


def _has(resident: Resident, places: Memory) -> bool:
    return any(resident.memory.get(place, 0) for place in places)


def _enough(chosen: Sequence[Resident], lacking: Memory) -> bool:
    return all(
        sum(each.memory.get(place, 0) for each in chosen) >= n for place, n in lacking.items()
    )


def _row(resident: Resident) -> str:
    """A model in words, such as `a (12.1 GiB, 3 requests)`."""
    if resident.stays:
        return f"{resident.name} ({resident.usage.pinned or resident.rules.residency})"
    sizes = [n for place, n in resident.memory.items() if place != MODELS]
    size = f"{amount(HOST, sum(sizes))}, " if sizes else ""
    return f"{resident.name} ({size}{len(resident.usage)} requests)"


def amount(place: str, count: int) -> str:
    """An amount of memory in words."""
    return str(count) if place == MODELS else f"{count / GIB:.1f} GiB"
