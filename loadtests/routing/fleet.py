"""A fleet in virtual time: arrivals, routers, engines, and the loads that they announce."""

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from gateway.fleet.announcer import LOAD_SECS, PROMPT_SECS
from loadtests.routing.engine import BLOCKS, Engine, Served
from loadtests.routing.policies import COST, RULES, Others, Router
from loadtests.routing.workload import Prompt

TURN_SECS = 1.0
"""The time between two turns of a router; those of all routers are spread over it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """A fleet and its routers. From `grow_at` seconds on there are `grow_to` replicas.

    A replica announces its load `prompt_secs` after the arrival of a prompt, and `load_secs` after
    another change, whichever is sooner.
    """

    replicas: int
    routers: int = 1
    policy: str = COST
    load_secs: float = LOAD_SECS
    prompt_secs: float = PROMPT_SECS
    seed: int = 1
    blocks: int = BLOCKS
    grow_to: int = 0
    grow_at: float = math.inf
    recalls: bool = True


@dataclass(frozen=True, slots=True)
class Outcome:
    """The requests of a run, each with its times."""

    served: Sequence[Served]

    @property
    def first_secs(self) -> Sequence[float]:
        """The times to the first token, in order of arrival."""
        return [each.first_at - each.prompt.at for each in self.served]

    @property
    def mean(self) -> float:
        """The mean time to the first token."""
        return sum(self.first_secs) / len(self.served)

    @property
    def p99(self) -> float:
        """The time to the first token that 1 % of the requests exceed."""
        return quantile(self.first_secs, 0.99)

    @property
    def whole_p90(self) -> float:
        """The time to the last token that 10 % of the requests exceed."""
        return quantile([each.last_at - each.prompt.at for each in self.served], 0.9)

    @property
    def cached_share(self) -> float:
        """The share of prompt blocks that were in a cache."""
        blocks = sum(len(each.prompt.keys) for each in self.served)
        return sum(each.cached for each in self.served) / max(1, blocks)

    @property
    def moved(self) -> int:
        """The requests that moved to another replica before they began."""
        return sum(each.moves > 0 for each in self.served)


def quantile(values: Sequence[float], share: float) -> float:
    """A value that the rest of the values exceeds."""
    return sorted(values)[min(len(values) - 1, math.ceil(share * len(values)) - 1)]


class Fleet:
    """One run; the time is that of arrivals, of the ends of steps, and of announcements."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._engines: list[Engine] = []
        self._routers = [Router(each, options.seed + each) for each in range(options.routers)]
        self._random = Random(options.seed)
        self._events: list[tuple[float, bool, int]] = []
        self._due: dict[int, float] = {}
        self._turn, self._turn_secs = 0, TURN_SECS / options.routers
        self._add(options.replicas, 0.0)
        self._others = Others(self._engines, options.seed)

    def run(self, prompts: Sequence[Prompt], advance: Callable[[], None]) -> Outcome:
        """Run requests in order of arrival until all have ended; `advance` notes each."""
        served = []
        for prompt in prompts:
            self._run_until(prompt.at)
            served.append(self._arrive(prompt))
            advance()
        while any(each.in_flight for each in self._engines):
            self._run_until(self._turn * self._turn_secs)
        return Outcome(served)

    def _arrive(self, prompt: Prompt) -> Served:
        served = Served(prompt, 0, 0)
        if self._options.policy == COST:
            router = self._random.choice(self._routers)
            self._send(served, router, router.choose(prompt, prompt.at), prompt.at)
            return served
        number = RULES[self._options.policy](self._others, prompt)
        self._others.note(prompt, number)
        self._push(served, number, prompt.at)
        return served

    def _send(self, served: Served, router: Router, number: int, now: float) -> None:
        router.send(served, number, now)
        self._push(served, number, now)

    def _push(self, served: Served, number: int, now: float) -> None:
        engine = self._engines[number]
        engine.push(served, now)
        self._plan_end(number)
        self._change(number, now + min(self._options.prompt_secs, self._options.load_secs))

    def _plan_end(self, number: int) -> None:
        ends_at = self._engines[number].ends_at
        if ends_at < math.inf:
            heapq.heappush(self._events, (ends_at, False, number))

    def _change(self, number: int, due: float) -> None:
        """Announce the load of a replica at the latest when it is due."""
        if self._options.policy == COST and due < self._due.get(number, math.inf):
            self._due[number] = due
            heapq.heappush(self._events, (due, True, number))

    def _run_until(self, now: float) -> None:
        """Run all engines, and the turns of the routers between."""
        while self._turn * self._turn_secs <= now:
            at = self._turn * self._turn_secs
            self._advance_until(at)
            self._take_turn(self._routers[self._turn % len(self._routers)], at)
            self._turn += 1
        self._advance_until(now)

    def _advance_until(self, now: float) -> None:
        while self._events and self._events[0][0] <= now:
            at, announces, number = heapq.heappop(self._events)
            if announces:
                if self._due.get(number) == at:  # else it was announced sooner
                    self._announce(number, at)
                continue
            engine = self._engines[number]
            if engine.ends_at != at:
                continue  # an arrival has shortened these steps
            engine.advance()
            self._plan_end(number)
            self._change(number, at + self._options.load_secs)

    def _announce(self, number: int, now: float) -> None:
        """A replica announces its load and its prefixes to all routers."""
        self._due.pop(number, None)
        engine = self._engines[number]
        changes = engine.prefixes.take_changes()
        for router in self._routers:
            router.announce(number, engine.load(router.number, now), changes)

    def _take_turn(self, router: Router, now: float) -> None:
        """Choose anew for the unbegun requests of one router."""
        options = self._options
        if now >= options.grow_at and len(self._engines) < options.grow_to:
            self._add(options.grow_to - len(self._engines), now)
        if options.policy != COST or not options.recalls:
            return
        for served, here, to in router.moves(now):
            if self._engines[here].recall(served):
                self._change(here, now + options.load_secs)
                router.recalled(served, here)
                served.moves += 1
                self._send(served, router, to, now)

    def _add(self, count: int, now: float) -> None:
        options, first = self._options, len(self._engines)
        self._engines += [Engine(options.routers, blocks=options.blocks) for _ in range(count)]
        if options.policy == COST:
            for number in range(first, len(self._engines)):
                self._announce(number, now)
