"""A server's memory without a server: requests, loads and sleeps at times that a test chooses."""

import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gateway.models.limits import ResidenceRules, Residency
from gateway.models.residence import (
    Change,
    Memory,
    Residence,
    Resident,
    Stage,
    Verb,
)


@dataclass(slots=True)
class Requests:
    """The requests of one model, in execution or waiting; `waiting` are the times of arrival.

    `pinned` is the reason why it stays in memory.
    """

    executing: int = 0
    pinned: str = ""
    waiting: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        return self.executing + len(self.waiting)

    @property
    def present(self) -> bool:
        return bool(len(self) or self.pinned)


class World:
    """Models of a residence, whose changes end when the test has them end.

    The budget is never exceeded. `wakes` are the times of those that began, by model;
    `longest_wait` is that of any request that was executed.
    """

    def __init__(self, budget: Memory, models: Mapping[str, Memory], **rules: object) -> None:
        self.now = 0.0
        self.residence = Residence(budget, lambda: self.now)
        self.models: dict[str, Resident] = {}
        self.requests: dict[str, Requests] = {}
        self.under_way: list[Change] = []
        self.wakes: dict[str, list[float]] = {name: [] for name in models}
        self.longest_wait = 0.0
        self.evictions: Counter[str] = Counter()
        for name, needs in models.items():
            own = {"residency": Residency.ON_DEMAND, "keep_alive_secs": -1} | rules
            requests = self.requests[name] = Requests()
            read = ResidenceRules(**own)  # type: ignore[arg-type]
            self.models[name] = Resident(name, read, needs, requests, load_secs=1.0)
            self.residence.add(self.models[name], awake=False)

    def decide(self) -> None:
        """Begin the changes that are decided; the budget holds in every state."""
        for change in self.residence.decide():
            name = change.resident.name
            if change.verb is Verb.REFUSE:
                self.requests[name].waiting.clear()
                continue
            if change.verb is Verb.WAKE:
                self.wakes[name].append(self.now)
            else:
                self.evictions[change.why] += 1
            self.under_way.append(change)
        for place, most in self.residence.budget.items():
            taken = sum(each.memory.get(place, 0) for each in self.models.values())
            assert taken <= most, (place, taken, most)

    def ask(self, name: str) -> bool:
        """A request; whether it is not refused."""
        model, requests = self.models[name], self.requests[name]
        if model.stage is Stage.AWAKE:
            requests.executing += 1
            return True
        if self.residence.refusal(model) is not None:
            return False
        requests.waiting.append(self.now)
        self.residence.wish(model)
        return True

    def end(self, name: str) -> None:
        """The end of a request in execution."""
        self.requests[name].executing -= 1
        self._left(name)

    def leave(self, name: str) -> None:
        """A client that waits disconnects."""
        self.requests[name].waiting.pop()
        self._left(name)

    def _left(self, name: str) -> None:
        if not self.requests[name]:
            self.residence.used(self.models[name])

    def finish(self, change: Change, *, fails: bool = False) -> None:
        """The end of a change; one that waits for executions does not end before them."""
        requests = self.requests[change.resident.name]
        if change.verb is not Verb.WAKE and requests.executing:
            return
        self.under_way.remove(change)
        if change.verb is not Verb.WAKE:
            naps = change.verb is Verb.SLEEP and bool(change.resident.rests)
            self.residence.slept(change.resident, naps=naps)
            if requests.waiting:
                self.residence.wish(change.resident)
        elif fails:
            requests.waiting.clear()
            self.residence.failed(change.resident, "no weights")
        else:
            self.residence.woken(change.resident, change.resident.needs)
            waits = [self.now - at for at in requests.waiting]
            self.longest_wait = max([self.longest_wait, *waits])
            requests.executing += len(requests.waiting)
            requests.waiting.clear()

    def pass_time(self, secs: float) -> None:
        """Later; every decision that falls due is made at its time."""
        until = self.now + secs
        while (at := self.residence.next_at) <= until:
            self.now = at
            self.decide()
        self.now = until

    def play(self, chance: random.Random) -> None:
        """Any event that may happen now."""
        name = chance.choice(list(self.models))
        requests, kind = self.requests[name], chance.randrange(6)
        if kind == 0:
            self.ask(name)
        elif kind == 1 and requests.executing:
            self.end(name)
        elif kind == 2 and requests.waiting:
            self.leave(name)
        elif kind in (3, 4) and self.under_way:
            self.finish(chance.choice(self.under_way), fails=chance.random() < 0.1)
        else:
            self.pass_time(chance.choice((0.0, 0.5, 20.0, 40.0)))
        self.decide()

    def settle(self) -> None:
        """Let all requests and changes end; fails if a request waits for ever."""
        for _ in range(20 * len(self.models)):
            for name, requests in self.requests.items():
                for _ in range(requests.executing):
                    self.end(name)
            for change in tuple(self.under_way):
                self.finish(change)
            self.decide()
            at = self.residence.next_at
            if not any(self.requests.values()) and not self.under_way:
                return
            if not math.isinf(at) and not self.under_way:
                self.pass_time(at - self.now)
        waiting = {name: each for name, each in self.requests.items() if each.present}
        raise AssertionError(f"requests wait for ever: {waiting}, {self.under_way}")


def lru_misses(trace: Sequence[str], room: int) -> int:
    """The loads of a cache of models that drops the one used least recently."""
    kept: dict[str, None] = {}
    misses = 0
    for name in trace:
        misses += name not in kept
        kept.pop(name, None)
        kept[name] = None
        if len(kept) > room:
            del kept[next(iter(kept))]
    return misses
